"""Detection of ranks that cannot report an error: killed, stopped, or on a host that hangs."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

PERIOD_SECONDS = 1  # between two rounds
# Maximum that one period counts. A longer period means that this process itself did not run.
COUNTED_SECONDS = 2
# A rank that does not answer for this time is lost. With the time to exit it makes less than 30 s.
SILENT_SECONDS = 18
STARTING_SECONDS = 60  # for the first answer
# Limit for a neighbor on this host that computes: its monitoring thread may be unable to run.
BUSY_SECONDS = 600

KILLED = "was it killed, or out of host memory (`dmesg | grep -i oom`)?"


class Silence:
    """Time for which a value has not changed, in seconds during which this process was running.

    A suspended process (SIGSTOP, a scheduler's suspend, a closed laptop) does not observe the value
    in that time, and on a host that swaps it does so rarely. So a period counts as COUNTED_SECONDS
    at most, regardless of its real length.
    """

    def __init__(self, clock: Callable[[], float]):
        self.seconds = 0.0
        self._clock, self._value, self._at = clock, None, clock()

    def observe(self, value: Any) -> float:
        """Compare `value` with the last one; return the seconds without a change."""
        now = self._clock()
        period, self._at = min(now - self._at, COUNTED_SECONDS), now
        self.seconds = self.seconds + period if value == self._value else 0.0
        self._value = value
        return self.seconds


class PeerMonitor:
    """Monitor that detects whether this rank must end because another rank has failed.

    A rank that raises an error writes it into the store. A rank that is killed or stopped cannot do
    that. So each rank increments a counter of its own in the store, and reads that of its neighbor,
    the next rank. If rank 0 is stopped while it hosts the store, calls to the store block without a
    limit. So one thread makes the calls (`ask`), and another one only reads their results and the
    clock (`look`). `lost` is True after a call to the store has failed.

    Args:
        store: a connection that no other thread uses, because its calls may block.
        clock: returns the present time in seconds; tests pass their own.
    """

    def __init__(
        self, store, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic
    ):
        self._store, self._rank, self._neighbor = store, rank, (rank + 1) % world_size
        self._reported = self.lost = False
        self._answers = self._count = 0
        self._place = ""  # the neighbor's "host pid"
        self._store_silence, self._neighbor_silence = Silence(clock), Silence(clock)

    def ask(self) -> bool:
        """Do one round of calls to the store; return False if one of them failed."""
        try:
            if self._answers == 0:
                self._store.set(f"place/{self._rank}", f"{socket.gethostname()} {os.getpid()}")
            self._reported = self._store.check(["failure"])
            self._store.add(f"alive/{self._rank}", 1)
            self._count = self._store.add(f"alive/{self._neighbor}", 0)
            if self._count and not self._place:  # set before the first count
                self._place = self._store.get(f"place/{self._neighbor}").decode()
            self._answers += 1
        except Exception:  # torch raises several classes for a broken connection
            self.lost = True
        return not self.lost

    def ask_until(self, ending: threading.Event) -> None:
        """Call `ask` in every period until the store fails or `ending` is set; runs in a thread."""
        while self.ask() and not ending.wait(PERIOD_SECONDS):
            pass

    def look(self) -> str | None:
        """Return what has failed; call it once per period, in another thread than `ask`.

        Returns:
            None if no failure is detected, "" if another rank reports an error itself, otherwise
            the line that this rank must report.
        """
        silent = self._store_silence.observe(self._answers)
        if self._reported:
            return ""
        host = "torchrun's agent, which connects the ranks," if agent_hosts_store() else "Rank 0"
        if self.lost:
            return f"{host} ended without reporting an error: {KILLED}"
        if silent > SILENT_SECONDS:
            return (
                f"{host} does not answer: "
                "the process was stopped, or its host hangs or cannot be reached."
            )
        if silent > 0:
            return None  # the neighbor's counter was not read either
        limit = SILENT_SECONDS if self._count else STARTING_SECONDS
        quiet = self._neighbor_silence.observe(self._count)
        if quiet > limit and not (quiet < BUSY_SECONDS and computes(self._place)):
            return (
                f"Rank {self._neighbor} ended without reporting an error, or was stopped: {KILLED}"
            )
        return None


def agent_hosts_store() -> bool:
    """Return whether torchrun's agent hosts the store instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def computes(place: str) -> bool:
    """Return whether the process `place` ("host pid") is on this host and in the running state.

    A library function that holds Python's global interpreter lock for a long time, such as the JSON
    parser on a huge file, prevents the other threads of its process from running.
    """
    host, _, process = place.partition(" ")
    try:
        return (
            host == socket.gethostname()
            and psutil.Process(int(process)).status() == psutil.STATUS_RUNNING
        )
    except (psutil.Error, ValueError):
        return False


def in_time(call: Callable[[], Any], seconds: float) -> Any:
    """Return the result of a call that may block.

    Args:
        call: called without arguments in a daemon thread.
    Raises:
        TimeoutError: the call took longer than `seconds`; its thread continues to run.
        BaseException: whatever `call` raised.
    """
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result
