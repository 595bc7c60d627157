"""The workload of a run in progress, and the memory that it may use: for tools that plan."""

import torch

from distributed_training.data.batches import initial_counts
from distributed_training.memory.fit import Limits, check_is_planned
from distributed_training.memory.system import memory_limit
from distributed_training.ranks.context import DistContext
from distributed_training.settings.settings import Settings
from distributed_training.workload.architectures import Architecture
from distributed_training.workload.workload import Device, Kernels, OwnRank, Workload, adapters


def workload_of_run(
    settings: Settings, ctx: DistContext, model: Architecture, seq_length: int
) -> Workload:
    """Describe a run for the memory estimate.

    Raises:
        UserError: the estimate does not support the run (see `check_is_planned`).
    """
    chosen, training = settings.model, settings.training
    check_is_planned(settings.strategy, training.eval_only)
    return Workload(
        model,
        ctx.world_size,
        training.batch_size,
        seq_length,
        ctx.precision,
        chosen.gradient_checkpointing,
        training.gradient_accumulation_steps,
        device=Device(ctx.device.type, ctx.capability),
        rank=OwnRank(
            number=0 if ctx.simulated else None,
            share=initial_counts(training, ctx)[ctx.rank] / training.batch_size,
        ),
        lora=adapters(
            model, chosen.lora_r, chosen.lora_targets, chosen.load_in_4bit, chosen.lora_dora
        ),
        kernels=Kernels(chosen.fused_gelu, settings.data.isolates_documents, chosen.compile),
        optimizer=training.optim,
        reduce_dtype=settings.strategy.reduce_dtype,
    )


def memory_limits(ctx: DistContext) -> Limits:
    """Return the memory limits of this rank's device and of its node, in bytes."""
    ranks = ctx.ranks_per_node
    if ctx.device.type == "cuda":
        return Limits(memory_limit(ctx.device), memory_limit(torch.device("cpu")), None, ranks)
    return Limits(memory_limit(ctx.device) // ranks)  # the ranks share the host's memory
