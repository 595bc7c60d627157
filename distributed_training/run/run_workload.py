"""The workload of a run in progress, and the memory that it may use: for tools that plan."""

from dataclasses import replace

import torch

from distributed_training.data.batches import initial_counts
from distributed_training.memory.fit import Limits, check_is_planned, workload_of
from distributed_training.memory.system import memory_limit
from distributed_training.ranks.context import DistContext
from distributed_training.settings.settings import Settings
from distributed_training.workload.architectures import Architecture
from distributed_training.workload.workload import Device, OwnRank, Workload


def workload_of_run(
    settings: Settings, ctx: DistContext, model: Architecture, seq_length: int
) -> Workload:
    """Describe a run for the memory estimate.

    Raises:
        UserError: the estimate does not support the run (see `check_is_planned`).
    """
    check_is_planned(settings.strategy, settings.training.eval_only)
    device = Device(ctx.device.type, ctx.capability)
    work = workload_of(settings, model, ctx.world_size, ctx.precision, seq_length, device)
    own_rank = OwnRank(
        number=0 if ctx.simulated else None,
        share=initial_counts(settings.training, ctx)[ctx.rank] / work.batch_size,
    )
    return replace(work, rank=own_rank)


def memory_limits(ctx: DistContext) -> Limits:
    """Return the memory limits of this rank's device and of its node, in bytes."""
    ranks = ctx.ranks_per_node
    if ctx.device.type == "cuda":
        return Limits(memory_limit(ctx.device), memory_limit(torch.device("cpu")), None, ranks)
    return Limits(memory_limit(ctx.device) // ranks)  # the ranks share the host's memory
