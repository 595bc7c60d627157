"""The process group: its backend, and waiting for its ranks."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from support.cli.arguments import Arguments
from support.cluster.context import DistContext
from support.cluster.devices import choose_device, identify_gpu, unused_gpu
from support.cluster.launch import Launch
from support.cluster.rendezvous import ARRIVAL_SECONDS, open_store, rendezvous
from support.console import Console
from support.strategy import STRATEGIES


def join(args: Arguments, launch: Launch) -> DistContext:
    """Initialize the process group: NCCL for GPUs, gloo for CPU processes.

    A single process also gets a process group, so that there is only one code path.

    Returns:
        This process among the ranks: its device, its output, and the monitor of failures.
    Raises:
        TrainingError: a rank did not arrive in time, or the ranks do not fit together.
        UserError: this rank has no GPU of its own.
    """
    device = choose_device(launch)
    backend = "fake" if args.simulate_gpus else "nccl" if device.type == "cuda" else "gloo"
    console = Console(launch.is_main, args.quiet, args.verbose)
    if gpu := unused_gpu():
        console.warn(f"{gpu} are not supported: training on the CPU.")
    ctx = DistContext.create(launch, device, backend, console)
    dist.init_process_group(
        store=connect_ranks(ctx, args.ddp_timeout, args.hang_seconds),
        rank=ctx.rank,
        world_size=ctx.world_size,
        timeout=timedelta(seconds=args.ddp_timeout),
        **group_options(args, ctx),
    )
    ctx.nodes = sum(ctx.all_gather(launch.is_node_leader))  # one leader per node
    torch.set_float32_matmul_precision("high")  # use TF32 tensor cores for fp32 where available
    # Not warn_only: the backward pass of attention on a GPU would not be deterministic then.
    torch.use_deterministic_algorithms(args.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # no result depends on it
    return ctx


def group_options(args: Arguments, ctx: DistContext) -> dict[str, Any]:
    """Choose the backend of the process group, and whether the group is bound to a device.

    FSDP with CPU offload also reduces tensors in host memory, which NCCL cannot do: GradScaler's
    found_inf flag (torch/distributed/tensor/_dispatch.py, found_inf_reduce_handler). Gloo is added
    only in this case, because it needs a network interface that all hosts reach by name.

    DeepSpeed creates a second group of all ranks (deepspeed/utils/groups.py, _clone_world_group).
    If the first group is bound to a device, NCCL splits its communicator instead of creating
    another one. torch 2.6.1 to 2.7.0 may hang then (pytorch issue 153960), and with a single rank
    there is nothing to split.

    Returns:
        Keyword arguments of `dist.init_process_group`: `backend`, and in some cases `device_id`.
    """
    if ctx.backend != "nccl":
        return {"backend": ctx.backend}
    if STRATEGIES[args.strategy].engine == "fsdp" and args.fsdp.offload:
        return {"backend": "cpu:gloo,cuda:nccl"}
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:3])
    if args.ds_config_dict and ctx.world_size > 1 and not (2, 6, 0) < release < (2, 7, 1):
        return {"backend": "nccl", "device_id": ctx.device}
    return {"backend": "nccl"}


def connect_ranks(ctx: DistContext, seconds: float, hang_seconds: int) -> dist.Store:
    """Wait until all ranks have started and fit together, and watch them from then on.

    This also installs the handlers of the stop signals and of SIGUSR2.

    In a simulation this process is rank 0, and the other ranks do not exist. It uses PyTorch's
    "fake" backend for tests, whose collectives return at once and transfer no data. Every strategy
    allocates the same memory as among real ranks.

    Args:
        seconds: time to wait for the last rank.
        hang_seconds: for which a collective may wait before the hang report is written.
    Returns:
        The store for `dist.init_process_group`.
    Raises:
        TrainingError: a rank did not arrive in time, or the ranks do not fit together.
    """
    if ctx.simulated:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        ctx.stop.install()
        ctx.failures.watch([], hang_seconds)
        return FakeStore()
    seconds = min(seconds, ARRIVAL_SECONDS)
    store, attempt = rendezvous(ctx.launch, ctx.backend, seconds, identify_gpu(ctx.device))
    ctx.stop.install()
    # Before NCCL connects the ranks: it would wait for a rank that has already failed.
    several = ctx.world_size > 1
    stores = [open_store(ctx.launch, attempt) for _ in range(2)] if several else []
    ctx.failures.watch(stores, hang_seconds)
    return store
