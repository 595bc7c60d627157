"""What a rank does from the meeting of the ranks to its exit, together with all others."""

import os
from collections.abc import Callable
from typing import NoReturn

from torch import nn

from distributed_training import process
from distributed_training.errors import EXIT_PREEMPTED, Preempted
from distributed_training.ranks.context import DistContext
from distributed_training.ranks.failures import FailureMonitor
from distributed_training.ranks.stop import StopSignal


def run_together(
    meet: Callable[[FailureMonitor], DistContext],
    work: Callable[[DistContext], tuple[nn.Module | None, int]],
    fail_early: Callable[[BaseException], NoReturn],
) -> NoReturn:
    """Call `work(meet(monitor))`, and end the process with all ranks.

    An error of one rank ends the others, and is reported once.

    Args:
        meet: initializes the process group, and returns the DistContext.
        work: returns the wrapped model, if any, and the exit code.
        fail_early: reports an error before the ranks can communicate, and exits.
    """
    monitor = FailureMonitor(StopSignal())  # of this process, which ends once
    if process.RESTARTED in os.environ:
        from distributed_training.ranks import restart  # of --auto_micro_batch

        monitor.record_with(restart.record_end)  # until the run opens its folder
    try:
        ctx = meet(monitor)
    except BaseException as error:
        if monitor.is_watching:
            monitor.end_failed(error)
        fail_early(error)
    try:
        model, code = work(ctx)
    except Preempted as preempted:
        monitor.end_together(preempted.model, EXIT_PREEMPTED)
    except BaseException as error:  # also KeyboardInterrupt: no other rank may wait for this one
        monitor.end_failed(error)
    monitor.end_together(model, code)
