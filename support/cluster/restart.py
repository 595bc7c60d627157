"""Restart of all ranks with a smaller micro-batch when memory runs out (--auto_micro_batch).

Each rank replaces its program by a new one in the same process (execve), which no launcher notices:
the other ranks wait in a collective that the rank without memory never joins.
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
from support.cli.arguments import Arguments
from support.cluster.launch import Launch, agent_hosts_store

if TYPE_CHECKING:  # --help must not wait for torch
    import torch.distributed as dist

REQUEST = "restart"  # begins the entry of the store that all ranks read when a rank fails
ALL_READY_SECONDS = 10  # for all ranks to see the request


class Restart:
    """What a rank needs to start again with a smaller micro-batch.

    Args:
        values: the flags that change, by name.
        useful: returns whether the micro-batch may be the cause of an out-of-memory error now.
    """

    def __init__(self, launch: Launch, values: dict, useful: Callable[[], bool]):
        self.launch, self.values, self.useful = launch, values, useful
        self._once, self.started = threading.Lock(), False  # whether a thread called `execute`

    @property
    def announcement(self) -> str:
        """What all ranks do, for the user."""
        flags = [f"--{name} {value}" for name, value in self.values.items()]
        return f"All ranks start again with {' '.join(flags[:2])}."  # not --output_dir

    def execute(self, store: dist.Store | None) -> NoReturn:
        """Replace this program when all ranks are about to do so; None for a single process."""
        self._once.acquire()  # a second thread of this process waits here until the program ends
        self.started = True
        if store is not None:
            waiting = threading.Thread(target=self._wait_for_ranks, args=(store,), daemon=True)
            waiting.start()
            waiting.join(2 * ALL_READY_SECONDS)  # the store may not answer
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for name in os.listdir("/dev/fd"):  # sockets of libraries, which keep ports in use
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), int(name) < 3)
        if process.CORES is not None:  # OpenMP may have bound this thread to one core
            os.sched_setaffinity(0, process.CORES)
        environment = {**process.ENVIRONMENT, process.RESTARTED: json.dumps(self.values)}
        os.execve(sys.executable, process.COMMAND, environment)

    def _wait_for_ranks(self, store: dist.Store) -> None:
        """Wait until all ranks are ready; without the store, until rank 0 has left."""
        deadline = time.monotonic() + ALL_READY_SECONDS
        with contextlib.suppress(RuntimeError):  # rank 0 has exited, and the store with it
            ready = store.add("restart/ready", 1)
            while not (self.launch.is_main or agent_hosts_store()) or (
                ready < self.launch.world_size and time.monotonic() < deadline
            ):
                time.sleep(0.1)
                ready = store.add("restart/ready", 0)


def restart_values(args: Arguments, folder: Path) -> dict | None:
    """Return the flags of a restart with half the micro-batch and the same global batch.

    None without --auto_micro_batch, and if the micro-batch is a single sequence.
    """
    if not args.auto_micro_batch or args.batch_size == 1:
        return None
    total = args.batch_size * args.gradient_accumulation_steps
    # Half, or the next smaller size of which the global batch is a multiple.
    size = next(size for size in range(args.batch_size // 2, 0, -1) if total % size == 0)
    steps = total // size
    return {"batch_size": size, "gradient_accumulation_steps": steps, "output_dir": str(folder)}


def continue_restarted(args: Arguments) -> Arguments:
    """Return the arguments with the values of `Restart`, if this program is a restart."""
    if process.RESTARTED not in os.environ:
        return args
    values = json.loads(os.environ[process.RESTARTED])
    config = args.ds_config_dict
    if config is not None:
        micro, steps = values["batch_size"], values["gradient_accumulation_steps"]
        sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
        config = {**config, **sizes}
    return args.replace(**values, ds_config_dict=config)
