"""What fits in a given memory: a strategy, the largest batch or model, the fewest GPUs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from support.known_models import gpt2_config
from support.memory.architectures import Architecture, read_architecture
from support.memory.estimate import MemoryEstimate, predict
from support.memory.workload import Workload, adapters

# The order of recommendation: the first that fits is the simplest and usually the fastest.
ON_GPU, OFFLOADING = ("dp", "zero1", "zero2", "fsdp", "zero3"), ("offload", "infinity")
PREFERENCE = (*ON_GPU, *OFFLOADING)


@dataclass(frozen=True)
class Limits:
    """Available memory in bytes; None if it is not known, which sets no limit."""

    gpu: int | None  # memory of one GPU
    # Of one node, shared by its ranks.
    host: int | None = None
    nvme: int | None = None
    ranks_per_node: int = 1  # number of these ranks

    def hold(self, need: MemoryEstimate) -> bool:
        """Return whether a strategy's memory estimate fits."""
        ranks = self.ranks_per_node
        sizes = (
            (need.total, self.gpu),
            (need.host * ranks, self.host),
            (need.nvme * ranks, self.nvme),
        )
        return all(available is None or size <= available for size, available in sizes)


def recommend(work: Workload, limits: Limits) -> tuple[MemoryEstimate | None, Workload]:
    """Choose the first strategy that fits, if necessary with changes of the workload.

    The changes are smaller micro-batches, which cost little; then gradient checkpointing, which
    computes the forward pass twice; then both. Only if none of them makes a strategy fit that keeps
    its states on the GPU, those that offload are tried.

    Returns:
        The memory estimate, or None if nothing fits; and the workload, in which gradient
        accumulation makes up for smaller micro-batches.
    """
    checkpointing = replace(work, gradient_checkpointing=True)
    for strategies in (ON_GPU, OFFLOADING):
        supported = [strategy for strategy in strategies if strategy in work.strategies]
        for changed in (work,) if work.gradient_checkpointing else (work, checkpointing):
            for strategy in supported:
                if limits.hold(need := predict(changed, strategy)):
                    return need, changed
            for strategy in supported:
                if split := fitting_split(changed, strategy, limits):
                    return predict(split, strategy), split
    return None, work


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` for which `fits` is true, or 0.

    `fits` must be true for all smaller numbers if it is true for a number.
    """
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def largest_batch(work: Workload, strategy: str, limits: Limits) -> int:
    """Return the sequences of the largest micro-batch up to 65,536 that fits; 0 if none does."""
    return _largest(
        lambda size: limits.hold(predict(replace(work, batch_size=size), strategy)), 65536
    )


def fewest_gpus(work: Workload, strategy: str, limits: Limits) -> int | None:
    """Return the number of GPUs that the model needs at this batch per GPU.

    Tried are all numbers up to 64, then powers of two. None if 4,096 are not enough.
    """
    for number in (*range(1, 65), *(2**power for power in range(7, 13))):
        on_nodes = replace(limits, ranks_per_node=min(limits.ranks_per_node, number))
        if on_nodes.hold(predict(replace(work, world_size=number), strategy)):
            return number
    return None


def gpt2_of_width(hidden: int, like: Architecture) -> Architecture:
    """Return a model of GPT-2's shape with a width that is a multiple of 64.

    The number of layers grows linearly with the width, as in GPT-2's sizes (12 at 768, 48 at 1600),
    and continues beyond them. Below 768 it is one layer per 64. The vocabulary is that of `like`
    if it is a GPT-2, and so is its number of positions if it has some.
    """
    linear = round(12 + (hidden - 768) * (48 - 12) / (1600 - 768))
    layers = linear if hidden >= 768 else hidden // 64
    vocabulary = like.vocabulary if like.family == "gpt2" else 50257
    config = gpt2_config(layers, hidden // 64, hidden, vocabulary, like.positions or 1024)
    return read_architecture(config, "")


def largest_gpt2(work: Workload, strategy: str, limits: Limits) -> Architecture | None:
    """Return the largest model of GPT-2's shape, up to a width of 65,536, that fits, or None.

    With adapters, a model of another family is replaced by a GPT-2 with GPT-2's default targets.
    """
    if work.lora and work.model.family != "gpt2":
        work = replace(work, lora=adapters(gpt2_of_width(768, work.model), work.lora.r, None))

    def fits(heads: int) -> bool:
        model = gpt2_of_width(64 * heads, work.model)
        return limits.hold(predict(replace(work, model=model), strategy))

    heads = _largest(fits, 1024)
    return gpt2_of_width(64 * heads, work.model) if heads else None


def fitting_split(work: Workload, strategy: str, limits: Limits) -> Workload | None:
    """Return the same step in the largest micro-batches that fit, or None."""

    def split(size: int) -> Workload:
        accumulation = work.accumulation * work.batch_size // size
        return replace(work, batch_size=size, accumulation=accumulation)

    def fits(size: int) -> bool:
        return limits.hold(predict(split(size), strategy))

    if fits(work.batch_size):  # without accumulation, it may need less than half of it
        return work
    small = [n for n in range(1, math.isqrt(work.batch_size) + 1) if work.batch_size % n == 0]
    sizes = sorted({*small, *(work.batch_size // n for n in small)})
    first_too_large = bisect_left(sizes, True, key=lambda size: not fits(size))
    return split(sizes[first_too_large - 1]) if first_too_large else None
