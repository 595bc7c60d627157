"""What fits in a given memory: a strategy, the largest batch, the fewest GPUs.

Also the memory estimate of a run in progress, and advice for a run that ran out of memory.
"""

import math
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from support.errors import UserError
from support.memory.estimate import MemoryEstimate, predict, supporting
from support.settings.settings import Settings
from support.strategies.table import OFFLOADING, ON_DEVICE, PREFERENCE
from support.units import GB
from support.workload.architectures import Architecture, read_architecture
from support.workload.workload import Workload, adapters

ADVISED_SHARE = 0.9  # share of a GPU that advice may fill: peaks are predicted within 10 %


@dataclass(frozen=True)
class Limits:
    """Available memory in bytes; None if it is not known, which sets no limit."""

    gpu: int | None  # memory of one GPU
    # Of one node, shared by its ranks.
    host: int | None = None
    nvme: int | None = None
    ranks_per_node: int = 1  # number of these ranks

    def hold(self, need: MemoryEstimate, share: float = 1.0) -> bool:
        """Return whether a strategy's memory estimate fits, in this share of the GPU."""
        return (
            (self.gpu is None or need.total <= int(share * self.gpu))
            and (self.host is None or need.host * self.ranks_per_node <= self.host)
            and (self.nvme is None or need.nvme * self.ranks_per_node <= self.nvme)
        )


def recommend(work: Workload, limits: Limits) -> tuple[MemoryEstimate | None, Workload]:
    """Choose the first strategy that fits, if necessary with changes of the workload.

    The changes are smaller micro-batches, then gradient checkpointing, then both. Strategies that
    offload are tried last.

    Returns:
        The memory estimate, or None if nothing fits; and the workload, in which gradient
        accumulation makes up for smaller micro-batches.
    """
    checkpointing = replace(work, gradient_checkpointing=True)
    all_supported = supporting(work)
    for strategies in (ON_DEVICE, OFFLOADING):
        supported = [strategy for strategy in strategies if strategy in all_supported]
        for changed in (work,) if work.gradient_checkpointing else (work, checkpointing):
            for strategy in supported:
                if limits.hold(need := predict(changed, strategy)):
                    return need, changed
            for strategy in supported:
                if split := fitting_split(changed, strategy, limits.hold):
                    return predict(split, strategy), split
    return None, work


def largest_batch(work: Workload, strategy: str, limits: Limits) -> int:
    """Return the sequences of the largest micro-batch up to 65,536 that fits; 0 if none does."""

    def exceeds(size: int) -> bool:
        return not limits.hold(predict(replace(work, batch_size=size), strategy))

    return bisect_left(range(1, 2**16 + 1), True, key=exceeds)


def fewest_gpus(work: Workload, strategy: str, limits: Limits) -> int | None:
    """Return the number of GPUs that the model needs at this batch per GPU.

    Tried are all numbers up to 64, then powers of two. None if 4,096 are not enough.
    """
    for number in (*range(1, 65), *(2**power for power in range(7, 13))):
        on_nodes = replace(limits, ranks_per_node=min(limits.ranks_per_node, number))
        if on_nodes.hold(predict(replace(work, world_size=number), strategy)):
            return number
    return None


def fitting_split(
    work: Workload, strategy: str, holds: Callable[[MemoryEstimate], bool]
) -> Workload | None:
    """Return the same step in the largest micro-batches that fit, or None."""
    batch = work.batch_size
    small = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
    for size in sorted({*small, *(batch // n for n in small)}, reverse=True):
        split = replace(work, batch_size=size, accumulation=work.accumulation * batch // size)
        if holds(predict(split, strategy)):
            return split
    return None


# ------------------------------------------------------------------------------ a run in progress


def check_is_planned(settings: Settings) -> None:
    """Check that the memory estimate supports a run.

    Raises:
        UserError: it uses the user's own DeepSpeed file or options of FSDP, or only evaluates.
    """
    if settings.training.eval_only or not settings.parallelism.configured.is_standard:
        raise UserError(
            "The memory estimate supports training with this project's DeepSpeed files and FSDP's "
            "defaults only."
        )


def planned_work(settings: Settings, ctx, model: Architecture, seq_length: int) -> Workload:
    """Describe this run for the memory estimate.

    Args:
        seq_length: tokens of a sequence.
    Raises:
        UserError: the estimate does not support the run (see `check_is_planned`).
    """
    check_is_planned(settings)
    chosen, training = settings.model, settings.training
    return Workload(
        model,
        ctx.world_size,
        training.batch_size,
        seq_length,
        ctx.precision,
        chosen.gradient_checkpointing,
        training.gradient_accumulation_steps,
        device=ctx.device.type,
        rank=0 if ctx.simulated else None,
        lora=adapters(model, chosen.lora_r, chosen.lora_targets),
        fused_gelu=chosen.fused_gelu,
        attention_mask=settings.data.isolates_documents,
        optimizer=training.optim,
        compiled=chosen.compile,
        load_in_4bit=chosen.load_in_4bit,
        capability=ctx.capability,
    )


def memory_limits(ctx) -> Limits:
    """Return the memory limits of this rank's device and of its node, in bytes."""
    import torch

    from support.memory.system import memory_limit

    ranks = 1 if ctx.simulated else ctx.launch.local_world_size
    if ctx.device.type == "cuda":
        return Limits(memory_limit(ctx.device), memory_limit(torch.device("cpu")), None, ranks)
    return Limits(memory_limit(ctx.device) // ranks)  # the ranks share the host's memory


def host_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def estimate_of(settings: Settings, ctx, spec) -> MemoryEstimate | None:
    """Return the memory estimate of this run, or None if it does not support the run."""
    try:
        model = read_architecture(spec.config.to_dict(), settings.model.model)
        work = planned_work(settings, ctx, model, spec.seq_length)
        return predict(work, settings.parallelism.strategy)
    except UserError:
        return None


def keeps_large_tensors(settings: Settings, ctx, spec) -> bool:
    """Return whether a run on a CPU keeps the memory of large tensors that it frees.

    It does if nothing is sharded and it needs less than half of the memory by the estimate.
    Strategies that shard use tensors of many sizes: keeping large ones takes 27 to 38 % more
    memory, for steps from 6 % shorter to 20 % longer (benchmarks/RESULTS.md).
    """
    sharded = settings.parallelism.configured.sharded
    estimate = None if sharded else estimate_of(settings, ctx, spec)
    return estimate is not None and memory_limits(ctx).hold(estimate, 0.5)


def ways_to_fit(settings: Settings, ctx, spec) -> list[str]:
    """Return lines of advice with estimated memory, for a run that ran out of memory.

    Raises:
        UserError: the estimate does not support the architecture or the configuration.
    """
    model = read_architecture(spec.config.to_dict(), settings.model.model)
    work = planned_work(settings, ctx, model, spec.seq_length)
    return describe_remedies(work, settings.parallelism.strategy, memory_limits(ctx))


def remedies(work: Workload, strategy: str, limits: Limits) -> dict[str, MemoryEstimate]:
    """Return the changes of flags that make a run fit with a margin, and then its estimate.

    The candidates, smallest change first: another strategy with the same batch; a smaller
    micro-batch with more accumulation; gradient checkpointing; sequences of half the length.
    """
    holds, present = partial(limits.hold, share=ADVISED_SHARE), predict(work, strategy).total
    supported = supporting(work)
    others = {other: predict(work, other) for other in PREFERENCE if other in supported}
    needs = {f"--strategy {o}": need for o, need in others.items() if need.total < 0.98 * present}
    split = fitting_split(work, strategy, holds)
    if split and split.batch_size < work.batch_size:
        accumulation = f"--gradient_accumulation_steps {split.accumulation}"
        needs[f"--batch_size {split.batch_size} {accumulation}"] = predict(split, strategy)
    checkpointing = replace(work, gradient_checkpointing=True)
    needs["--gradient_checkpointing"] = predict(checkpointing, strategy)
    half = replace(work, seq_length=work.seq_length // 2)
    needs[f"--seq_length {half.seq_length}"] = predict(half, strategy)
    return {flags: need for flags, need in needs.items() if holds(need)}


def describe_remedies(work: Workload, strategy: str, limits: Limits) -> list[str]:
    """Return lines of advice with memory estimates, for a run that ran out of memory."""
    need, capacity = predict(work, strategy), f" of {limits.gpu / GB:.1f}" if limits.gpu else ""
    lines = [f"Memory estimate for {strategy}: {need.total / GB:.1f}{capacity} GB"]
    if limits.hold(need, ADVISED_SHARE):
        lines[0] += ", which should fit. Check whether another process uses this memory. "
        lines[0] += "The estimate does not include dropout or a long prompt."
    elif fitting := remedies(work, strategy, limits):
        lines[0] += ". It would fit with one of:"
        lines += [f"  {flags}: {n.total / GB:.1f}{capacity} GB" for flags, n in fitting.items()]
    else:
        lines[0] += ". No single change makes it fit: see scripts/plan_memory.py --solve gpus."
    return lines
