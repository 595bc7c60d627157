"""--check: the communication between the ranks."""

import os
import socket
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from distributed_training.ranks.context import DistContext
from distributed_training.units import GB, MB
from tools.check.check_line import OK, Line, line_of


def communication(ctx: DistContext) -> Line:
    """Measure collectives among the ranks: bandwidth with 64 and 1 MiB, latency with 8 bytes."""
    if ctx.world_size == 1:
        return Line(OK, "communication", f"{ctx.backend}; a single process")
    latency = _seconds_of(dist.all_reduce, ctx, torch.ones(2, device=ctx.device))
    speeds, small = _bandwidth(ctx, 64 * MB), _bandwidth(ctx, MB)
    hosts = ", ".join(dict.fromkeys(ctx.all_gather(socket.gethostname())))  # by rank
    large = ", ".join(f"{kind} {speed / GB:.3g}" for kind, speed in speeds.items())
    of_1_mib = ", ".join(f"{speed / GB:.3g}" for speed in small.values())
    text = (
        f"{ctx.backend} over {ctx.world_size} ranks on {hosts}: {large} GB/s, "
        f"{1e6 * latency:.0f} µs; with 1 MiB {of_1_mib} GB/s"
    )
    is_fast = ctx.backend != "nccl" or speeds["all-reduce"] >= GB
    remedy = "slow for GPUs: NCCL_DEBUG=INFO shows the network in use; see docs/TROUBLESHOOTING.md"
    return line_of(is_fast, "communication", text, remedy)


def _bandwidth(ctx: DistContext, message: int) -> dict[str, float]:
    """Measure the bus bandwidth of collectives with messages of so many bytes.

    It is the bytes that each rank sends per second if the collective is a ring: 2 · (N − 1) / N
    times the message for an all-reduce, half of that for the others.
    """
    ranks = ctx.world_size
    part = torch.ones(max(1, message // 4 // ranks), device=ctx.device)  # elements of 4 bytes
    whole = part.repeat(ranks)
    sent = (ranks - 1) / ranks * whole.nbytes
    return {
        "all-reduce": 2 * sent / _seconds_of(dist.all_reduce, ctx, whole),
        "all-gather": sent / _seconds_of(dist.all_gather_into_tensor, ctx, whole, part),
        "reduce-scatter": sent / _seconds_of(dist.reduce_scatter_tensor, ctx, part, whole),
    }


def _seconds_of(collective: Callable, ctx: DistContext, *tensors: torch.Tensor) -> float:
    """Return the median time of some calls of a collective, after a first one that connects.

    The median, because on a busy host a rank that waits for a core delays some calls.
    """
    wait = torch.cuda.synchronize if ctx.device.type == "cuda" else dist.barrier
    seconds = []
    for _ in range(1 + (3 if tensors[0].nbytes > MB else 9)):
        wait()
        start = time.perf_counter()
        collective(*tensors)
        if ctx.device.type == "cuda":
            wait()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def rendezvous(ctx: DistContext) -> Line:
    """Describe the launcher and where the ranks met."""
    launch, plural = ctx.launch, "s" * (ctx.nodes.number > 1)
    text = (
        f"{launch.launcher}, master {launch.master_addr}:{launch.master_port}, "
        f"{ctx.nodes.number} node{plural}, ranks per node: {launch.local_world_size}"
    )
    remedy = "one core per task, and data preparation and offload need more: --cpus-per-task=8"
    one_core = os.environ.get("SLURM_CPUS_PER_TASK", "1") == "1"
    return line_of(launch.launcher != "srun" or not one_core, "rendezvous", text, remedy)
