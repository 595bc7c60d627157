"""The memory estimate of a run in progress, and advice for a run that ran out of memory."""

from __future__ import annotations

from dataclasses import asdict

import psutil

from support.errors import UserError
from support.memory import architectures
from support.memory import estimate as planner
from support.memory.measure import memory_limit


def planned_work(args, ctx, model: architectures.Architecture) -> planner.Workload:
    """Describe this run for the memory estimate (support/memory/estimate.py).

    Raises:
        UserError: the estimate does not support the run: it uses the user's own DeepSpeed or FSDP
            file, or only evaluates.
    """
    if args.ds_config or args.fsdp_config or args.eval_only:
        raise UserError(
            "The planner knows this project's own DeepSpeed files, FSDP's defaults, and training."
        )
    return planner.Workload(
        model,
        ctx.world_size,
        args.batch_size,
        args.seq_length,
        ctx.precision,
        args.gradient_checkpointing,
        args.gradient_accumulation_steps,
        ctx.device.type,
        0 if ctx.simulated else None,
        planner.adapters(model, args.lora_r, args.lora_targets),
        args.fused_gelu,
    )


def memory_limits(ctx) -> planner.Limits:
    """Return the memory limits of this rank's device and of its node, in bytes."""
    ranks = 1 if ctx.simulated else ctx.launch.local_world_size
    if ctx.device.type == "cuda":
        return planner.Limits(memory_limit(ctx.device), psutil.virtual_memory().total, None, ranks)
    return planner.Limits(memory_limit(ctx.device) // ranks)  # the ranks share the host's memory


def predicted_bytes(args, ctx, spec) -> dict[str, int] | None:
    """Return the memory estimate of this run.

    Returns:
        Bytes by kind of memory; None if the estimate does not support the architecture or the
        configuration.
    """
    try:
        model = architectures.read_architecture(spec.config.to_dict(), args.model)
        estimate = asdict(planner.predict(planned_work(args, ctx, model), args.strategy))
    except UserError:
        return None
    return {name: size for name, size in estimate.items() if isinstance(size, int)}


def ways_to_fit(args, ctx, spec) -> list[str]:
    """Return lines of advice with estimated memory, for a run that ran out of memory.

    Raises:
        UserError: the estimate does not support the architecture or the configuration.
    """
    model = architectures.read_architecture(spec.config.to_dict(), args.model)
    return planner.describe_ways(planned_work(args, ctx, model), args.strategy, memory_limits(ctx))
