"""Restart of all ranks with a smaller micro-batch when memory runs out (--auto_micro_batch).

Each rank replaces its program by a new one in the same process (execve), which no launcher notices.
The smaller micro-batch is passed in an environment variable.

Nothing else is safe for every strategy. A rank that runs out of memory leaves the others in a
collective that it never joins, so the process group cannot be used again; a trial step before the
training has the same problem, because ZeRO-3 and FSDP gather parameters in it. Buckets, hooks and
DeepSpeed's engine keep tensors and the batch size, and the allocator's memory is fragmented. A new
program has none of this, and costs the time of a start.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from support import process
from support.cluster.launch import Launch
from support.cluster.peers import agent_hosts_store, in_time
from support.cluster.stop_signal import StopSignal

if TYPE_CHECKING:  # --help must not wait for torch
    import torch.distributed as dist

REQUEST = "restart"  # begins the entry of the store that all ranks read when a rank fails
ALL_READY_SECONDS = 10  # for all ranks to see the request


class Restart:
    """What a rank needs to start again with a smaller micro-batch.

    Args:
        values: the flags that change, by name.
        useful: returns whether the micro-batch may be the cause of an out-of-memory error now.
        stop: a stop signal that arrives meanwhile is left to the new program.
    """

    def __init__(self, launch: Launch, values: dict, useful: Callable[[], bool], stop: StopSignal):
        self.launch, self.values, self.useful, self.stop = launch, values, useful, stop
        self._once, self.started = threading.Lock(), False  # whether a thread called `execute`

    def execute(self, store: dist.Store | None) -> NoReturn:
        """Replace this program, when all ranks are about to do so.

        If a rank left earlier, the others, which may wait for it in a collective of NCCL, could be
        aborted. If rank 0 hosts the store, the others wait until it has left, because they would
        connect to the old store otherwise. With torchrun's store the rendezvous tells the old ranks
        from the new ones.

        Args:
            store: of the failures; None for a single process.
        """
        self._once.acquire()  # a second thread of this process waits here until the program ends
        self.started = True
        if store is not None:
            with contextlib.suppress(Exception):  # the store has left, or does not answer
                in_time(lambda: self._wait_for_ranks(store), 2 * ALL_READY_SECONDS)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for name in os.listdir("/dev/fd"):  # sockets of libraries, which keep ports in use
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), int(name) < 3)
        environment = {**process.ENVIRONMENT, process.RESTARTED: json.dumps(self.values)}
        if process.CORES is not None:  # OpenMP may have bound this thread to one of them
            os.sched_setaffinity(0, process.CORES)
        self.stop.hand_over()
        os.execve(sys.executable, process.COMMAND, environment)

    def _wait_for_ranks(self, store: dist.Store) -> None:
        ready, is_first = store.add("restart/ready", 1), self.launch.is_main or agent_hosts_store()
        deadline = time.monotonic() + ALL_READY_SECONDS
        while is_first and ready < self.launch.world_size:
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)
            ready = store.add("restart/ready", 0)
        while not is_first:  # until rank 0 has left
            store.add("restart/ready", 0)
            time.sleep(0.1)


def restart_values(args, folder: Path) -> dict | None:
    """Return the flags of a restart with half the micro-batch and the same global batch.

    Args:
        args: --auto_micro_batch, --batch_size, --gradient_accumulation_steps.
        folder: the output folder, which the new program uses again.
    Returns:
        None without --auto_micro_batch, and if the micro-batch is a single sequence.
    """
    if not args.auto_micro_batch or args.batch_size == 1:
        return None
    total = args.batch_size * args.gradient_accumulation_steps
    # Half, or the next smaller size of which the global batch is a multiple.
    size = next(size for size in range(args.batch_size // 2, 0, -1) if total % size == 0)
    return {
        "batch_size": size,
        "gradient_accumulation_steps": total // size,
        "output_dir": str(folder),
    }


def continue_restarted(args):
    """Return the arguments with the values of `Restart`, if this program is a restart."""
    if process.RESTARTED not in os.environ:
        return args
    values = json.loads(os.environ[process.RESTARTED])
    config = args.ds_config_dict
    if config is not None:
        config = {
            **config,
            "train_micro_batch_size_per_gpu": values["batch_size"],
            "gradient_accumulation_steps": values["gradient_accumulation_steps"],
        }
    return args.replace(**values, ds_config_dict=config)
