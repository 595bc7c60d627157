"""What fits on GPUs that differ in memory or speed, and how a run divides its sequences over them.

Every rank holds the same model states. Its activations are those of its own sequences, which
--rank_shares sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distributed_training.memory.estimate import MemoryEstimate, predict
from distributed_training.memory.fit import Limits, most_sequences
from distributed_training.rank_shares import divide
from distributed_training.workload.workload import Workload


@dataclass(frozen=True)
class UnequalGpus:
    """The memory limits and the relative speeds of the ranks; a `fit.Devices`."""

    limits: tuple[Limits, ...]  # of each rank
    speeds: tuple[float, ...]  # of the ranks, relative to the fastest one

    @property
    def gpu(self) -> int | None:
        """Bytes of the first GPU."""
        return self.limits[0].gpu

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on one node."""
        return self.limits[0].ranks_per_node

    def most(self, work: Workload, strategy: str, most: int = 2**16) -> list[int]:
        """Return the most sequences, at most `most`, that fit the memory of each rank."""
        found = {
            limits: most_sequences(work, strategy, limits.hold, most)
            for limits in dict.fromkeys(self.limits)
        }
        return [found[limits] for limits in self.limits]

    def rank_counts(self, work: Workload, strategy: str) -> tuple[int, ...] | None:
        """Return the sequences of each rank that end a micro-batch first and fit; None: none do."""
        count = work.batch_size * work.world_size
        try:
            return divide(count, self.speeds, 1, self.most(work, strategy, count))
        except ValueError:
            return None

    def fits(self, work: Workload, strategy: str) -> bool:
        """Return whether the sequences of a micro-batch can be divided so that every rank fits."""
        return self.rank_counts(work, strategy) is not None

    def closest(self, work: Workload, strategy: str) -> tuple[int, MemoryEstimate]:
        """Return the rank that is closest to its limit, and its memory estimate.

        If no division fits, it is that of the speeds alone.
        """
        count = work.batch_size * work.world_size
        sequences = self.rank_counts(work, strategy) or divide(count, self.speeds, 1)
        needs = {n: predict(replace(work, batch_size=n), strategy) for n in {*sequences}}

        def filled(rank: int) -> float:
            return needs[sequences[rank]].total / (self.limits[rank].gpu or 1)

        rank = max(range(len(sequences)), key=filled)
        return rank, needs[sequences[rank]]

    def estimate(self, work: Workload, strategy: str) -> MemoryEstimate:
        """Return the memory estimate of the rank that is closest to its limit."""
        return self.closest(work, strategy)[1]

    def largest_batch(self, work: Workload, strategy: str) -> int:
        """Return the largest average of the ranks' sequences up to 65,536 that fits; 0 if none."""
        most = self.most(work, strategy)
        return sum(most) // len(most) if min(most) else 0

    def speed_up(self, work: Workload, strategy: str) -> float | None:
        """Return how much faster the chosen shares are than equal ones.

        It is the quotient of the times of the slowest rank, without communication and update. None
        if nothing fits, or if equal shares do not fit.
        """
        shares = self.rank_counts(work, strategy)
        most = self.most(work, strategy, work.batch_size)
        if shares is None or min(most) < work.batch_size:
            return None
        return self._seconds([work.batch_size] * len(shares)) / self._seconds(shares)

    def pace(self, work: Workload, strategy: str) -> float:
        """Return the speed of a step, relative to equal shares on GPUs as the fastest one."""
        shares = self.rank_counts(work, strategy) or [work.batch_size] * work.world_size
        return work.batch_size / self._seconds(shares)

    def _seconds(self, sequences: Sequence[int]) -> float:
        """Return the time of the slowest rank, relative to a sequence of the fastest one."""
        return max(count / speed for count, speed in zip(sequences, self.speeds, strict=True))
