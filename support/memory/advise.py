"""The memory estimate of a run in progress, and advice for a run that ran out of memory."""

from __future__ import annotations

from dataclasses import replace

import psutil

from support.cli.arguments import Arguments, isolates_documents
from support.cli.ds_config import configured_strategy
from support.errors import UserError
from support.memory.architectures import Architecture, read_architecture
from support.memory.estimate import MemoryEstimate, predict
from support.memory.fit import PREFERENCE, Limits, fitting_split
from support.memory.system import memory_limit
from support.memory.workload import Workload, workload_of
from support.strategy import STRATEGIES
from support.units import GB

ADVISED_SHARE = 0.9  # share of a GPU that advice may fill: peaks are predicted within 10 %


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
    ranks = 1 if ctx.simulated else ctx.launch.local_world_size
    if ctx.device.type == "cuda":
        return Limits(memory_limit(ctx.device), psutil.virtual_memory().total, None, ranks)
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


def with_margin(limits: Limits) -> Limits:
    """Return the limits for advice, which leave a margin on the GPU."""
    return replace(limits, gpu=None if limits.gpu is None else int(ADVISED_SHARE * limits.gpu))


def remedies(work: Workload, strategy: str, limits: Limits) -> dict[str, MemoryEstimate]:
    """Return the changes of flags that make a run fit with a margin, and then its estimate.

    The candidates, smallest change first: another strategy with the same batch; a smaller
    micro-batch with more accumulation; gradient checkpointing; sequences of half the length.
    """
    limits, present = with_margin(limits), predict(work, strategy).total
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
    if with_margin(limits).hold(need):
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
