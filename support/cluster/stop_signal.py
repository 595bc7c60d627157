"""Stop signals: what SIGTERM, SIGINT, SIGUSR1 and SIGHUP do before, during and after training."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import NoReturn

from support import process
from support.errors import StoppedBySignal

SAME_REQUEST_SECONDS = 5  # later signals within this time repeat the first one (launchers do this)


class StopSignal:
    """Handler of the signals that ask the run to stop.

    Before training a signal ends the run like an error. After `defer()` it sets `requested`, and
    the ranks agree on it between two steps; a later Ctrl-C (SIGINT) interrupts the run at once.
    """

    def __init__(self) -> None:
        self.requested, self._name = False, ""
        self._deferred, self._first = False, 0.0
        self._numbers: int | None = None  # file that gets the number of each signal as a byte

    def install(self) -> None:
        """Install the handlers; only the main thread can do this."""
        self._numbers, writer = os.pipe()
        for file in (self._numbers, writer):
            os.set_blocking(file, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in process.STOP_SIGNALS:
            if number in process.ALSO_IF_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._arrived)

    def arrived_signals(self) -> set[int]:
        """Return the signals since the last call, even if the main thread waits in a collective."""
        with contextlib.suppress(BlockingIOError):
            return {*os.read(self._numbers, 512)} if self._numbers is not None else set()
        return set()

    def defer(self) -> None:
        """Record further signals instead of ending the run; called when training starts.

        Raises:
            StoppedBySignal: a signal arrived earlier, and a destructor swallowed its exception.
        """
        if self.requested:
            self._end()
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
            self.requested, self._name, self._first = True, signal.Signals(number).name, now
        elif now - self._first <= SAME_REQUEST_SECONDS:
            return  # `finally` and `except` blocks of the first signal may be running
        if not self._deferred:
            self._end()
        if repeated and number == signal.SIGINT:
            raise KeyboardInterrupt

    def _end(self) -> NoReturn:
        raise StoppedBySignal(
            f"Stopped by {self._name}; if another rank failed first, its message is above."
        )
