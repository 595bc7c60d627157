"""Dropout on a CPU: how much it drops, that it repeats, and its attention with exact gradients."""

import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.model import dropout


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def layer(p: float) -> nn.Module:
    model = nn.Sequential(nn.Dropout(p))
    dropout.Dropout.replace_all(model)
    return model


def test_drops_as_many_elements_as_asked_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(1000, 1001, requires_grad=True)
    y = layer(0.1)(x)
    assert (y == 0).float().mean().item() == pytest.approx(0.1, abs=0.002)
    assert y.mean().item() == pytest.approx(1, abs=0.002)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # backward drops the same elements
    # Neither along rows nor columns is there a pattern.
    assert all((y == 0).float().mean(dim).std() < 0.012 for dim in (0, 1))


def test_is_a_function_of_the_seed_and_not_of_the_number_of_threads(threads):
    def draw(seed: int, number_of_threads: int) -> torch.Tensor:
        threads(number_of_threads)
        torch.manual_seed(seed)
        model = layer(0.5)
        return torch.cat([model(torch.ones(700_001)), model(torch.ones(700_001))])

    first = draw(1, 1)
    assert torch.equal(first, draw(1, 2))
    assert not torch.equal(first, draw(2, 1))
    assert not torch.equal(*first.chunk(2))
    numbers = dropout.draw_numbers((8 * dropout.PART,), (1,))
    assert not torch.equal(*numbers.chunk(2))  # each part has a generator of its own


@pytest.mark.parametrize("p", [0.0, 1e-9, 1.0])
def test_extreme_probabilities(p):
    assert layer(p)(torch.ones(100)).mean() == 1 - round(p)


def test_evaluation_drops_nothing():
    assert layer(0.5).eval()(torch.ones(100)).sum() == 100


def plain_attention(query, key, value, p: float, mask=None) -> torch.Tensor:
    """Attention in a few lines, with the same random numbers."""
    batch, heads, length = query.shape[:3]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    later = later if mask is None else ~mask
    probabilities = scores.masked_fill(later, -torch.inf).softmax(-1)
    seed, kept = dropout.draw_seed(), torch.zeros(batch * heads, length, length)
    for start in range(0, length, dropout.QUERIES):
        stop = min(start + dropout.QUERIES, length)
        numbers = dropout.draw_numbers((batch * heads, stop - start, stop), (seed, start))
        kept[:, start:stop, :stop] = (numbers >= dropout.dropped_numbers(p) - 2**15).float()
    return (probabilities * kept.view_as(probabilities) / (1 - p)) @ value


def attention(query, key, value, p: float, mask=None) -> torch.Tensor:
    function = dropout.attention_with_dropout(lambda *_args, **_options: pytest.fail("PyTorch's"))
    return function(types.SimpleNamespace(), query, key, value, mask, dropout=p)[0].transpose(1, 2)


@pytest.mark.parametrize("length", [1, 64, 150])
@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_and_its_gradients_are_exact(length, key_heads, documents):
    results, mask = [], None
    if documents:  # other ones in each sequence, as transformers gives them to SDPA
        numbers = torch.arange(length) // torch.tensor([[13], [70]])
        mask = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()
    for function in (attention, plain_attention):
        torch.manual_seed(3)
        inputs = [torch.randn(2, heads, length, 8) for heads in (6, key_heads, key_heads)]
        weight = torch.randn(2, 6, length, 8)
        for tensor in inputs:
            tensor.requires_grad_()
        output = function(*inputs, 0.25, mask)
        (output * weight).sum().backward()
        results.append([output, *(tensor.grad for tensor in inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_checkpointing_draws_the_same_numbers_again():
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(4)
        model, x = layer(0.3), torch.randn(1, 2, 70, 8, requires_grad=True)

        def block(x, model=model):
            return attention(x, x, model(x), 0.3)

        output = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        output.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "change", [{"attention_mask": torch.zeros(1, 1, 4, 4)}, {"dropout": 0.0}, {"is_causal": False}]
)
def test_other_attention_is_left_to_pytorch(change):
    called = []
    function = dropout.attention_with_dropout(
        lambda _module, *_tensors, **options: called.append(options)
    )
    tensors = dict.fromkeys(("query", "key", "value"), torch.ones(1, 1, 4, 8))
    options = {"attention_mask": None, "dropout": 0.5, "is_causal": True, **change}
    function(types.SimpleNamespace(), **tensors, **options)
    assert len(called) == 1 and called[0]["dropout"] == options["dropout"]
