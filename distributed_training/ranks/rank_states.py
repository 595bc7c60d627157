"""The states of the ranks: each publishes its own in the store once per second.

A rank reads the state of the next one, so that a rank that was killed is reported.
"""

import json
import os
import socket
import time
from collections.abc import Iterable

import torch.distributed as dist

from distributed_training.errors import TrainingError

# Rounds without an answer after which a rank is lost; with the time to exit less than 30 s. It
# counts rounds, not seconds: a suspended process makes none.
SILENT_ROUNDS = 13
ENDED = (
    "ended without reporting an error: "
    "was it stopped or killed, or out of host memory (`dmesg | grep -i oom`)?"
)


class RankStates:
    """The states of all ranks, in a store whose connection no other thread blocks for long."""

    def __init__(self, store: dist.Store, rank: int, ranks: int):
        self.store, self.rank, self.ranks = store, rank, ranks
        self._beat = 0  # number of rounds of this rank
        self._next_beat = 0  # that of the next rank
        self._silent = 0  # rounds without an answer of the next rank

    def begin_round(self) -> None:
        """Count a round of this rank, which the other ranks then see in its state."""
        self._beat += 1

    def publish(self, state: dict) -> None:
        """Write this rank's state into the store."""
        own = {"beat": self._beat, "host": socket.gethostname(), "pid": os.getpid()}
        self.store.set(f"state/{self.rank}", json.dumps({**own, **state}))

    def of(self, ranks: Iterable[int]) -> dict[int, dict]:
        """Return the last states that these ranks have published."""
        keys = {rank: f"state/{rank}" for rank in ranks}
        known = [rank for rank, key in keys.items() if self.store.check([key])]
        return {rank: json.loads(self.store.get(keys[rank])) for rank in known}

    def of_all(self) -> dict[int, dict]:
        """Return the last states that all ranks have published."""
        return self.of(range(self.ranks))

    def check_next_rank(self) -> None:
        """Count the rounds in which the next rank publishes no new state.

        Raises:
            TrainingError: it ended.
        """
        neighbor = (self.rank + 1) % self.ranks
        state = self.of([neighbor]).get(neighbor, {"beat": 0})
        self._silent = self._silent + 1 if state["beat"] == self._next_beat else 0
        self._next_beat = state["beat"]
        # A library that holds Python's lock for minutes stops the threads of a running process.
        if self._silent > SILENT_ROUNDS:
            from distributed_training.ranks.hang_report import RUNNING, process_status

            if process_status(state) != RUNNING:
                raise TrainingError(f"Rank {neighbor} {ENDED}")

    def silent_ranks(self, seconds: float) -> list[int]:
        """Return the other ranks that neither publish a new state nor stop, as this rank does."""
        self.store.set(f"stopped/{self.rank}", "")
        silent = {*range(self.ranks)} - {self.rank}
        before, deadline = self.of(silent), time.monotonic() + seconds
        while silent and time.monotonic() < deadline:
            time.sleep(0.1)
            states = self.of(silent)
            answered = {rank for rank in silent if states.get(rank) != before.get(rank)}
            stopped = {rank for rank in silent if self.store.check([f"stopped/{rank}"])}
            silent -= answered | stopped
        return sorted(silent)
