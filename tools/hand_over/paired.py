"""The difference of two models on the same items, with its uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
FEWEST = 10  # items; with fewer an interval says too little


@dataclass(frozen=True)
class Difference:
    """A mean under two models, and the difference of the second from the first."""

    before: float
    after: float
    low: float  # of the 95 % interval of the difference
    high: float
    error: float  # standard error of the difference
    items: int

    @property
    def value(self) -> float:
        """The difference of the means."""
        return self.after - self.before

    @property
    def is_distinguishable(self) -> bool:
        """Whether the interval excludes 0, and there are enough items for one."""
        return self.items >= FEWEST and (self.low > 0 or self.high < 0)


def compare(before: np.ndarray, after: np.ndarray, weights: np.ndarray | None = None) -> Difference:
    """Compare two models by a paired bootstrap: the same items are drawn for both.

    The models share the difficulty of an item, which cancels in each difference. So the interval is
    much narrower than those of the two means (Efron and Tibshirani, An Introduction to the
    Bootstrap, 1993, chapter 13: percentile intervals).

    Args:
        before, after: [items], the sum of each item, for example the loss of its tokens.
        weights: [items], by which the sums are divided, for example its tokens; None: 1 each.
    """
    weights = np.ones(len(before)) if weights is None else weights.astype(float)
    generator = np.random.default_rng(0)
    differences = after - before
    drawn = np.empty(RESAMPLES)
    rows = max(1, 2**22 // len(before))  # resamples at a time
    for start in range(0, RESAMPLES, rows):
        size = (min(rows, RESAMPLES - start), len(before))
        chosen = generator.integers(0, len(before), size=size)
        sums = differences[chosen].sum(axis=1) / weights[chosen].sum(axis=1)
        drawn[start : start + len(sums)] = sums
    low, high = np.percentile(drawn, [2.5, 97.5])
    total = weights.sum()
    first, second = (float(values.sum() / total) for values in (before, after))
    error = float(drawn.std(ddof=1))
    return Difference(first, second, float(low), float(high), error, len(before))
