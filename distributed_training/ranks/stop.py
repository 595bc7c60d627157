"""Stop signals: their handler, which lets the run save before it ends."""

from __future__ import annotations

import signal
import threading
import time
from typing import NoReturn

from distributed_training import process
from distributed_training.errors import StoppedBySignal

SAME_REQUEST_SECONDS = 5  # later signals within this time repeat the first one (launchers do this)


class StopSignal:
    """Handler of the signals that ask the run to stop: SIGTERM, SIGINT, SIGUSR1 and SIGHUP.

    Until the first step is nearly complete a signal ends the run at once, because nothing is lost.
    Later it sets `requested`, and the ranks agree on it between two steps; a later Ctrl-C (SIGINT)
    interrupts the run at once. A run that saves no checkpoints ends at once like after an error.
    """

    def __init__(self) -> None:
        self.requested, self.name = False, ""
        self._deferred, self._loses_steps, self._first = False, False, 0.0

    def install(self) -> None:
        """Install the handlers; only the main thread can do this."""
        for number in process.STOP_SIGNALS:
            if number in process.ALSO_IF_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._arrived)

    def end_if_requested(self) -> None:
        """Raise StoppedBySignal if a signal arrived: a destructor may have swallowed the first."""
        if self.requested and not self._deferred:
            self._end()

    def defer(self, saves: bool) -> None:
        """Take note that an end at once would lose a step.

        Call it in each step, after all ranks have summed up its loss: a rank that completes its
        first step then knows that no other rank ends at once.

        Args:
            saves: record further signals, because the run saves a checkpoint before it ends.
        Raises:
            StoppedBySignal: see `end_if_requested`.
        """
        self._deferred, self._loses_steps = saves, True
        self.end_if_requested()

    @property
    def ended_start(self) -> bool:
        """Whether a signal has arrived before the first step was complete."""
        return self.requested and not (self._deferred or self._loses_steps)

    def only_record(self) -> None:
        """Record further signals, because another thread decides how the program ends."""
        self._deferred = True

    def ignore(self) -> None:
        """Ignore all further stop signals, because the run is about to exit."""
        # Python allows only the main thread to change handlers.
        if threading.current_thread() is threading.main_thread():
            for number in process.STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _arrived(self, number: int, _frame: object) -> None:
        now, repeated = time.monotonic(), self.requested
        if not repeated:
            self.requested, self.name, self._first = True, signal.Signals(number).name, now
        elif now - self._first <= SAME_REQUEST_SECONDS:
            return  # `finally` and `except` blocks of the first signal may be running
        if not self._deferred:
            self._end()
        if repeated and number == signal.SIGINT:
            raise KeyboardInterrupt

    def _end(self) -> NoReturn:
        raise StoppedBySignal(self.name, self._loses_steps)
