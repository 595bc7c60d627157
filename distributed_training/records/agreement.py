"""How the losses and gradient norms of two runs agree: points in common, and tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import mean, median
from typing import NamedTuple

from distributed_training.records.causes import Difference

# In TF32, bf16 and fp16 the losses of a single step may differ by percents where an unusual
# sequence makes the loss jump; if a strategy trains another model, the difference lasts. So in
# these precisions a difference is the median over this many steps.
LASTING_STEPS = 5


class Tolerance(NamedTuple):
    """The largest relative differences that rounding explains."""

    loss: float
    grad_norm: float
    steps: int  # of which each difference is the median


# By precision. docs/COMPARISON.md lists the measurements.
TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-3, 1),
    # fp32 matrices on a GPU: 10 bits of each factor's mantissa
    "tf32": Tolerance(1e-3, 1e-2, LASTING_STEPS),
    "bf16": Tolerance(5e-3, 5e-2, LASTING_STEPS),
    "fp16": Tolerance(5e-3, 5e-2, LASTING_STEPS),
}
KINDS = ("loss", "grad_norm", "eval_loss")  # of values that are compared
# The values of a key of metrics.jsonl: of a loss the mean of the steps from the first to the last.
Curve = dict[tuple[int, int], float]


class Point(NamedTuple):
    """A value of the reference (a) and of a run (b): of one step, or a mean of several steps."""

    of: str  # "loss", "grad_norm" or "eval_loss"
    first: int
    last: int
    a: float
    b: float
    relative: float  # difference relative to the reference; see `points_of`


@dataclass(frozen=True)
class Agreement:
    """How a run agrees with the reference of a comparison; without points it was not compared."""

    tolerance: Tolerance = TOLERANCES["fp32"]
    points: list[Point] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)  # of facts
    causes: list[Difference] = field(default_factory=list)  # of `first`, the most likely first

    @property
    def departures(self) -> list[Point]:
        """The first point of each kind beyond the tolerance, the losses first."""
        found = []
        for kind in KINDS:
            limit = self.tolerance.grad_norm if kind == "grad_norm" else self.tolerance.loss
            beyond = [p for p in self.points if p.of == kind and p.relative > limit]
            found += sorted(beyond, key=lambda point: point.last)[:1]
        return found

    @property
    def first(self) -> Point | None:
        """The first loss beyond the tolerance, else the first norm, else evaluation."""
        return next(iter(self.departures), None)

    @property
    def steps(self) -> int:
        """The number of compared training steps."""
        return sum(p.last - p.first + 1 for p in self.points if p.of == "loss")

    def largest(self, *kinds: str) -> Point | None:
        """Return the point of these kinds that differs most from the reference; None without."""
        points = [point for point in self.points if point.of in kinds]
        return max(points, key=lambda point: point.relative, default=None)


def relative(a: float, b: float) -> float:
    """Return the difference relative to `a`; infinite if one is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if repr(a) == repr(b) else math.inf
    return abs(a - b) / max(abs(a), 1e-12)


def points_of(of: str, a: Curve, b: Curve, lasting: int) -> list[Point]:
    """Return the values of one of KINDS that the reference (a) and a run (b) have in common.

    A mean of several steps, which Trainer logs, is compared with the other run's mean of them.

    Args:
        lasting: number of steps of which each difference is the median: the step and those before
            it. The first differences are all the median of the first `lasting` steps.
    """
    found = []
    for window in sorted({*a, *b}, key=lambda window: window[1]):
        value, other = mean_of(a, *window), mean_of(b, *window)
        if value is not None and other is not None:
            found.append((*window, value, other))
    each = [relative(value, other) for _, _, value, other in found]
    return [
        Point(of, *point, median(each[max(0, number - lasting) : max(number, lasting)]))
        for number, point in enumerate(found, 1)
    ]


def mean_of(curve: Curve, first: int, last: int) -> float | None:
    """Return the mean value of some steps; None if the run did not log one of them."""
    if (first, last) in curve:
        return curve[first, last]
    if not 0 <= last - first < len(curve):
        return None
    steps = [(step, step) for step in range(first, last + 1)]
    return mean(map(curve.__getitem__, steps)) if curve.keys() >= {*steps} else None
