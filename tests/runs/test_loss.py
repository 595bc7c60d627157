"""The loss, computed in chunks of the logits; a forward pass that does not wait for a GPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from operations import Operations
from torch import nn

from distributed_training import loss_chunks, patches
from distributed_training.data.batches import IGNORED
from distributed_training.model import loss, weights
from real_model_example import next_token_loss

TOKENS, HIDDEN, VOCABULARY = 37, 16, 101
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16},
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    # Without the patch, transformers compares token ids with the padding's.
    **{"max_position_embeddings": 64, "pad_token_id": 0},
}
GPT2_SIZES = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
GPT2 = transformers.GPT2Config(vocab_size=VOCABULARY, **GPT2_SIZES)
LLAMA = transformers.LlamaConfig(**SIZES)


@pytest.fixture(autouse=True)
def setting(monkeypatch):
    """Ten tokens at a time; and no check of the positions, which on the meta device have no values."""
    patches.replace_packed_sequence_check(isolate=False)
    patches.skip_padding_check()
    monkeypatch.setitem(loss_chunks.LOGITS_CHUNK, "cpu", 10 * VOCABULARY)


def output_layer(dtype, bias=False) -> nn.Linear:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    head.__class__ = loss.OutputLayer
    return head


def batch(dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    hidden = (3 * torch.randn(1, TOKENS, HIDDEN)).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (1, TOKENS))
    targets[0, ::5] = IGNORED
    return hidden, targets


def gradients_of(value, *tensors, factor):
    return [gradient.double() for gradient in torch.autograd.grad(value * factor, tensors)]


def exact(head, hidden, targets, factor):
    """Loss and gradients in fp64."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, head.weight))
    bias = None if head.bias is None else head.bias.detach().double().requires_grad_()
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    value = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") / 20
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    return value, gradients_of(value, *inputs, factor=factor)


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "dtype, close", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_loss_and_gradients_are_those_of_cross_entropy(monkeypatch, dtype, close, bias, alignment):
    """Also with padding: of the logits' columns in fp32, of the weight in 16 bits as on CUDA."""
    padded = partial(loss._loss_and_gradients, alignment=alignment)
    monkeypatch.setattr(loss, "_loss_and_gradients", padded)
    head, (hidden, targets) = output_layer(dtype, bias), batch(dtype)
    value = head(hidden, targets, torch.tensor(20), factor=torch.tensor(8.0))
    expected, expected_gradients = exact(head, hidden, targets, factor=8)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=close)
    without_gradients = torch.no_grad()(head)(hidden, targets, torch.tensor(20))
    assert without_gradients.item() == pytest.approx(value.item())
    gradients = gradients_of(value, hidden, *head.parameters(), factor=8)
    for found, right in zip(gradients, expected_gradients, strict=True):
        assert (found - right).norm() < close * right.norm()


def test_fp16_keeps_small_gradients_that_the_loss_scaler_makes_large_enough():
    """A token that is never right has a probability of about 1e-9, less than fp16 can hold.

    Backward may get another factor than the forward pass knew.
    """
    head, (hidden, targets) = output_layer(torch.float16), batch(torch.float16)
    with torch.no_grad():
        head.weight[0], hidden[..., 0] = 0, 8.0
        head.weight[0, 0] = -2.0
    targets[targets == 0] = 1
    _, (_, right) = exact(head, hidden, targets, factor=2.0**16)
    assert 0 < right[0].norm() / 2**16 < 1e-7
    for known in (2.0**16, 2.0**15):
        value = head(hidden, targets, torch.tensor(20), factor=torch.tensor(known))
        [found] = gradients_of(value, head.weight, factor=2.0**16)
        assert (found[0] - right[0]).norm() < 0.05 * right[0].norm()
    value = head(hidden, targets, torch.tensor(20), factor=torch.tensor(2.0**16))
    with Operations() as operations:
        value.backward()
    assert "aten::mm" not in operations.names  # the logits are not computed again


CONFIGS = {
    "gpt2": (GPT2, True),
    "llama": (LLAMA, True),
    "gemma2": (transformers.Gemma2Config(**SIZES), False),  # caps its logits
    "cohere": (transformers.CohereConfig(**SIZES), False),  # scales them
    "mixtral": (transformers.MixtralConfig(**SIZES), True),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_script_computes_the_same_loss_either_way(family):
    """Models that change their logits compute them all."""
    config, plain = CONFIGS[family]
    assert loss.returns_plain_logits(config) == plain
    torch.manual_seed(0)
    model = weights.from_config(config).eval()
    ids = torch.randint(0, VOCABULARY, (2, 20))
    labels = ids.clone()
    labels[1, 12:] = IGNORED
    logits, targets = model(input_ids=ids).logits[:, :-1], labels[:, 1:]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    if plain:
        loss.add_loss(model)
    found = next_token_loss(model, ids, labels, torch.tensor(19.0 + 11.0))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    shape = model(input_ids=ids).logits.shape  # outside of training it gives logits
    assert shape == (2, 20, VOCABULARY)


def test_a_step_does_not_wait_for_the_gpu():
    """Reading a value of a tensor on a GPU waits for the GPU."""
    model = weights.from_config(LLAMA).train()
    loss.add_loss(model)
    ids, tokens = torch.randint(0, VOCABULARY, (2, 20)), torch.tensor(38.0)
    with Operations() as operations:
        next_token_loss(model, ids, ids, tokens).backward()
    assert "aten::mm" in operations.names
    reading = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"}
    assert not reading & set(operations.names)
