"""--auto_micro_batch: after memory ran out, all ranks start again with half the micro-batch.

Each rank replaces its program by a new one in the same process (execve), which no launcher notices.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypedDict

from distributed_training import process
from distributed_training.cli.parse import CommandLine, complete
from distributed_training.errors import UserError
from distributed_training.files import atomic
from distributed_training.files.json_types import JsonObject
from distributed_training.ranks import launch
from distributed_training.settings.settings import Settings
from distributed_training.settings.training import TrainingSettings
from distributed_training.strategies.strategy import FlagValues, Strategy

if TYPE_CHECKING:
    import torch.distributed as dist

READY_SECONDS = 10  # for all ranks to see that they restart


class RestartValues(TypedDict):
    """The flags that change in a restart."""

    batch_size: int
    gradient_accumulation_steps: int
    output_dir: str
    choice: JsonObject | None  # of flags that are auto


def values() -> RestartValues:
    """Return the values with which this program was started again."""
    found: RestartValues = json.loads(os.environ[process.RESTARTED])
    return found


@dataclass
class Restart:
    """What a rank needs to start again with a smaller micro-batch."""

    values: RestartValues
    useful: Callable[[], bool]  # whether the micro-batch may be the cause of an error now

    def wait_for_ranks(self, store: dist.Store, rank: int, ranks: int) -> None:
        """Wait until all ranks are ready to restart; if rank 0 hosts the store, it leaves first."""
        with contextlib.suppress(RuntimeError):  # the store has ended with rank 0
            deadline = time.monotonic() + READY_SECONDS
            ready = store.add("restart/ready", 1)
            leaves_first = rank == 0 or launch.agent_hosts_store()
            while not leaves_first or (ready < ranks and time.monotonic() < deadline):
                time.sleep(0.1)
                ready = store.add("restart/ready", 0)

    def replace_program(self) -> NoReturn:
        """Replace this program by one with other values of some flags, as all ranks do."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for name in os.listdir("/dev/fd"):  # sockets of libraries, which keep ports in use
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), int(name) < 3)
        if process.CORES is not None:  # OpenMP may have bound this thread to one core
            os.sched_setaffinity(0, process.CORES)
        # The new program gets a signal that arrives before it has handlers: see `handle_signals`.
        signal.pthread_sigmask(signal.SIG_BLOCK, process.STOP_SIGNALS)
        environment = {**process.ENVIRONMENT, process.RESTARTED: json.dumps(self.values)}
        os.execve(sys.executable, process.COMMAND, environment)


def handle_signals() -> None:
    """Catch the stop signals of a restarted program, also those that came before its start."""

    def stopped(name: str) -> UserError:
        record_end(error := launch.stopped_before_start(name))
        return error

    process.catch_signals(process.ALSO_IF_IGNORED, stopped)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process.STOP_SIGNALS)


def record_end(error: UserError) -> bool:
    """Write to results.json how a restarted program ended before it has opened its folder.

    The replaced program left the status "running".

    Returns:
        True: the error is to be reported (see `FailureMonitor.record_with`).
    """
    path = Path(values()["output_dir"]) / "results.json"
    with contextlib.suppress(OSError, ValueError):  # a full disk, or a host without the folder
        results = atomic.read_json(path)
        if results["status"] == "running":
            results |= {"status": error.status, "reason": str(error), "error_kind": error.kind}
            atomic.write_text(path, json.dumps(results, indent=2) + "\n")
    return True


def restart_values(
    training: TrainingSettings, folder: Path, choice: JsonObject | None
) -> RestartValues:
    """Return the flags of a restart with half the micro-batch and the same global batch.

    The micro-batch has more than one sequence.

    Args:
        choice: of flags that are auto, which is kept.
    """
    total = training.batch_size * training.gradient_accumulation_steps
    # Half, or the next smaller size of which the global batch is a multiple.
    size = next(size for size in range(training.batch_size // 2, 0, -1) if total % size == 0)
    steps = total // size
    return {
        "batch_size": size,
        "gradient_accumulation_steps": steps,
        "output_dir": str(folder),
        "choice": choice,
    }


def restarted(line: CommandLine) -> Settings:
    """Return the settings of a program that was started again, with the changed flags."""
    settings = line.settings
    if settings.parallelism.to_choose:  # keep the choice
        settings = complete(settings.as_given, values()["choice"]).settings
    return settings.replace(**restarted_with(settings.strategy))


def restarted_with(strategy: Strategy) -> FlagValues:
    """Return the `restart_values` that started this program, and the strategy for them.

    Args:
        strategy: of the command line, which a restart does not change.
    """
    changed = values()
    micro_batches = changed["batch_size"], changed["gradient_accumulation_steps"]
    return {**changed, "strategy_with_options": strategy.with_micro_batches(*micro_batches)}
