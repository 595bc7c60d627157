"""Detects ranks that cannot report an error any more: killed, stopped, or on a host that hangs."""

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
COUNTED_SECONDS = 2  # at most, of one period: more means that this process itself was not running
SILENT_SECONDS = (
    18  # without an answer a rank is lost; with the time to end that makes less than 30
)
STARTING_SECONDS = 60  # for the first answer
# for a neighbour on this host that computes without a pause: its thread cannot answer meanwhile
BUSY_SECONDS = 600

KILLED = "was it killed, or out of host memory (`dmesg | grep -i oom`)?"


class Silence:
    """Seconds for which a value has not changed, counted only while this process was running.

    A process that was suspended (SIGSTOP, a scheduler's suspend, a laptop's lid) did not listen in
    that time, and on a host that swaps it listens rarely. So a period counts as COUNTED_SECONDS at
    most, however long it took.
    """

    def __init__(self, clock: Callable[[], float]):
        self.seconds = 0.0
        self._clock, self._value, self._at = clock, None, clock()

    def observe(self, value: Any) -> float:
        """Compare with the last value; returns the seconds without a change."""
        now = self._clock()
        period, self._at = min(now - self._at, COUNTED_SECONDS), now
        self.seconds = self.seconds + period if value == self._value else 0.0
        self._value = value
        return self.seconds


class FailureMonitor:
    """Whether this rank must end because of another one.

    A rank that raises an error writes it into the store. One that is killed or stopped cannot do
    that: so each rank counts up a number of its own in the store, and reads its neighbour's. If
    rank 0 is stopped while it hosts the store, calls of the store block without a limit. So one
    thread makes the calls (`ask`), and another one only reads the clock (`look`).

    Attributes:
        lost: the store has ended.
    Args:
        store: a connection of its own, which nobody else waits for.
        clock: seconds; a test has its own.
    """

    def __init__(
        self, store, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic
    ):
        self._store, self._rank, self._neighbour = store, rank, (rank + 1) % world_size
        self._reported = self.lost = False
        self._answers = self._count = 0
        self._place = ""  # the neighbour's host and process
        self._store_silence, self._neighbour_silence = Silence(clock), Silence(clock)

    def ask(self) -> bool:
        """One round with the store; False if it cannot be reached any more."""
        try:
            if self._answers == 0:
                self._store.set(f"place/{self._rank}", f"{socket.gethostname()} {os.getpid()}")
            self._reported = self._store.check(["failure"])
            self._store.add(f"alive/{self._rank}", 1)
            self._count = self._store.add(f"alive/{self._neighbour}", 0)
            if self._count and not self._place:  # it was set before the first count
                self._place = self._store.get(f"place/{self._neighbour}").decode()
            self._answers += 1
        except Exception:  # torch has several classes for a broken connection
            self.lost = True
        return not self.lost

    def ask_until(self, ending: threading.Event) -> None:
        """Ask in every period; the body of a thread."""
        while self.ask() and not ending.wait(PERIOD_SECONDS):
            pass

    def look(self) -> str | None:
        """What has happened: None if all is well, "" if another rank reports its own error, else a
        line to report.
        """
        silent = self._store_silence.observe(self._answers)
        if self._reported:
            return ""
        host = "torchrun's agent, which connects the ranks," if agent_hosts_store() else "Rank 0"
        if self.lost:
            return f"{host} ended without reporting an error: {KILLED}"
        if silent > SILENT_SECONDS:
            return f"{host} does not answer: the process was stopped, or its host hangs or cannot be reached."
        if silent > 0:
            return None  # no news of the neighbour either
        limit = SILENT_SECONDS if self._count else STARTING_SECONDS
        quiet = self._neighbour_silence.observe(self._count)
        if quiet > limit and not (quiet < BUSY_SECONDS and computes(self._place)):
            return (
                f"Rank {self._neighbour} ended without reporting an error, or was stopped: {KILLED}"
            )
        return None


def agent_hosts_store() -> bool:
    """Whether torchrun's agent hosts the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def computes(place: str) -> bool:
    """Whether a process ("host pid") runs on this host, and does not wait.

    A library's function that holds Python's lock for long, such as the JSON parser on a huge file,
    lets no other thread run.
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
    """The result of a call that may block.

    Raises:
        TimeoutError: it took longer than `seconds`; its thread is left behind.
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
