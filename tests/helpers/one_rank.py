"""The only rank of a run, for tests that call functions of a run without starting a process."""

import contextlib

import torch
import torch.distributed as dist

from distributed_training.ranks.context import DistContext
from distributed_training.ranks.failures import FailureMonitor
from distributed_training.ranks.launch import Launch
from distributed_training.ranks.stop import StopSignal


@contextlib.contextmanager
def one_rank():
    """Yield a DistContext with a process group of one CPU process."""
    launch = Launch("python", 0, 0, 1, 1, 0, "", 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DistContext(launch, torch.device("cpu"), "gloo", FailureMonitor(StopSignal()))
    finally:
        dist.destroy_process_group()
