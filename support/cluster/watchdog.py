"""The watchdog of a rank: it detects ranks that failed, were killed or stopped, or wait.

A rank that raises an error writes it into the store. A rank that is killed or stopped cannot, so
every rank publishes its state once per second and reads that of the next rank. Calls to the store
block while its host is stopped: one thread makes them (`exchange`), another one compares (`look`).

The hang report in <output_dir>/hang: while a rank trains, faulthandler's timer in C writes the
stacks of all its threads to rank-N.txt after --hang_seconds without a step or a collective. A
waiting rank adds report.txt: the ranks that it waits for, and a table of all ranks. SIGUSR2 to any
rank makes all ranks write their stacks.
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
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import psutil
import torch.distributed as dist

from support import console as progress
from support.cluster.comm_volume import Traffic
from support.cluster.launch import Launch, agent_hosts_store
from support.cluster.stop_signal import StopSignal
from support.console import Console, text_table
from support.errors import TrainingError
from support.train_state import TrainState

ROUND_SECONDS = 1
# Rounds without an answer after which a rank is lost; with the time to exit less than 30 s. It
# counts rounds, not seconds: a suspended process makes none.
SILENT_ROUNDS = 13
STARTING_ROUNDS = 60  # for the first answer
KILLED = "was it killed, or out of host memory (`dmesg | grep -i oom`)?"
HEADERS = ("rank", "host", "pid", "process", "step", "doing", "last collective", "started")


class Watchdog:
    """Exchange of states with the other ranks, and what this rank adds to a hang report."""

    def __init__(self, launch: Launch, console: Console, stop: StopSignal):
        self.store: dist.Store | None = None  # of this object; None for a single process
        self.traffic = Traffic()
        self.folder: Path | None = None  # the output folder; None: reports go to stderr
        self.state: TrainState | None = None  # None before and after the training
        self.doing: Callable[[], str] = str  # returns the phase of the run
        self._launch, self._console, self._stop = launch, console, stop
        self._rounds, self._failed = 0, False  # of `exchange`
        self._error: Exception | None = None
        self._lost = False  # whether the store has exited
        self._neighbor, self._neighbor_state = (launch.rank + 1) % launch.world_size, {"beat": 0}
        self._seen, self._silent, self._quiet = (0, 0), 0, 0  # of `look`: rounds without a change
        self._progress: tuple[int, int] | None = None  # step and number of collectives
        self._seconds, self._changed, self._reported = 0, time.monotonic(), False
        self._requests = 0
        self._stacks: IO[str] | None = None  # rank-N.txt

    def start(self, store: dist.Store | None, hang_seconds: int) -> None:
        """Count the collectives and handle SIGUSR2.

        Args:
            store: a connection that other threads use rarely; None for a single process.
            hang_seconds: for which a step or a collective may wait.
        """
        self.store, self._seconds = store, hang_seconds
        self.traffic.start()
        # The handler in C writes the number of the signal to the file that `StopSignal` reads.
        signal.signal(signal.SIGUSR2, lambda *_: None)

    # ------------------------------------------------------------------- the state of the ranks

    def exchange_until(self, ending: threading.Event) -> None:
        """Call `exchange` once per second until it fails or `ending` is set; runs in a thread."""
        try:
            while not ending.wait(ROUND_SECONDS):
                self.exchange()
        except Exception as error:  # `look` raises it
            self._error = error

    def exchange(self) -> None:
        """Publish this rank's state, read the neighbor's, and write what a hang report needs."""
        self._rounds += 1
        state = json.dumps(self._own_state())
        try:
            if self.store is not None:
                self.store.set(f"state/{self._launch.rank}", state)
                self._failed = self.store.check(["failure"])
                if self.store.check([f"state/{self._neighbor}"]):
                    self._neighbor_state = json.loads(self.store.get(f"state/{self._neighbor}"))
            self._answer_requests()
        except RuntimeError:  # as the errors of a store are
            self._lost = True
            raise
        self._arm_timer()
        self._report_wait()

    def look(self) -> bool:
        """Return whether another rank reports an error; called once per second.

        Raises:
            TrainingError: a rank ended or does not answer, and this rank must report it.
            Exception: an error of `exchange` that is not one of the store.
        """
        host = "torchrun's agent, which connects the ranks," if agent_hosts_store() else "Rank 0"
        if self._lost and not self._failed:
            raise TrainingError(f"{host} ended without reporting an error: {KILLED}")
        if self._error is not None and not self._failed:
            raise self._error
        if self._failed or self.store is None:
            return self._failed
        (rounds, beat), self._seen = self._seen, (self._rounds, self._neighbor_state["beat"])
        self._silent = self._silent + 1 if self._rounds == rounds else 0
        if self._silent > SILENT_ROUNDS:
            raise TrainingError(
                f"{host} does not answer: "
                "the process was stopped, or its host hangs or cannot be reached."
            )
        if not self._silent:  # the neighbor's state was read
            self._quiet = self._quiet + 1 if self._seen[1] == beat else 0
        limit = SILENT_ROUNDS if self._seen[1] else STARTING_ROUNDS
        # A library that holds Python's lock for minutes stops the threads of a running process.
        if self._quiet > limit and process_status(self._neighbor_state) != psutil.STATUS_RUNNING:
            raise TrainingError(
                f"Rank {self._neighbor} ended without reporting an error, or was stopped: {KILLED}"
            )
        return False

    def _own_state(self) -> dict:
        return {
            "beat": self._rounds,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self.state.step + 1 if self.state else None,
            "doing": self.doing(),
            "number": self.traffic.number,
            "collective": self.traffic.last,
            "seconds": round(time.monotonic() - self._changed),
        }

    def _states(self) -> dict[int, dict]:
        """Return the last state that each rank has published."""
        states, store = {self._launch.rank: self._own_state()}, self.store
        for rank in range(self._launch.world_size):
            if store and rank not in states and store.check([f"state/{rank}"]):
                states[rank] = json.loads(store.get(f"state/{rank}"))
        return dict(sorted(states.items()))

    # -------------------------------------------------------------------------- the hang report

    def dump(self, reason: str) -> None:
        """Write the stacks of all threads of this process now."""
        file = self._stacks = self._stacks or self._open(f"rank-{self._launch.rank}.txt")
        with contextlib.suppress(OSError):
            # Not progress.write: the main thread may block while it holds the lock of the bars.
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
            file.flush()
            faulthandler.dump_traceback(file)

    def write_table(self, reason: str) -> None:
        """Append the table of all ranks to report.txt, and print one line."""
        rows = [
            [
                *(str(rank), state["host"], str(state["pid"]), process_status(state)),
                *(str(state["step"] or ""), state["doing"]),
                *(f"{state['number']} {state['collective']}", f"{state['seconds']} s ago"),
            ]
            for rank, state in self._states().items()
        ]
        head = f"Hang report of {time.strftime('%Y-%m-%d %H:%M:%S')}\n{reason}"
        file = self._open("report.txt")
        with contextlib.suppress(OSError):
            progress.write(f"{head}\n\n{text_table(rows, HEADERS)}\n\n", file)
        if file is not sys.stderr:
            file.close()
            place = f"{Path(file.name).parent} on {socket.gethostname()}"
            self._console.print(f"ℹ️  {reason}: the stacks of the ranks are in {place}")

    def close(self) -> None:
        """Stop the timer, and remove rank-N.txt if nothing was written to it."""
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is None or self._stacks is sys.stderr:
            return
        with contextlib.suppress(OSError):
            path = Path(self._stacks.name)
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()  # fails if another rank has its file there

    def _arm_timer(self) -> None:
        """Start the time again after each step and each collective."""
        current = (self.state.step, self.traffic.number) if self.state else None
        if current == self._progress:
            return
        self._progress, self._changed, self._reported = current, time.monotonic(), False
        faulthandler.cancel_dump_traceback_later()
        if current:
            self._stacks = self._stacks or self._open(f"rank-{self._launch.rank}.txt")
            faulthandler.dump_traceback_later(self._seconds, file=self._stacks)

    def _answer_requests(self) -> None:
        signaled = signal.SIGUSR2 in self._stop.arrived_signals()
        before, self._requests = self._requests, self._requests + signaled
        if self.store:
            self._requests = self.store.add("hang/requests", signaled)
        if self._requests > before:
            self.dump("SIGUSR2 requested the stacks")
        if signaled and self._requests == before + 1:  # signals to all ranks are one request
            self.write_table("SIGUSR2 requested this report")

    def _report_wait(self) -> None:
        waited = time.monotonic() - self._changed
        if not self.store or not self._progress or self._reported or waited < self._seconds:
            return
        reason, number = diagnosis(states := self._states()), self.traffic.number
        if reason and number == max(state["number"] for state in states.values()):
            self._reported = True
            if self.store.add(f"hang/{number}", 1) == 1:  # the first of the ranks that wait
                self.write_table(reason)

    def _open(self, name: str) -> IO[str]:
        if self.folder:
            with contextlib.suppress(OSError):  # a node that does not see the output folder
                (self.folder / "hang").mkdir(exist_ok=True)
                return open(self.folder / "hang" / name, "a", encoding="utf-8")
        return sys.stderr


def diagnosis(states: dict[int, dict]) -> str:
    """Say which ranks the others wait for; "" if a rank does not train.

    Every rank starts the same collectives in the same order: "number" counts them.
    """
    latest = max(state["number"] for state in states.values())
    waiting = {rank: s["collective"] for rank, s in states.items() if s["number"] == latest}
    if behind := states.keys() - waiting:
        have, wait = "have" if len(behind) > 1 else "has", "wait" + "s" * (len(waiting) == 1)
        collective = f"collective {latest} ({waiting[min(waiting)]})"
        who = rank_names(behind).capitalize()
        return f"{who} {have} not started {collective}, in which {rank_names(waiting)} {wait}"
    if len(states) == 1 or any(state["step"] is None for state in states.values()):
        return ""
    names = ", ".join(f"rank {rank} in {name}" for rank, name in waiting.items())
    verb = "differ" if len({*waiting.values()}) > 1 else "wait"
    return f"The ranks {verb} in collective {latest}: {names}"


def process_status(state: dict) -> str:
    """Return the status of a rank's process, such as "stopped"; "" on another host."""
    try:
        here = state.get("host") == socket.gethostname()
        return psutil.Process(state["pid"]).status() if here else ""
    except psutil.Error:
        return "ended"


def rank_names(ranks: Iterable[int]) -> str:
    """Name ranks: "rank 3", "ranks 0-2, 5"."""
    numbers = sorted(ranks)
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    spans = [[str(rank) for _, rank in run] for _, run in runs]
    texts = [span[0] if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(texts)}"
