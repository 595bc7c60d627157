"""The watchdog of a rank: detects ranks that failed, were killed, were stopped, or wait.

A rank that raises an error writes it into the store. A rank that is killed or stopped cannot do
that, so every rank publishes its state once per second, and reads that of its neighbor, the next
rank. Calls to the store block while the process that hosts it is stopped. One thread therefore
makes the calls (`exchange`), and another one only compares their results (`look`).
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil
import torch.distributed as dist

from support.cluster.hang import HangReport
from support.cluster.launch import Launch

ROUND_SECONDS = 1
# Rounds without an answer after which a rank is lost. With the time to exit it takes less than
# 30 s. It counts rounds, not seconds: a suspended process makes none.
SILENT_ROUNDS = 18
STARTING_ROUNDS = 60  # for the first answer
KILLED = "was it killed, or out of host memory (`dmesg | grep -i oom`)?"


class Watchdog:
    """Exchange of states with the other ranks, and the conclusions from them.

    Args:
        store: a connection that no other thread uses; None for a single process.
    """

    def __init__(self, launch: Launch, hang: HangReport, store: dist.Store | None):
        self.lost = False  # a call to the store failed: the process that hosts it has ended
        self._launch, self._hang, self._store = launch, hang, store
        self._neighbor = (launch.rank + 1) % launch.world_size
        self._rounds, self._failed, self._neighbor_state = 0, False, {"beat": 0}
        self._silent = self._quiet = 0  # rounds of `look` without a change
        self._seen: tuple[int, int] = (-1, -1)

    def exchange_until(self, ending: threading.Event) -> None:
        """Call `exchange` once per second until it fails or `ending` is set; runs in a thread."""
        while not ending.wait(ROUND_SECONDS):
            try:
                self.exchange()
            except Exception:  # torch raises several classes for a broken connection
                self.lost = True
                return

    def exchange(self) -> None:
        """Publish this rank's state, read the neighbor's, and take part in hang reports."""
        store = self._store
        if store is not None:
            self._rounds += 1
            state = {"beat": self._rounds, **self._hang.own_state()}
            store.set(f"state/{self._launch.rank}", json.dumps(state))
            self._failed = store.check(["failure"])
            neighbor = f"state/{self._neighbor}"
            if store.check([neighbor]):
                self._neighbor_state = json.loads(store.get(neighbor))
        self._hang.observe(store)

    def look(self) -> str | None:
        """Return what has failed; called once per second, in another thread than `exchange`.

        Returns:
            None if no failure is detected, "" if another rank reports an error itself, otherwise
            the line that this rank must report.
        """
        if self._failed:
            return ""
        host = "torchrun's agent, which connects the ranks," if agent_hosts_store() else "Rank 0"
        if self.lost:
            return f"{host} ended without reporting an error: {KILLED}"
        rounds, beat = self._seen
        self._seen = self._rounds, self._neighbor_state["beat"]
        self._silent = self._silent + 1 if self._rounds == rounds else 0
        if self._silent > SILENT_ROUNDS:
            return (
                f"{host} does not answer: "
                "the process was stopped, or its host hangs or cannot be reached."
            )
        if self._silent:
            return None  # the neighbor's state was not read either
        self._quiet = self._quiet + 1 if self._seen[1] == beat else 0
        limit = SILENT_ROUNDS if self._seen[1] else STARTING_ROUNDS
        if self._quiet > limit and not computes(self._neighbor_state):
            return (
                f"Rank {self._neighbor} ended without reporting an error, or was stopped: {KILLED}"
            )
        return None


def agent_hosts_store() -> bool:
    """Return whether torchrun's agent hosts the store instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def computes(state: dict) -> bool:
    """Return whether the process of a published state is on this host and in the running state.

    A library function that holds Python's global interpreter lock for a long time, such as the JSON
    parser on a huge file, prevents the other threads of its process from running.
    """
    try:
        here = state.get("host") == socket.gethostname()
        return here and psutil.Process(state["pid"]).status() == psutil.STATUS_RUNNING
    except psutil.Error:
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
