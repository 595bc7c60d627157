"""The watchdog of a rank: it detects ranks that failed or were killed, and writes hang reports.

A rank that raises an error writes it into the store of the run. A rank that is killed cannot, so
every rank publishes its state once per second and reads that of the next rank. One thread does
both (`look`). While the host of the store is stopped, this thread waits for it, and --ddp_timeout
ends the run.

The hang report in <output_dir>/hang: while a rank trains, faulthandler's timer in C writes the
stacks of all its threads to rank-N.txt after --hang_seconds without a step or a collective. A
waiting rank adds report.txt: the ranks that it waits for, and a table of all ranks. SIGUSR2 to any
rank makes all ranks write their stacks.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import torch.distributed as dist

from support import console
from support.cluster.comm_volume import Traffic
from support.cluster.launch import agent_hosts_store
from support.errors import TrainingError, redact
from support.train_state import TrainState

ROUND_SECONDS = 1
# Rounds without an answer after which a rank is lost; with the time to exit less than 30 s. It
# counts rounds, not seconds: a suspended process makes none.
SILENT_ROUNDS = 13
ENDED = (
    "ended without reporting an error: "
    "was it stopped or killed, or out of host memory (`dmesg | grep -i oom`)?"
)


class Watchdog:
    """Exchange of states with the other ranks, and what this rank adds to a hang report."""

    def __init__(self, rank: int, ranks: int):
        self.store: dist.Store = dist.HashStore()  # of this process, until `start`
        self.traffic = Traffic()
        self.folder: Path | None = None  # the output folder; None: reports go to stderr
        self.state: TrainState | None = None  # None before and after the training
        self.doing: Callable[[], str] = str  # returns the phase of the run
        self._rank, self._ranks = rank, ranks
        self._beat, self._next_beat = 0, 0  # number of rounds: of this rank and of the next one
        self._silent = 0  # rounds without an answer of the next rank
        self._progress: tuple[int, int] | None = None  # step and number of collectives
        self._seconds, self._changed, self._reported = 0, time.monotonic(), False
        self._requests, self._signals = 0, -1
        self._stacks: IO | None = None  # rank-N.txt

    def start(self, store: dist.Store, hang_seconds: int) -> None:
        """Count the collectives and handle SIGUSR2; only the main thread can do this.

        Args:
            store: a connection that no other thread uses for long.
            hang_seconds: for which a step or a collective may wait.
        """
        self.store, self._seconds = store, hang_seconds
        self.traffic.start()
        # The handler in C writes the signal's number to a pipe, even if the main thread waits in a
        # collective.
        self._signals, writer = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        self._publish()

    # ------------------------------------------------------------------- the state of the ranks

    def look(self) -> bool:
        """Publish this rank's state and read the next rank's; called once per second.

        Returns:
            True if another rank reports an error.
        Raises:
            TrainingError: a rank ended, and this rank must report it.
        """
        self._beat += 1
        try:
            self._publish()
            if self.store.check(["failure"]):
                return True
            self._check_next_rank()
            self._answer_requests()
            self._arm_timer()
            self._report_wait()
        except RuntimeError as error:  # as the errors of a store are
            host = (
                "torchrun's agent, which connects the ranks," if agent_hosts_store() else "Rank 0"
            )
            raise TrainingError(f"{host} {ENDED}") from error
        return False

    def _check_next_rank(self) -> None:
        neighbor = (self._rank + 1) % self._ranks
        state = self._states([neighbor]).get(neighbor, {"beat": 0})
        self._silent = self._silent + 1 if state["beat"] == self._next_beat else 0
        self._next_beat = state["beat"]
        # A library that holds Python's lock for minutes stops the threads of a running process.
        if self._silent > SILENT_ROUNDS:
            from support.cluster.hang_report import RUNNING, process_status

            if process_status(state) != RUNNING:
                raise TrainingError(f"Rank {neighbor} {ENDED}")

    def _publish(self) -> None:
        """Write this rank's state into the store."""
        state = {
            "beat": self._beat,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self.state.step + 1 if self.state else None,
            "doing": self.doing(),
            "number": self.traffic.number,
            "collective": self.traffic.last,
            "seconds": round(time.monotonic() - self._changed),
        }
        self.store.set(f"state/{self._rank}", json.dumps(state))

    def _states(self, ranks: Iterable[int]) -> dict[int, dict]:
        """Return the last states that these ranks have published."""
        keys = {rank: f"state/{rank}" for rank in ranks}
        known = [rank for rank, key in keys.items() if self.store.check([key])]
        return {rank: json.loads(self.store.get(keys[rank])) for rank in known}

    def silent_ranks(self, seconds: float) -> list[int]:
        """Return the other ranks that neither publish a new state nor stop, as this rank does."""
        self.store.set(f"stopped/{self._rank}", "")
        silent = {*range(self._ranks)} - {self._rank}
        before, deadline = self._states(silent), time.monotonic() + seconds
        while silent and time.monotonic() < deadline:
            time.sleep(0.1)
            states = self._states(silent)
            answered = {rank for rank in silent if states.get(rank) != before.get(rank)}
            stopped = {rank for rank in silent if self.store.check([f"stopped/{rank}"])}
            silent -= answered | stopped
        return sorted(silent)

    # -------------------------------------------------------------------------- the hang report

    def dump(self, reason: str) -> None:
        """Write the stacks of all threads of this process now."""
        file = self._stacks = self._stacks or self._open_stacks()
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n"
        # Not console.write: the main thread may block while it holds the lock of the bars.
        try:
            os.write(file.fileno(), line.encode())
            faulthandler.dump_traceback(file)
        except OSError as error:  # also a full disk: the run continues
            with contextlib.suppress(OSError):
                os.write(2, f"ℹ️  The stacks cannot be written: {error.strerror}\n".encode())

    def write_table(self, reason: str) -> None:
        """Append the table of all ranks to report.txt, and print one line."""
        from support.cluster.hang_report import table_of

        head = f"Hang report of {time.strftime('%Y-%m-%d %H:%M:%S')}\n{reason}"
        text = redact(f"{head}\n\n{table_of(self._states(range(self._ranks)))}\n\n")
        if self.folder:
            path = self.folder / "hang" / "report.txt"
            try:
                path.parent.mkdir(exist_ok=True)
                with open(path, "a", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:  # also a full disk: the run continues
                console.write(f"ℹ️  {path} cannot be written ({error.strerror}); its text:")
            else:
                place = f"{path.parent} on {socket.gethostname()}"
                console.write(f"ℹ️  {reason}: the stacks of the ranks are in {place}")
                return
        console.write(text, sys.stderr)

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
            self._stacks = self._stacks or self._open_stacks()
            faulthandler.dump_traceback_later(self._seconds, file=self._stacks)

    def _answer_requests(self) -> None:
        """Write the stacks if any rank has received SIGUSR2; the first one adds the table."""
        signaled = False
        with contextlib.suppress(BlockingIOError):
            signaled = signal.SIGUSR2 in os.read(self._signals, 512)
        before, self._requests = self._requests, self.store.add("hang/requests", signaled)
        if self._requests > before:
            self.dump("SIGUSR2 requested the stacks")
        if signaled and self._requests == before + 1:  # signals to all ranks are one request
            self.write_table("SIGUSR2 requested this report")

    def _report_wait(self) -> None:
        waited = time.monotonic() - self._changed
        if self._ranks == 1 or not self._progress or self._reported or waited < self._seconds:
            return
        from support.cluster.hang_report import diagnosis

        reason = diagnosis(states := self._states(range(self._ranks)))
        if reason and self.traffic.number == max(state["number"] for state in states.values()):
            self._reported = True
            if self.store.add(f"hang/{self.traffic.number}", 1) == 1:  # the first that waits
                self.write_table(reason)

    def _open_stacks(self) -> IO:
        """Open rank-N.txt without a buffer, whose flush would fail on a full disk; else stderr."""
        if self.folder:
            with contextlib.suppress(OSError):  # a node that does not see the output folder
                (self.folder / "hang").mkdir(exist_ok=True)
                return open(self.folder / "hang" / f"rank-{self._rank}.txt", "ab", buffering=0)
        return sys.stderr
