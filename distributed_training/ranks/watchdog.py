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
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from distributed_training.errors import TrainingError
from distributed_training.ranks import first_failure
from distributed_training.ranks.comm_volume import Traffic
from distributed_training.ranks.hang_files import HangFiles
from distributed_training.ranks.launch import agent_hosts_store
from distributed_training.ranks.rank_states import ENDED, RankStates
from distributed_training.train_state import TrainState

ROUND_SECONDS = 1


class Watchdog:
    """What this rank does once per second: it exchanges states, and looks for a hang."""

    def __init__(self, rank: int, ranks: int, store: dist.Store | None = None):
        self.states = RankStates(store or dist.HashStore(), rank, ranks)
        self.files = HangFiles(rank)
        self.traffic = Traffic()
        self._state: TrainState | None = None  # None before and after the training
        self._doing: Callable[[], str] = str  # returns the phase of the run
        self._progress: tuple[int, int] | None = None  # step and number of collectives
        self._seconds, self._changed, self._reported = 0, time.monotonic(), False
        self._requests, self._signals = 0, -1

    def start(self, hang_seconds: int) -> None:
        """Count the collectives and handle SIGUSR2; only the main thread can do this.

        Args:
            hang_seconds: for which a step or a collective may wait.
        """
        self._seconds = hang_seconds
        self.traffic.start()
        # The handler in C writes the signal's number to a pipe, even if the main thread waits in a
        # collective.
        self._signals, writer = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        self._publish()

    def report_to(self, folder: Path, doing: Callable[[], str]) -> None:
        """Write hang reports to a run's output folder; `doing` returns the phase of the run."""
        self.files.write_to(folder)
        self._doing = doing

    def expect_steps(self, state: TrainState | None) -> None:
        """Expect the steps that `state` counts; None: no step is expected."""
        self._state = state

    # ------------------------------------------------------------------- the state of the ranks

    def look(self) -> bool:
        """Publish this rank's state and read the next rank's; called once per second.

        Returns:
            True if another rank reports an error.
        Raises:
            TrainingError: a rank ended, and this rank must report it.
        """
        self.states.begin_round()
        try:
            self._publish()
            if self.states.store.check([first_failure.KEY]):
                return True
            self.states.check_next_rank()
            self._answer_requests()
            self._arm_timer()
            self._report_wait()
        except RuntimeError as error:  # as the errors of a store are
            host = (
                "torchrun's agent, which connects the ranks," if agent_hosts_store() else "Rank 0"
            )
            raise TrainingError(f"{host} {ENDED}") from error
        return False

    def _publish(self) -> None:
        """Write this rank's state into the store."""
        state = {
            "step": self._state.step + 1 if self._state else None,
            "doing": self._doing(),
            "number": self.traffic.number,
            "collective": self.traffic.last,
            "seconds": round(time.monotonic() - self._changed),
        }
        self.states.publish(state)

    # -------------------------------------------------------------------------- the hang report

    def _arm_timer(self) -> None:
        """Start the time again after each step and each collective."""
        current = (self._state.step, self.traffic.number) if self._state else None
        if current == self._progress:
            return
        self._progress, self._changed, self._reported = current, time.monotonic(), False
        self.files.cancel()
        if current:
            self.files.dump_later(self._seconds)

    def _answer_requests(self) -> None:
        """Write the stacks if any rank has received SIGUSR2; the first one adds the table."""
        signaled = False
        with contextlib.suppress(BlockingIOError):
            signaled = signal.SIGUSR2 in os.read(self._signals, 512)
        before, self._requests = self._requests, self.states.store.add("hang/requests", signaled)
        if self._requests > before:
            self.files.dump("SIGUSR2 requested the stacks")
        if signaled and self._requests == before + 1:  # signals to all ranks are one request
            self.files.write_table("SIGUSR2 requested this report", self.states.of_all())

    def _report_wait(self) -> None:
        waited = time.monotonic() - self._changed
        if self.states.ranks == 1 or not self._progress or self._reported or waited < self._seconds:
            return
        from distributed_training.ranks.hang_report import diagnosis

        reason = diagnosis(states := self.states.of_all())
        if reason and self.traffic.number == max(state["number"] for state in states.values()):
            self._reported = True
            if self.states.store.add(f"hang/{self.traffic.number}", 1) == 1:  # the first that waits
                self.files.write_table(reason, states)
