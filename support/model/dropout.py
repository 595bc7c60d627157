"""Dropout on a CPU with random bits from a fast generator.

PyTorch draws dropout with `bernoulli_`, which computes one number after the other on one thread.
Here each 64-bit number of NumPy's SFC64 generator decides four elements, and several threads draw.

Each dropout seeds its generators with a number from PyTorch's. The bits are therefore a function of
torch.manual_seed (see data.batches.seed_dropout), and gradient checkpointing, which restores
PyTorch's generator, draws them again. Backward draws them again, too, instead of keeping them. On a
GPU and in compiled code PyTorch's own dropout runs.

Measured for GPT-2 124M in fp32, 4 x 256 tokens, dropout 0.1: 3.4 GiB at the peak before, 3.0 after;
forward and backward of a layer's attention 117 ms before, 71 after, of a residual dropout 12.5 ms
before, 6.9 after, on one core (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

PART = 2**16  # 64-bit numbers from one generator, whatever the number of threads
QUERIES = 64  # rows of the attention matrix in one chunk


def draw_seed() -> int:
    """Draw the seed of one dropout from PyTorch's generator."""
    return int(torch.randint(2**63 - 1, ()))


def draw_numbers(shape: tuple[int, ...], seed: tuple[int, ...]) -> torch.Tensor:
    """Return random integers from -2^15 to 2^15 - 1, in fp32.

    Args:
        seed: the result is a function of these integers.
    """
    count = torch.Size(shape).numel()
    numbers = np.empty(-(-count // 4), np.uint64)
    parts = range(-(-numbers.size // PART))

    def draw(part: int) -> None:
        own = numbers[part * PART : (part + 1) * PART]
        own[:] = np.random.SFC64(np.random.SeedSequence([*seed, part])).random_raw(own.size)

    threads = torch.get_num_threads()
    list((_pool(threads).map if min(threads, len(parts)) > 1 else map)(draw, parts))
    return torch.from_numpy(numbers.view(np.int16))[:count].float().view(shape)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "dropout")


def dropped_numbers(p: float) -> int:
    """Return how many of the 2^16 numbers drop an element with probability p."""
    return round(p * 2**16)


def drop(tensor: torch.Tensor, p: float, numbers: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with zeros where `numbers` are among the lowest `dropped_numbers(p)`."""
    # This operator is `tensor where numbers > threshold, else 0`. It is one vectorized loop and
    # takes 0.4 ms for 786,432 elements; a comparison, and a product with its result, take 2.1 ms.
    threshold = dropped_numbers(p) - 2**15 - 1
    return torch.ops.aten.threshold_backward(tensor, numbers, threshold).to(tensor.dtype)


def keep_factor(p: float) -> float:
    """Return the factor of the kept elements, with which the expected value does not change."""
    return 2**16 / (2**16 - dropped_numbers(p))


def applies_to(tensor: torch.Tensor, p: float) -> bool:
    """Return whether this module computes a dropout of `tensor`, and not PyTorch."""
    if torch.compiler.is_compiling():  # the compiler generates its own code for dropout
        return False
    return tensor.device.type == "cpu" and 0 < dropped_numbers(p) < 2**16


class Dropout(nn.Dropout):
    """nn.Dropout that uses this module on a CPU."""

    @classmethod
    def replace_all(cls, model: nn.Module) -> None:
        """Change the class of the model's dropout layers to this class."""
        for module in model.modules():
            if type(module) is nn.Dropout and not module.inplace:
                module.__class__ = cls

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Drop elements of `input` while training."""
        if self.training and applies_to(input, self.p):
            return _Drop.apply(input, self.p, draw_seed())
        return super().forward(input)


class _Drop(torch.autograd.Function):
    """Dropout that keeps only its seed for backward."""

    @staticmethod
    def forward(ctx, tensor, p, seed):
        ctx.p, ctx.seed = p, seed
        return drop(tensor, p, draw_numbers(tensor.shape, (seed,))).mul_(keep_factor(p))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        numbers = draw_numbers(grad.shape, (ctx.seed,))
        return drop(grad, ctx.p, numbers).mul_(keep_factor(ctx.p)), None, None


def attention_with_dropout(sdpa: Callable) -> Callable:
    """Return transformers' attention function `sdpa`, with causal dropout on a CPU by this module.

    PyTorch has no CPU kernel for attention with dropout: it computes the whole attention matrix in
    several steps and keeps three copies of it until backward.
    """

    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        plain = causal and options.get("position_bias") is None
        plain = plain and query.shape[2] == key.shape[2] and applies_to(query, dropout)
        if not (plain and _only_hides(attention_mask)):
            options.update(dropout=dropout, scaling=scaling)
            return sdpa(module, query, key, value, attention_mask, **options)
        groups = query.shape[1] // key.shape[1]  # query heads for each key head
        if groups > 1:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        inputs = [query * (query.shape[-1] ** -0.5 if scaling is None else scaling), key, value]
        if torch.is_autocast_enabled("cpu"):  # some models have queries and keys in fp32
            inputs = [x.to(torch.get_autocast_dtype("cpu")) for x in inputs]
        output = _Attention.apply(*inputs, attention_mask, dropout)
        return output.transpose(1, 2).contiguous(), None

    return attention


def _only_hides(mask: torch.Tensor | None) -> bool:
    """Return whether a mask hides keys of causal attention, and shows no later ones."""
    if mask is None:
        return True
    return mask.dtype == torch.bool and mask.shape[1] == 1 and not mask.triu(1).any()


class _Attention(torch.autograd.Function):
    """Causal attention with dropout, computed for QUERIES queries at once.

    Backward computes the attention matrix and the random numbers again instead of keeping them.
    """

    @staticmethod
    def forward(ctx, query, key, value, mask, p):
        """Compute attention.

        Args:
            query, key: [batch, heads, length, size]; the query is scaled.
            value: [batch, heads, length, size of value].
            mask: bool [batch, 1, length, length], False for hidden keys; None hides no key but
                the later ones.
            p: probability of dropping an element of the attention matrix.
        Returns:
            [batch, heads, length, size of value].
        """
        shape = value.shape
        query, key, value = (x.flatten(0, 1).contiguous() for x in (query, key, value))
        ctx.save_for_backward(query, key, value)
        ctx.p, ctx.seed, ctx.mask = p, draw_seed(), mask
        output = torch.empty_like(value)
        for rows, columns, attention, numbers in _chunks(query, key, mask, ctx.seed):
            output[:, rows] = drop(attention, p, numbers).to(value.dtype) @ value[:, columns]
        return output.mul_(keep_factor(p)).view(shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        """Return the gradients of the scaled query, the key and the value."""
        query, key, value = ctx.saved_tensors
        of_output = grad.flatten(0, 1) * keep_factor(ctx.p)
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
        for rows, columns, attention, numbers in _chunks(query, key, ctx.mask, ctx.seed):
            dropped = drop(attention, ctx.p, numbers).to(value.dtype)
            of_value[:, columns] += dropped.mT @ of_output[:, rows]
            of_dropped = (of_output[:, rows] @ value[:, columns].mT).float()
            of_attention = drop(of_dropped, ctx.p, numbers)
            of_scores = torch.ops.aten._softmax_backward_data(
                of_attention, attention, -1, torch.float32
            ).to(query.dtype)
            of_query[:, rows] = of_scores @ key[:, columns]
            of_key[:, columns] += of_scores.mT @ query[:, rows]
        gradients = (of_query, of_key.to(key.dtype), of_value.to(value.dtype))
        return *(x.unflatten(0, grad.shape[:2]) for x in gradients), None, None


def _chunks(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, seed: int
) -> Iterator[tuple]:
    """Compute the attention matrix in chunks of QUERIES rows, up to the last key that they see.

    Yields:
        (rows, columns, attention of these rows and columns in fp32, random numbers for them).
    """
    for start in range(0, query.shape[1], QUERIES):
        stop = min(start + QUERIES, query.shape[1])
        rows, columns = slice(start, stop), slice(0, stop)
        scores = (query[:, rows] @ key[:, columns].mT).float()
        later = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        scores[:, :, rows].masked_fill_(later, -torch.inf)
        if mask is not None:
            by_batch = scores.unflatten(0, (len(mask), -1))
            by_batch.masked_fill_(~mask[:, :, rows, columns], -torch.inf)
        attention = scores.softmax(-1)
        yield rows, columns, attention, draw_numbers(attention.shape, (seed, start))
