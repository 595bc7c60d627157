"""--compile_loss: loss and gradients are those of the eager code, and of one graph for a shape."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from distributed_training import loss_chunks
from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import MissingRequirement
from distributed_training.loss_chunks import IGNORED
from distributed_training.model import compiled_loss, loss
from distributed_training.model.compiled_loss import CompiledOutputLayer
from distributed_training.ranks import compiler
from distributed_training.ranks.process_group import configure_torch
from distributed_training.run.start_log import check_machine

TOKENS, HIDDEN, VOCABULARY = 37, 16, 101  # 101 is no multiple of 16
TARGETS = 29  # the tokens that count


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Chunks of 10 tokens, the last one of 7. Each test compiles graphs of its own."""
    monkeypatch.setitem(loss_chunks.LOGITS_CHUNK, "cpu", 10 * VOCABULARY)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled(monkeypatch):
    """The operations that are otherwise compiled."""
    monkeypatch.setattr(compiled_loss, "_compiled", compiled_loss._cross_entropy)


def losses_of(kind, dtype, bias, alignment=1, with_gradients=True) -> list[torch.Tensor]:
    """The loss of an output layer, and the gradients of its input, weight and bias."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    hidden = 3 * torch.randn(1, TOKENS, HIDDEN)
    targets = torch.randint(0, VOCABULARY, (1, TOKENS))
    targets[0, ::5] = IGNORED
    if bias:  # the logits of GPT-2 are as far from 0
        head.bias.data -= 100
    head, hidden = head.to(torch.bfloat16).to(dtype), hidden.to(torch.bfloat16).to(dtype)
    hidden.requires_grad_()
    if dtype == torch.float64:
        logits = F.linear(hidden, head.weight, head.bias).flatten(0, 1)
        value = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
    else:
        head.__class__ = kind
        padded = partial(loss._loss_and_gradients, alignment=alignment)
        with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(with_gradients):
            patch.setattr(loss, "_loss_and_gradients", padded)
            value = head(hidden, targets, torch.tensor(TARGETS), torch.tensor(8.0))
    gradients = torch.autograd.grad(value, [hidden, *head.parameters()]) if with_gradients else []
    return [value.detach().double(), *(gradient.double() for gradient in gradients)]


def distances(found, right) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)]


CASES = pytest.mark.parametrize("bias, alignment", [(False, 1), (True, 1), (True, 16)])


def check_fp32(bias, alignment):
    compiled, eager = (
        losses_of(kind, torch.float32, bias, alignment)
        for kind in (CompiledOutputLayer, loss.OutputLayer)
    )
    assert max(distances(compiled, eager)) < 4e-7
    [without] = losses_of(CompiledOutputLayer, torch.float32, bias, alignment, False)
    assert without.item() == pytest.approx(eager[0].item(), rel=2e-7)


def check_bf16(bias, alignment):
    """As close to the exact gradients as the eager code."""
    exact, compiled, eager = (
        losses_of(kind, dtype, bias, alignment)
        for kind, dtype in (
            (None, torch.float64),
            (CompiledOutputLayer, torch.bfloat16),
            (loss.OutputLayer, torch.bfloat16),
        )
    )
    assert compiled[0].item() == pytest.approx(eager[0].item(), rel=4e-7)
    pairs = zip(distances(compiled[1:], exact[1:]), distances(eager[1:], exact[1:]), strict=True)
    assert all(found < 1.02 * usual for found, usual in pairs)


@CASES
@pytest.mark.parametrize("check", [check_fp32, check_bf16])
def test_the_operations_compute_the_loss_of_the_eager_code(uncompiled, check, bias, alignment):
    check(bias, alignment)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_fp32, check_bf16])
def test_the_kernels_compute_the_loss_of_the_eager_code(check):
    check(True, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, of_gradient",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),  # as on a GPU
    ],
)
def test_the_gradient_replaces_logits_of_its_dtype(dtype, of_gradient):
    """The kernels allocate at most one other tensor of their size."""
    from torch._inductor.utils import run_and_get_code

    logits, targets = torch.randn(7, VOCABULARY, dtype=dtype), torch.arange(-1, 6)
    scale = torch.tensor(0.5)
    _, right, _ = loss.cross_entropy(logits.clone(), targets, scale, of_gradient, True)
    compute = partial(compiled_loss.cross_entropy, scale=scale, dtype=of_gradient)
    (_, found, factor), [code] = run_and_get_code(compute, logits, targets, with_gradient=True)
    allocated = code.count(f"empty_strided_cpu((7, {VOCABULARY})")
    assert allocated == (dtype != of_gradient) == (found.data_ptr() != logits.data_ptr())
    assert found.dtype == of_gradient and factor.flatten().tolist() == [0] + 6 * [0.5]
    torch.testing.assert_close(found[1:], right[1:])


def test_one_graph_for_each_shape(monkeypatch):
    """Also inside of a forward pass that --compile compiles, where the loop over chunks is eager."""
    counter, outer = CompileCounter(), CompileCounter()
    compiled = torch.compile(compiled_loss._cross_entropy, backend=counter, fullgraph=True)
    monkeypatch.setattr(compiled_loss, "_compiled", compiled)
    monkeypatch.setitem(loss_chunks.COMPILED_LOGITS, "cpu", 0)
    head = nn.Linear(HIDDEN, VOCABULARY)
    head.__class__ = CompiledOutputLayer
    head.forward = torch.compile(head.forward, backend=outer, dynamic=False)
    for _ in range(2):
        head(torch.randn(1, TOKENS, HIDDEN), torch.ones(1, TOKENS).long(), torch.tensor(9))
    assert counter.frame_count == 2  # of 10 tokens and of 7


def test_shapes_over_the_recompile_limit_are_computed_eagerly(monkeypatch):
    counter = CompileCounter()
    compiled = torch.compile(compiled_loss._cross_entropy, backend=counter, dynamic=False)
    monkeypatch.setattr(compiled_loss, "_compiled", compiled)
    with torch._dynamo.config.patch(cache_size_limit=1):
        check_fp32(True, 1)
    assert counter.frame_count == 1


def test_fp16_takes_the_eager_code(monkeypatch):
    """It scales the derivative before it rounds it."""
    monkeypatch.setattr(compiled_loss, "_compiled", None)
    compiled, eager = (
        losses_of(kind, torch.float16, False) for kind in (CompiledOutputLayer, loss.OutputLayer)
    )
    assert all(map(torch.equal, compiled, eager))


@pytest.mark.parametrize("flag, one_length", [("--compile_loss", False), ("--compile", True)])
def test_infinity_compiles_a_loss_of_several_lengths(monkeypatch, flag, one_length):
    """Its blocks would need a graph for each layer, so that --compile has one length."""
    configured = []
    monkeypatch.setattr(compiler, "configure_compiler", lambda _, one: configured.append(one))
    settings = parse_arguments(["--strategy", "infinity", "--precision", "fp32", flag])
    device = torch.device("cpu")
    configure_torch(device, settings.strategy, settings.training, settings.model)
    assert configured == [one_length]


@pytest.mark.parametrize("flag", ["--compile_loss", "--compile"])
def test_the_flag_is_refused_without_a_compiler(monkeypatch, flag):
    monkeypatch.setenv("CXX", "a_missing_compiler")
    settings = parse_arguments([flag])
    with pytest.raises(MissingRequirement, match=f"{flag}: .*compiler.*leave it out"):
        check_machine(settings.strategy, settings.training, settings.model, "cpu")


@pytest.mark.parametrize(
    "flags, needed_by",
    [
        ([], None),
        (["--compile_loss"], "--compile_loss"),
        (["--compile"], "--compile"),
        (["--compile", "--compile_loss"], "--compile"),
    ],
)
def test_the_flag_that_needs_a_compiler(flags, needed_by):
    assert parse_arguments(flags).model.compiler_flag == needed_by
