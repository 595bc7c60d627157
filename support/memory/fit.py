"""What fits in a given memory: a strategy, the largest batch or model, the fewest GPUs.

Also the memory estimate of a run in progress, and advice for a run that ran out of memory.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from support.cli.arguments import Arguments, isolates_documents
from support.cli.ds_config import configured_strategy
from support.errors import UserError
from support.memory.architectures import Architecture, read_architecture
from support.memory.estimate import MemoryEstimate, predict
from support.memory.workload import Workload, adapters, workload_of
from support.tables import STRATEGIES, gpt2_config
from support.units import GB

# The order of recommendation: the first that fits is the simplest and usually the fastest.
ON_GPU, OFFLOADING = ("dp", "zero1", "zero2", "fsdp", "zero3"), ("offload", "infinity")
PREFERENCE = (*ON_GPU, *OFFLOADING)
ADVISED_SHARE = 0.9  # share of a GPU that advice may fill: peaks are predicted within 10 %


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

    def with_margin(self) -> Limits:
        """Return the limits for advice, which leave a margin on the GPU."""
        return replace(self, gpu=None if self.gpu is None else int(ADVISED_SHARE * self.gpu))


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


# ------------------------------------------------------------------------------ a run in progress


def planned_work(args: Arguments, ctx, model: Architecture) -> Workload:
    """Describe this run for the memory estimate.

    Raises:
        UserError: the estimate does not support the run: it uses the user's own DeepSpeed or FSDP
            file, or only evaluates.
    """
    if args.ds_config or args.fsdp_config or args.eval_only:
        raise UserError(
            "The memory estimate supports training with this project's DeepSpeed files and FSDP's "
            "defaults only."
        )
    isolates = isolates_documents(args)
    work = workload_of(args, model, ctx.world_size, ctx.precision, isolates)
    return replace(work, device=ctx.device.type, rank=0 if ctx.simulated else None)


def memory_limits(ctx) -> Limits:
    """Return the memory limits of this rank's device and of its node, in bytes."""
    from support.memory.system import memory_limit  # imports torch

    ranks = 1 if ctx.simulated else ctx.launch.local_world_size
    if ctx.device.type == "cuda":
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Limits(memory_limit(ctx.device), host, None, ranks)
    return Limits(memory_limit(ctx.device) // ranks)  # the ranks share the host's memory


def predicted_bytes(args: Arguments, ctx, spec) -> dict[str, int] | None:
    """Return the memory estimate of this run by kind, or None if it does not support the run."""
    try:
        model = read_architecture(spec.config.to_dict(), args.model)
        if configured_strategy(args) != STRATEGIES[args.strategy]:
            return None
        return predict(planned_work(args, ctx, model), args.strategy).sizes()
    except UserError:
        return None


def ways_to_fit(args: Arguments, ctx, spec) -> list[str]:
    """Return lines of advice with estimated memory, for a run that ran out of memory.

    Raises:
        UserError: the estimate does not support the architecture or the configuration.
    """
    model = read_architecture(spec.config.to_dict(), args.model)
    return describe_remedies(planned_work(args, ctx, model), args.strategy, memory_limits(ctx))


def remedies(work: Workload, strategy: str, limits: Limits) -> dict[str, MemoryEstimate]:
    """Return the changes of flags that make a run fit with a margin, and then its estimate.

    The candidates, smallest change first: another strategy with the same batch; a smaller
    micro-batch with more accumulation; gradient checkpointing; sequences of half the length.
    """
    limits, present = limits.with_margin(), predict(work, strategy).total
    others = {other: predict(work, other) for other in PREFERENCE if other in work.strategies}
    needs = {f"--strategy {o}": need for o, need in others.items() if need.total < 0.98 * present}
    split = fitting_split(work, strategy, limits)
    if split and split.batch_size < work.batch_size:
        accumulation = f"--gradient_accumulation_steps {split.accumulation}"
        needs[f"--batch_size {split.batch_size} {accumulation}"] = predict(split, strategy)
    if not work.gradient_checkpointing:
        checkpointing = replace(work, gradient_checkpointing=True)
        needs["--gradient_checkpointing"] = predict(checkpointing, strategy)
    if work.seq_length >= 64:
        half = replace(work, seq_length=work.seq_length // 2)
        needs[f"--seq_length {half.seq_length}"] = predict(half, strategy)
    return {flags: need for flags, need in needs.items() if limits.hold(need)}


def describe_remedies(work: Workload, strategy: str, limits: Limits) -> list[str]:
    """Return lines of advice with memory estimates, for a run that ran out of memory."""
    need, capacity = predict(work, strategy), f" of {limits.gpu / GB:.1f}" if limits.gpu else ""
    estimate = f"Memory estimate for {strategy}: {need.total / GB:.1f}{capacity} GB"
    if limits.with_margin().hold(need):
        return [
            f"{estimate}, which should fit. Check whether another process uses this memory. "
            "The estimate does not include dropout or a long prompt."
        ]
    fitting = remedies(work, strategy, limits)
    if not fitting:
        return [
            f"{estimate}. No single change makes it fit: "
            "see scripts/plan_memory.py --solve gpus and --solve model."
        ]
    lines = [f"  {flags}: {n.total / GB:.1f}{capacity} GB" for flags, n in fitting.items()]
    return [f"{estimate}. It would fit with one of:", *lines]
