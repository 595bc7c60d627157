"""The only rank of a run, for tests that call functions of a run without starting a process."""

import contextlib

import torch
import torch.distributed as dist

from support.cluster.context import DistContext
from support.cluster.failures import FailureMonitor
from support.cluster.launch import Launch
from support.cluster.stop_signal import StopSignal
from support.console import Console


@contextlib.contextmanager
def one_rank():
    """Yield a DistContext with a process group of one CPU process."""
    launch, console = Launch("python", 0, 0, 1, 1, 0, "", 0), Console(True)
    failures = FailureMonitor(launch, console, StopSignal())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DistContext(launch, torch.device("cpu"), "gloo", console, failures)
    finally:
        dist.destroy_process_group()
