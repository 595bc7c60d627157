"""--rank_shares: from the shares of the ranks to whole sequences. Imports nothing heavy."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

AUTO = "auto"  # the value of --rank_shares that lets the run measure and choose


def shown_shares(given: tuple[float, ...] | str | None) -> str | None:
    """Return the value of --rank_shares as its text."""
    return ",".join(map(str, given)) if isinstance(given, tuple) else given


def of_each_rank(
    given: tuple[float, ...] | str | None, node_of_rank: Sequence[int]
) -> tuple[float, ...]:
    """Return the share of each rank.

    Args:
        given: the value of --rank_shares. `auto` starts with equal shares.
        node_of_rank: the number of each rank's node.
    Raises:
        ValueError: the shares are neither one for each rank nor one for each node.
    """
    if given is None or isinstance(given, str):
        return (1.0,) * len(node_of_rank)
    if len(given) == len(node_of_rank):
        return given
    nodes = sorted(set(node_of_rank))
    if len(given) == len(nodes):
        return tuple(given[nodes.index(node)] for node in node_of_rank)
    ranks = f"{len(node_of_rank)} rank{'s' * (len(node_of_rank) > 1)}"
    of_nodes = f" on {len(nodes)} nodes, or one for each node" if len(nodes) > 1 else ""
    raise ValueError(f"{len(given)} shares for {ranks}: give one for each rank{of_nodes}")


def divide(
    count: int, shares: Sequence[float], at_least: int = 0, at_most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the sequences of each rank, which sum to `count`.

    Each sequence goes to the rank that would finish it first: the one with the smallest
    (sequences + 1) / share, or the first of several. This minimizes the time of the slowest rank,
    if a rank needs 1 / share for a sequence. Equal shares give the numbers of `np.array_split`.

    Args:
        shares: the relative speeds of the ranks, above 0.
        at_least: sequences of each rank, whatever its share.
        at_most: the most sequences of each rank; None: no limit.
    Raises:
        ValueError: `at_least` or `at_most` does not allow `count` sequences.
    """
    ranks, most = range(len(shares)), at_most or [count] * len(shares)
    least = [at_least] * len(shares)
    if not sum(least) <= count <= sum(most) or any(most[rank] < at_least for rank in ranks):
        raise ValueError(f"{count} sequences cannot be divided over {len(shares)} ranks")
    sequences = least
    # (time after one more sequence, rank) of the ranks that may get one.
    times = [
        ((sequences[rank] + 1) / shares[rank], rank)
        for rank in ranks
        if sequences[rank] < most[rank]
    ]
    heapq.heapify(times)
    for _ in range(count - sum(least)):
        _, rank = heapq.heappop(times)
        sequences[rank] += 1
        if sequences[rank] < most[rank]:
            heapq.heappush(times, ((sequences[rank] + 1) / shares[rank], rank))
    return tuple(sequences)


class Entry(TypedDict):
    """The sequences of each rank in a micro-batch, from a step on."""

    from_step: int  # the first step that has them, counted from 1
    sequences: list[int]  # of each rank


@dataclass
class RankCounts:
    """The sequences of each rank in the micro-batches of a run; --rank_shares auto changes them."""

    history: list[Entry]  # in the order of the steps
    limits: list[int] | None = None  # that fit the memory of each rank; None: not known

    def at(self, step: int) -> list[int]:
        """Return the sequences of each rank in a micro-batch of a step, counted from 1."""
        return [entry for entry in self.history if entry["from_step"] <= step][-1]["sequences"]

    def from_step(self, step: int) -> Iterator[list[int]]:
        """Yield the sequences of each rank for each step from `step` on, without end.

        A step is asked for when its batch is read, one step before it is trained.
        """
        return map(self.at, itertools.count(step))

    def change(self, step: int, counts: list[int]) -> None:
        """Choose the sequences of each rank from a step on, whose batch has not been read yet."""
        self.history.append({"from_step": step, "sequences": counts})
