"""The hang report: every rank's stacks and step, in the folder <output_dir>/hang.

While a rank trains, faulthandler's timer in C writes the stacks of all its threads to rank-N.txt
after --hang_seconds without a step or a collective. It needs neither the main thread, which may be
blocked in a collective, nor Python's lock. A waiting rank adds report.txt: the ranks that it waits
for, and a table of all ranks. SIGUSR2 to any rank makes all ranks write their stacks at any time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil
import torch.distributed as dist

from support import progress
from support.cluster.comm_volume import Traffic
from support.cluster.launch import Launch
from support.cluster.stop_signal import StopSignal
from support.console import Console
from support.text_tables import text_table
from support.train_state import TrainState

FOLDER, FILE_NAME = "hang", "report.txt"
REQUESTS = "hang/requests"  # entry of the store: how often the stacks were requested
# If all ranks have started the same collective, it is a hang only if it takes longer than this
# number of times the longest time between two collectives so far.
SLOW_FACTOR = 3
HEADERS = ("rank", "host", "pid", "process", "step", "doing", "last collective", "started")


class HangReport:
    """The part of one rank in hang reports; `observe` is called once per second, in a thread."""

    def __init__(self, launch: Launch, console: Console, stop: StopSignal):
        self.traffic = Traffic()
        self.folder: Path | None = None  # the output folder; None: stacks go to stderr
        self.state: TrainState | None = None  # None before and after the training
        self.doing: Callable[[], str] = str  # returns the phase of the run
        self.lost = ""  # set by another thread: the line about a rank that does not answer
        self._launch, self._console, self._stop = launch, console, stop
        self._seconds = 0
        self._file: IO[str] | None = None  # rank-N.txt
        self._progress: tuple[int, int] | None = None  # step and number of collectives
        self._changed, self._longest = time.monotonic(), 0.0
        self._answered, self._reported = 0, False  # requests; whether `_progress` was reported

    def start(self, seconds: int) -> None:
        """Count the collectives and handle SIGUSR2.

        Args:
            seconds: for which a step or a collective may wait (--hang_seconds).
        """
        self._seconds = seconds
        self.traffic.start()
        # Python's handler in C writes the number of the signal to the file that `StopSignal` reads,
        # even while the main thread is blocked, and if the kernel interrupts a thread of C++.
        signal.signal(signal.SIGUSR2, lambda *_: None)

    def observe(self, store: dist.Store | None) -> None:
        """Arm the timer after each step, answer requests, and report a wait."""
        self._arm()
        signaled = signal.SIGUSR2 in self._stop.arrived_signals()
        requests = store.add(REQUESTS, int(signaled)) if store else self._answered + signaled
        first = signaled and requests == self._answered + 1  # a signal to all ranks is one request
        if requests > self._answered:
            self._answered = requests
            self.dump("SIGUSR2 requested the stacks")
        if self.lost:
            self._write_table(self.lost, self._states(store))
            self.lost = ""
        elif first:
            self._write_table("SIGUSR2 requested this report", self._states(store))
        elif store and self._progress and not self._reported and self._waited() >= self._seconds:
            self._report_wait(store)

    def own_state(self) -> dict:
        """Return what this rank publishes of itself."""
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self.state.step + 1 if self.state else None,
            "doing": self.doing(),
            "number": self.traffic.number,
            "collective": self.traffic.last,
            "seconds": round(self._waited()),
        }

    def dump(self, reason: str) -> None:
        """Write the stacks of all threads of this process now."""
        file = self._open()
        with contextlib.suppress(OSError):
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
            file.flush()
            faulthandler.dump_traceback(file)

    def close(self) -> None:
        """Stop the timer, and remove rank-N.txt if nothing was written to it."""
        faulthandler.cancel_dump_traceback_later()
        if self._file is None or self._file is sys.stderr:
            return
        with contextlib.suppress(OSError):
            path = Path(self._file.name)
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()  # fails if another rank has its file there

    def _open(self) -> IO[str]:
        if self._file is None and self.folder and self.folder.is_dir():
            folder = self.folder / FOLDER
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
                self._file = open(folder / f"rank-{self._launch.rank}.txt", "a")  # noqa: SIM115
        return self._file or sys.stderr

    def _waited(self) -> float:
        return time.monotonic() - self._changed

    def _arm(self) -> None:
        current = (self.state.step, self.traffic.number) if self.state else None
        if current == self._progress:
            return
        if current is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(self._seconds, file=self._open())
            self._longest = max(self._longest, self._waited() if self._progress else 0)
        self._progress, self._changed, self._reported = current, time.monotonic(), False

    def _states(self, store: dist.Store | None) -> dict[int, dict]:
        """Return the last state that each rank has published."""
        states = {self._launch.rank: self.own_state()}
        for rank in range(self._launch.world_size):
            if store and rank not in states and store.check([f"state/{rank}"]):
                states[rank] = json.loads(store.get(f"state/{rank}"))
        return dict(sorted(states.items()))

    def _report_wait(self, store: dist.Store) -> None:
        states = self._states(store)
        slow = self._waited() < SLOW_FACTOR * self._longest
        number = self.traffic.number
        is_behind = number < max(state["number"] for state in states.values())
        if len(states) == 1 or is_behind or not (reason := diagnosis(states, slow)):
            return
        self._reported = True
        if store.add(f"hang/{number}", 1) == 1:  # the first of the ranks that wait
            self._write_table(reason, states)

    def _write_table(self, reason: str, states: dict[int, dict]) -> None:
        """Append the table of all ranks to the report, and print one line."""
        if self.folder is None or not self.folder.is_dir():
            progress.write(report(reason, states), sys.stderr)
            return
        folder = self.folder / FOLDER
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            with open(folder / FILE_NAME, "a", encoding="utf-8") as file:
                file.write(report(reason, states))
        place = f"{folder} on {socket.gethostname()}"
        self._console.print(f"ℹ️  {reason}: the stacks of the ranks are in {place}")


def diagnosis(states: dict[int, dict], slow: bool) -> str:
    """Say which ranks the others wait for; "" if the ranks seem not to wait for each other.

    Every rank starts the same collectives in the same order.

    Args:
        states: by rank; see `HangReport.own_state`. The ranks have started no collective for
            --hang_seconds.
        slow: equal states may be those of a slow step.
    """
    latest = max(state["number"] for state in states.values())
    waiting = [rank for rank, state in states.items() if state["number"] == latest]
    behind = states.keys() - waiting
    collective = f"collective {latest} ({states[waiting[0]]['collective']})"
    if behind:
        verb = "has" if len(behind) == 1 else "have"
        return (
            f"{rank_names(behind)} {verb} not started {collective}, "
            f"in which {rank_names(waiting)} wait{'s' * (len(waiting) == 1)}"
        ).capitalize()
    ranks_in: dict[str, list[int]] = {}
    for rank, state in states.items():
        ranks_in.setdefault(state["collective"], []).append(rank)
    if len(ranks_in) > 1:
        places = [f"{rank_names(ranks)} in {name}" for name, ranks in ranks_in.items()]
        return (
            f"The ranks differ in collective {latest}: {', '.join(places)}. "
            "A rank has skipped a collective, or started another one"
        )
    if slow or any(state["step"] is None for state in states.values()):
        return ""
    return f"All ranks have started {collective}, and no rank has started the next one"


def report(reason: str, states: dict[int, dict]) -> str:
    """Return the text of a report: the reason, and a table with a row per rank.

    Args:
        states: by rank; see `HangReport.own_state`.
    """
    rows = [
        [
            *(str(rank), state["host"], str(state["pid"]), process_status(state)),
            *(str(state["step"] or ""), state["doing"]),
            *(f"{state['number']} {state['collective']}", f"{state['seconds']} s ago"),
        ]
        for rank, state in sorted(states.items())
    ]
    head = f"Hang report of {time.strftime('%Y-%m-%d %H:%M:%S')}\n{reason}"
    return f"{head}\n\n{text_table(rows, HEADERS)}\n\n\n"


def process_status(state: dict) -> str:
    """Return the status of a rank's process, such as "stopped"; "" on another host."""
    if state["host"] != socket.gethostname():
        return ""
    try:
        return psutil.Process(state["pid"]).status()
    except psutil.Error:
        return "ended"


def rank_names(ranks) -> str:
    """Name ranks: "rank 3", "ranks 0-2, 5"."""
    runs = itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    texts = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"
