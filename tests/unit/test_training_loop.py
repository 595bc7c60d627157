"""One step of the two training loops: what the loss is scaled by, and which dropout is drawn; when a
run evaluates, ends an epoch and stops early.
"""

import contextlib
import itertools
import resource
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from one_rank import one_rank
from safetensors.torch import load_file, save_file

import real_model_example as program
from distributed_training.cli.parse import parse_arguments
from distributed_training.data.batches import StepBatch, train_state
from distributed_training.errors import Preempted
from distributed_training.model.prepare import copy_to_device
from distributed_training.rank_shares import RankCounts
from distributed_training.ranks.context import ONE_NODE, Nodes
from distributed_training.run.run import Run
from distributed_training.strategies.gradients import gradient_norm
from distributed_training.strategies.objects import TrainingObjects
from distributed_training.strategies.table import STRATEGIES
from distributed_training.train_state import EvaluationPlan, TrainState


@pytest.fixture
def ctx():
    with one_rank() as context:
        yield context


class Engine(torch.nn.Linear):
    """What train_epoch_deepspeed uses of DeepSpeed's engine."""

    set_gradient_accumulation_boundary = step = get_global_grad_norm = MagicMock()

    def backward(self, loss, scale_wrt_gas):
        loss.backward()


@pytest.fixture
def one_step(ctx, monkeypatch):
    """one_step() trains a layer on three micro-batches; it returns the weight, the gradients of the
    micro-batches, the norm in metrics.jsonl, and the seed of each forward pass.
    """
    seeds = []

    def loss(model, inputs, labels, tokens, positions, factor):
        seeds.append(torch.initial_seed())
        value = model(inputs.float()).square().sum() / tokens

        def check(received):
            assert received == factor  # what backward multiplies the loss by

        value.register_hook(check)
        return value

    monkeypatch.setattr(program, "next_token_loss", loss)

    def run(precision="fp32", train_epoch=program.train_epoch_ddp, step=0, ctx=ctx):
        torch.manual_seed(0)
        model, gradients, run = Engine(4, 1, bias=False), [], MagicMock()
        model.weight.register_hook(lambda gradient: gradients.append(gradient.clone()))
        optimizer = torch.optim.SGD(model.parameters())
        scaler, flag = scaler_of(ctx, precision), torch.zeros((), dtype=torch.bool)
        objects = TrainingObjects(STRATEGIES["dp"], model, optimizer, scaler, flag)
        micro_batches = [(torch.full((2, 4), n + 1), torch.ones(2, 4), None) for n in range(3)]
        state = TrainState(total_steps=9, num_sequences=99, global_batch=6, step=step)
        run.manager.stop_requested.return_value = False
        training = parse_arguments(["--max_grad_norm", "0.5", "--lr", "0.1"]).training
        run.objects, run.state, run.manager.is_due.return_value = objects, state, False
        train_epoch(run, [StepBatch(micro_batches, tokens=24)], training, ctx)
        norm = run.log.log_step.call_args.args[2]
        return model.weight.detach(), gradients, norm, seeds[-3:]

    return run


def scaler_of(ctx, precision: str) -> torch.amp.GradScaler:
    """The scaler of a dp run in this precision."""
    ctx = replace(ctx, precision=precision)
    spec = MagicMock()
    spec.load.return_value = torch.nn.Linear(1, 1)
    settings = parse_arguments([])
    return program.build_ddp(STRATEGIES["dp"], settings, ctx, spec, MagicMock()).scaler


def test_the_update_is_clipped(one_step):
    torch.manual_seed(0)
    before = Engine(4, 1, bias=False).weight.detach()
    after, _, norm, _ = one_step()
    assert norm > 0.5
    # SGD's update is the learning rate times the gradient, whose norm is clipped to 0.5.
    assert torch.linalg.vector_norm(after - before).item() == pytest.approx(0.1 * 0.5, rel=1e-4)


def test_fp16_scales_the_loss_and_not_the_update(one_step):
    weight, gradients, norm, _ = one_step("fp32")
    assert norm > 0.5  # clipped, so the norm of scaled gradients would change the update
    scaled_weight, scaled, scaled_norm, _ = one_step("fp16")
    for gradient, large in zip(gradients, scaled, strict=True):
        assert torch.equal(large, gradient * 2.0**16)
    assert torch.equal(scaled_weight, weight) and scaled_norm == norm
    assert torch.equal(one_step("bf16")[1][0], gradients[0])


def test_the_norm_is_that_of_all_gradients():
    """A rank of FSDP may hold nothing of a parameter."""
    model = torch.nn.ParameterList(torch.zeros(64, number) for number in range(3))
    for number, parameter in enumerate(model):
        parameter.grad = torch.full_like(parameter, -number - 1.0)
    found = gradient_norm(model).item()
    assert found == pytest.approx((64 * 2**2 + 128 * 3**2) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("train_epoch", [program.train_epoch_ddp, program.train_epoch_deepspeed])
def test_each_step_micro_batch_and_rank_draws_its_own_dropout(ctx, one_step, train_epoch):
    *_, seeds = one_step(train_epoch=train_epoch)
    *_, of_next_step = one_step(train_epoch=train_epoch, step=1)
    second = replace(ctx, launch=replace(ctx.launch, rank=1))
    *_, of_rank_1 = one_step(train_epoch=train_epoch, ctx=second)
    assert len({*seeds, *of_next_step, *of_rank_1}) == 9


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_the_first_update_copies_no_page_of_mapped_weights(tmp_path):
    save_file({"weight": torch.ones(1024, 1024)}, tmp_path / "model.safetensors")
    layer = torch.nn.Linear(1024, 1024, bias=False)
    layer.weight.data = load_file(tmp_path / "model.safetensors")["weight"]
    before = page_faults()
    copy_to_device(layer, torch.device("cpu"))
    copied = page_faults()
    layer.weight.data.add_(1)
    pages = layer.weight.nbytes // resource.getpagesize()
    assert copied - before >= pages > 10 * (page_faults() - copied)
    assert layer.weight.eq(2).all()


def state_of(**values) -> TrainState:
    return TrainState(total_steps=6, num_sequences=10, global_batch=4, **values)


def test_the_last_step_of_an_epoch_has_the_remaining_sequences():
    state, by_steps, seen = state_of(), state_of(evaluations=EvaluationPlan(every=4)), []
    while not state.finished:
        state.advance()
        by_steps.advance()
        due = (state.evaluation_is_due, by_steps.evaluation_is_due)
        seen.append((state.samples, state.epoch, *due))
    assert seen == [
        *((4, 1, False, False), (8, 1, False, False), (10, 2, True, False)),
        *((14, 2, False, True), (18, 2, False, False), (20, 3, True, True)),
    ]


def test_early_stopping_counts_evaluations_without_improvement():
    state = state_of(evaluations=EvaluationPlan(every=1, patience=2))
    state.add_evaluation(1.0)  # before training: not the best
    seen = []
    for loss in (2.0, 2.5, 1.5, float("nan"), 1.6):
        state.advance()
        state.add_evaluation(loss)
        seen.append((state.best["waited"], state.stopped_early))
        if loss == 1.5:
            state.add_evaluation(loss)  # a resumed run may repeat it, which does not count
    assert seen == [(0, False), (1, False), (0, False), (1, False), (2, True)]
    assert state.best["loss"] == 1.5 and state.best["step"] == 3 and state.finished


def test_an_evaluation_of_the_same_weights_is_not_counted():
    """After skipped steps only, or repeated by a resumed run; the early stop is decided again."""
    state = state_of(evaluations=EvaluationPlan(every=2, patience=1))
    state.advance()
    state.add_evaluation(2.0)
    for _ in range(2):
        state.skip()
        state.add_evaluation(2.0)
        assert (state.best["waited"], state.stopped_early) == (0, False)
    state.skip()
    state.advance()
    state.add_evaluation(2.0)
    assert (state.best["waited"], state.stopped_early) == (1, True)
    state.stopped_early = False  # as after a resume
    state.add_evaluation(2.0)
    assert (state.best["waited"], state.stopped_early) == (1, True)
    # Checkpoints of earlier versions do not have the step of the last evaluation.
    state = state_of(step=3, best={"loss": 2.0, "step": 2, "waited": 0}, skipped_steps=[3])
    state.add_evaluation(2.0)
    assert state.best["waited"] == 0
    state.advance()
    state.add_evaluation(2.0)
    assert state.best == {"loss": 2.0, "step": 2, "waited": 1, "evaluated": 4}


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stop_signal_while_texts_are_generated_ends_the_run_there(stopped):
    """The resumed run repeats the evaluation and generates all texts."""
    log, texts = MagicMock(), [{"prompt": "a", "text": "ab"}, {"prompt": "c", "text": "cd"}]
    prompts = MagicMock(texts=("a", "c"))
    prompts.continue_all.return_value = texts[:1] if stopped else texts
    run = MagicMock(prompts=prompts, log=log, datasets=MagicMock(stream=None))
    run.stop.side_effect = Preempted(None)
    with pytest.raises(Preempted) if stopped else contextlib.nullcontext():
        Run.generate(run, None, None)
    assert log.log_generated.call_count == (not stopped)


@pytest.mark.parametrize("step, said", [(2, "steps 3 to 6"), (6, "No step is left: 6 are done")])
def test_a_run_names_the_steps_that_follow(ctx, capsys, step, said):
    run = SimpleNamespace(state=state_of(step=step), objects=MagicMock())
    run.state.ranks = RankCounts([{"from_step": 1, "sequences": [4]}])
    Run.announce(run, ctx, eval_only=False)
    assert said in capsys.readouterr().out


def test_a_resumed_run_continues_the_counters():
    settings = parse_arguments(["--batch_size", "4", "--max_steps", "6"])
    one_rank = SimpleNamespace(world_size=1, nodes=ONE_NODE)
    state = state_of(tokens=64, training_seconds=1.0, first_loss=3.0, last_loss=2.0)
    state.advance()
    saved = state.counters() | {"rank_sequences": [{"from_step": 1, "sequences": [4]}]}
    assert saved["step"] == 1 and saved["samples"] == 4 and saved["tokens"] == 64
    resumed = train_state(saved, SimpleNamespace(num_sequences=10), settings.training, one_rank)
    assert resumed.counters() == saved


def test_a_resumed_run_repeats_the_shares_that_its_run_chose():
    """Those of the next step and of later ones; with other ranks or shares it starts anew."""
    two_ranks = SimpleNamespace(world_size=2, nodes=Nodes(1, (0, 0)))
    chosen = [{"from_step": 1, "sequences": [4, 4]}, {"from_step": 7, "sequences": [6, 2]}]

    def resumed(ctx, *flags):
        training = parse_arguments(["--batch_size", "4", "--max_steps", "9", *flags]).training
        counters = {**state_of(step=5).counters(), "rank_sequences": chosen}
        return train_state(counters, SimpleNamespace(num_sequences=99), training, ctx)

    ranks = resumed(two_ranks, "--rank_shares", "auto").ranks
    assert [*itertools.islice(ranks.from_step(6), 3)] == [[4, 4], [6, 2], [6, 2]]
    for flags, expected in (((), [4, 4]), (("--rank_shares", "1,3"), [2, 6])):
        assert resumed(two_ranks, *flags).ranks.at(9) == expected
    three_ranks = SimpleNamespace(world_size=3, nodes=Nodes(1, (0, 0, 0)))
    assert resumed(three_ranks, "--rank_shares", "auto").ranks.at(9) == [4, 4, 4]
