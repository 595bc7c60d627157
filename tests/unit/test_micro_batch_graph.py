"""--cuda_graph: losses and gradients equal those of the eager loop, whatever is recorded.

A CPU has no CUDA graphs: `Rerun` does to memory what they do. tools/benchmarks/gpu_check.sh records
real ones.
"""

import contextlib
import gc
import inspect
import itertools
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from one_rank import one_rank
from transformers import GPT2Config, GPT2LMHeadModel

import real_model_example as program
from distributed_training.cli.parse import parse_arguments
from distributed_training.data.batches import StepBatch
from distributed_training.errors import UserError
from distributed_training.loss_chunks import IGNORED
from distributed_training.model.loss import add_loss
from distributed_training.ranks.process_group import configure_torch
from distributed_training.run.step_meter import create_meter
from distributed_training.strategies.ddp.micro_batch_graph import (
    MOST_SHAPES,
    WARM_UP,
    CudaRecording,
    MicroBatchGraphs,
)
from distributed_training.strategies.objects import TrainingObjects
from distributed_training.strategies.table import STRATEGIES
from distributed_training.train_state import TrainState

CONFIG = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 40}
ROWS, STEPS = 3, 9


@pytest.fixture
def ctx():
    with one_rank() as context:
        yield context


class Rerun:
    """A recording that calls the function again.

    As with a CUDA graph, `capture` computes nothing. `replay` writes to the tensors that `capture`
    has left, whatever the parameters have as gradients meanwhile, and attaches none.
    """

    def __init__(self, model, replays=None, error=None):
        self.parameters, self.error = [*model.parameters()], error
        self.replays = [] if replays is None else replays

    def gradients(self):
        return [p.grad for p in self.parameters]

    def attach(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def capture(self, compute):
        self.compute, self.before = compute, self.gradients()
        values = [None if g is None else g.clone() for g in self.before]
        with torch.random.fork_rng(devices=[]):  # nothing is drawn
            self.loss = compute()
        self.written = self.gradients()
        for gradient, value in zip(self.written, values, strict=True):
            gradient.copy_(torch.nan if value is None else value)
        self.loss.fill_(torch.nan)
        if self.error:  # backward has reached some of the parameters
            self.parameters[-1].grad = self.before[-1]
            raise self.error
        return self.loss

    def replay(self):
        attached = self.gradients()
        self.attach(self.before)
        self.loss.copy_(self.compute())
        for written, gradient in zip(self.written, self.gradients(), strict=True):
            written.copy_(gradient)
        self.attach(attached)
        self.replays.append(self)


def new_model(dropout=0.1):
    torch.manual_seed(0)
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    model = GPT2LMHeadModel(GPT2Config(**CONFIG, **dict.fromkeys(names, dropout)))
    add_loss(model)
    return model.train()


def micro_batch(length, seed, with_positions=False):
    """One of random tokens, of which some have no loss."""
    torch.manual_seed(seed)
    inputs = torch.randint(CONFIG["vocab_size"], (ROWS, length))
    labels = inputs.masked_fill(torch.rand(ROWS, length) < 0.3, IGNORED)
    return inputs, labels, torch.randint(length, (ROWS, length)) if with_positions else None


def step_batches(accumulation, lengths):
    """The steps of a run; the last has one micro-batch, with rows that the loss ignores."""
    numbers = itertools.count()
    found = [
        [micro_batch(lengths[n % len(lengths)], n) for n in itertools.islice(numbers, accumulation)]
        for _ in range(STEPS)
    ]
    last = micro_batch(lengths[0], seed=999)
    last[1][1:] = IGNORED
    return [StepBatch(each, tokens=1) for each in [*found, [last]]]


def objects_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainingObjects(STRATEGIES["dp"], model, optimizer)


def train(ctx, steps, new_recording=None, dropout=0.1):
    """Train with the script's loop; return losses, gradient norms, weights, and the run."""
    model, run = new_model(dropout), MagicMock()
    objects = objects_of(model)
    if new_recording:
        compute = partial(program.forward_and_backward, objects, ctx)
        objects.graphs = MicroBatchGraphs(compute, model, lambda: new_recording(model))
    run.objects, run.manager.is_due.return_value = objects, False
    run.state = TrainState(total_steps=99, num_sequences=99, global_batch=1)
    run.manager.stop_requested.return_value = False
    training = parse_arguments(["--max_grad_norm", "0.5", "--lr", "0.01"]).training
    program.train_epoch_ddp(run, steps, training, ctx)
    logged = [(call.args[0].item(), call.args[2].item()) for call in run.log.log_step.mock_calls]
    return logged, [p.detach() for p in model.parameters()], run


def assert_equal(found, expected):
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("lengths", [[8], [8, 12]], ids=str)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_recorded_micro_batches_train_as_the_eager_loop(ctx, accumulation, lengths, dropout):
    steps, replays = step_batches(accumulation, lengths), []
    eager = train(ctx, steps, dropout=dropout)
    recorded = train(ctx, steps, lambda model: Rerun(model, replays), dropout)
    assert_equal(recorded, eager)
    # Each length, as the first micro-batch of a step and as a later one.
    assert len({*replays}) == len(lengths) * min(accumulation, 2)
    phases = [call.args[0] for call in recorded[2].meter.mark.mock_calls]
    assert phases.count("backward") == accumulation * STEPS + 1
    assert phases.count("forward") == phases.count("backward") - len(replays)
    of_warm_up = phases[: WARM_UP * (2 + 2 * accumulation)]
    assert of_warm_up.count("forward") == WARM_UP * accumulation


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_without_memory_for_a_graph_all_is_computed_eagerly_once(ctx, capsys, fails_at):
    """The first, second, … capture fails: of a first micro-batch, of a later one."""
    steps, made, replays = step_batches(3, [8, 12]), [], []

    def new_recording(model):
        error = torch.OutOfMemoryError() if len(made) == fails_at else None
        made.append(Rerun(model, replays, error))
        return made[-1]

    found = train(ctx, steps, new_recording)
    assert_equal(found, train(ctx, steps))
    assert len(made) == fails_at + 1 and bool(replays) == bool(fails_at)
    graphs = found[2].objects.graphs
    assert not graphs.recorded and not graphs.gradients  # their memory is free
    said = capsys.readouterr()
    assert (said.out + said.err).count("--cuda_graph") == 1


def test_what_cannot_be_recorded_ends_the_run_with_the_cause(ctx):
    """Not with the error that the end of such a capture raises."""
    error = RuntimeError("failed due to a previous error during capture")
    error.__context__ = RuntimeError("operation not permitted\nmore")
    with pytest.raises(UserError, match=r"\(operation not permitted\): leave the flag out"):
        train(ctx, step_batches(1, [8]), lambda model: Rerun(model, error=error))


def test_a_parameter_that_only_some_micro_batches_train_is_refused():
    model = torch.nn.ParameterList([torch.ones(1), torch.ones(1)])

    def compute(batch, valid_tokens, factor, mark):
        used = model[: batch[0].shape[1]]  # of a length of 1 only the first
        sum(p.sum() for p in used).backward()
        return torch.zeros(())

    graphs = MicroBatchGraphs(compute, model, lambda: MagicMock(capture=lambda f: f()))
    with pytest.raises(UserError, match="the same parameters: leave the flag out"):
        for length in [1] * (WARM_UP + 2) + [2] * (WARM_UP + 1):
            batch = torch.zeros(1, length), torch.zeros(1, length), None
            graphs(batch, torch.ones(()), torch.ones(()), MagicMock())
            for p in model:
                p.grad = None


def test_an_error_of_our_own_is_no_failed_capture(ctx):
    with pytest.raises(ZeroDivisionError):
        train(ctx, step_batches(1, [8]), lambda model: Rerun(model, error=ZeroDivisionError()))


class Calls:
    """Calls forward_and_backward() with and without recordings, on models that are equal."""

    def __init__(self, ctx):
        self.replays, self.models = [], [new_model(), new_model()]
        computes = [
            partial(program.forward_and_backward, objects_of(model), ctx) for model in self.models
        ]
        model = self.models[1]
        self.graphs = MicroBatchGraphs(computes[1], model, lambda: Rerun(model, self.replays))
        self.computes = [computes[0], self.graphs]

    def step(self, batch, tokens=7.0, factor=1.0):
        """A step of one micro-batch; returns the loss, after the gradients were compared."""
        losses = []
        for compute in self.computes:
            torch.manual_seed(int(tokens))
            losses.append(compute(batch, torch.tensor(tokens), torch.tensor(factor), MagicMock()))
        pairs = zip(*(model.parameters() for model in self.models), strict=True)
        assert torch.equal(*losses) and all(torch.equal(a.grad, b.grad) for a, b in pairs)
        # Autograd's nodes of an eager micro-batch, which a capture cannot use, must not live on.
        assert not any(loss.requires_grad for loss in losses)
        for model in self.models:
            model.zero_grad(set_to_none=True)
        return losses[1]


def test_a_replay_reads_all_that_differs_between_micro_batches(ctx):
    """The tokens of the whole step, the loss scale of fp16, positions; a loss is kept."""
    calls = Calls(ctx)
    losses = [calls.step(micro_batch(8, n, n % 2), 5.0 + n, 2.0**n) for n in range(12)]
    assert len({*calls.replays}) == 2 and len(calls.replays) == 12 - 2 * WARM_UP
    assert len({loss.item() for loss in losses}) == 12


def test_more_shapes_are_computed_eagerly(ctx):
    calls = Calls(ctx)
    for _ in range(WARM_UP + 2):
        for length in range(2, MOST_SHAPES + 4):
            calls.step(micro_batch(length, length))
    assert len({*calls.replays}) == len(calls.graphs.recorded) == MOST_SHAPES


def test_the_measured_step_is_an_eager_one():
    """The allocator does not see what a replay needs."""
    memory, state = MagicMock(device=torch.device("cpu")), TrainState(50, 99, 1, step=7)
    for graphs, expected in ((None, 50), (MagicMock(eager_steps=WARM_UP), 7 + WARM_UP)):
        step_memory = MagicMock(objects=SimpleNamespace(graphs=graphs))
        assert create_meter(MagicMock(), memory, step_memory, state).measured_step == expected


def test_no_node_of_autograd_outlives_a_micro_batch(ctx):
    """A capture would wait for the default stream, which created the node, and fail."""
    model, batch = new_model(), micro_batch(8, 0)
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    for node in nodes:
        node.metadata["old"] = True  # a node that is created later has none
    gc.disable()  # nor may it live on in a cycle
    try:
        factor = torch.tensor(1.0)
        loss = program.forward_and_backward(objects_of(model), ctx, batch, factor, factor, print)
        del nodes, node
        edges = map(torch.autograd.graph.get_gradient_edge, model.parameters())
        assert loss.isfinite() and not any("old" in edge.node.metadata for edge in edges)
    finally:
        gc.enable()


def test_build_ddp_lets_the_graphs_compute_with_its_objects(ctx, monkeypatch):
    monkeypatch.setattr(program, "prepare", MagicMock())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    spec = MagicMock(unused=frozenset())
    spec.load.return_value = new_model()
    for flags, has_graphs in (([], False), (["--cuda_graph"], True)):
        settings = parse_arguments(flags)
        objects = program.build_ddp(settings.strategy, settings, ctx, spec, MagicMock())
        assert bool(objects.graphs) == has_graphs
    assert objects.graphs.compute.args[0] is objects
    assert [*objects.graphs.parameters] == [*objects.model.parameters()]


@pytest.mark.parametrize(
    "flags",
    [
        "--strategy fsdp",
        "--strategy zero2",
        "--compile",
        "--compile_loss",
        "--gradient_checkpointing",
    ],
)
def test_refused_with_other_flags(flags):
    with pytest.raises(UserError, match=r"--cuda_graph.*leave"):
        parse_arguments(["--cuda_graph", *flags.split()])


def test_a_replay_runs_the_hooks_of_an_eager_model():
    flags = ["--cuda_graph", "--replay", "2", "--output_dir", "runs/a"]
    assert not parse_arguments(flags).training.cuda_graph


@pytest.mark.parametrize("device, ranks, needs", [("cpu", 1, "a GPU"), ("cuda", 2, "one rank")])
def test_refused_on_other_machines(monkeypatch, device, ranks, needs):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    settings = parse_arguments(["--cuda_graph"])
    with pytest.raises(UserError, match=f"--cuda_graph needs {needs}.*leave it out"):
        configure_torch(torch.device(device), STRATEGIES["dp"], settings.training, settings.model)


def test_a_cuda_graph_is_recorded_as_torch_documents_it(monkeypatch):
    """With torch.cuda replaced."""
    signature, cuda, captures = inspect.signature(torch.cuda.graph), MagicMock(), []

    @contextlib.contextmanager
    def graph(*args, **options):
        captures.append(signature.bind(*args, **options).arguments)
        yield

    monkeypatch.setattr(torch, "cuda", cuda)
    cuda.graph = graph
    recording = CudaRecording(pool := (0, 1))
    assert recording.capture(lambda: 5) == 5
    recording.replay()
    expected = {"cuda_graph": recording.graph, "pool": pool, "capture_error_mode": "thread_local"}
    assert captures == [expected]
    recording.graph.replay.assert_called_once_with()
