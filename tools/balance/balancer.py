"""When the ranks measure how fast they compute, and which shares they choose."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distributed_training.files.json_types import JsonObject
from distributed_training.rank_shares import divide
from distributed_training.ranks.context import DistContext
from distributed_training.strategies.objects import TrainingObjects
from distributed_training.train_state import TrainState
from tools.balance.timer import ForwardTimer

WARM_UP = 3  # first steps of a process, which are slow: they compile, and allocate memory
MEASURED = 5  # steps of a measurement
FIRST_PAUSE, LONGEST_PAUSE = 20, 80  # steps between measurements: doubled if nothing changes
GAIN = 1.05  # the slowest rank must become faster by this factor


class Choice(NamedTuple):
    """The result of a measurement."""

    counts: list[int]  # the sequences of each rank in a micro-batch
    seconds: list[float]  # of each rank, for the forward pass of a token
    gain: float  # seconds of the slowest rank with equal work before / with these sequences


def choose(counts: Sequence[int], seconds: Sequence[float], limits: Sequence[int] | None) -> Choice:
    """Choose the sequences of each rank that minimize the time of the slowest rank.

    Args:
        counts: the sequences of each rank in a micro-batch until now.
        seconds: of each rank, for the forward pass of a token.
        limits: the sequences that fit the memory of each rank; None: not known.
    """
    most = limits and [*map(max, limits, counts)]  # the present ones have fitted
    chosen = divide(sum(counts), [1 / each for each in seconds], at_least=1, at_most=most)
    before, after = (max(map(operator.mul, each, seconds)) for each in (counts, chosen))
    return Choice([*chosen], [*seconds], before / after)


class Balancer:
    """Chooses the shares of the ranks in a run with --rank_shares auto.

    The ranks measure the same steps, exchange the times, and compute the same choice.
    """

    def __init__(
        self,
        ctx: DistContext,
        state: TrainState,
        timer: ForwardTimer,
        report: Callable[[JsonObject, str], None],
    ) -> None:
        """Create the balancer of a run.

        Args:
            report: logs a record of metrics.jsonl and prints a line about it.
        """
        self._ctx, self._state, self._timer = ctx, state, timer
        self._report = report
        self._measured = False  # at least once
        self._pause = FIRST_PAUSE
        self._start = state.step + WARM_UP  # the step after which the next measurement starts

    def after_step(self) -> None:
        """Measure, and change the shares of later steps if that makes the ranks faster.

        Every rank calls it after each step, before a checkpoint, which contains the choice.
        """
        step = self._state.step
        if step == self._start:
            self._timer.start()
        elif self._start < step < self._start + MEASURED:
            self._timer.end_step()
        elif step == self._start + MEASURED:
            self._adopt(self._timer.stop())

    def skip_step(self) -> None:
        """Do nothing, one step longer; called instead of `after_step` for a step not made."""
        self._start += 1

    def _adopt(self, seconds: float) -> None:
        """Exchange the times of the ranks, and choose."""
        state = self._state
        before = state.ranks.at(state.step)
        choice = choose(before, self._ctx.all_gather(seconds), state.ranks.limits)
        changes = choice.gain >= GAIN
        if changes:
            # The batch of the next step has already been read.
            state.ranks.change(state.step + 2, choice.counts)
        if changes or not self._measured:
            self._report(*description(state.step, before, choice, changes))
        self._measured = True
        self._pause = FIRST_PAUSE if changes else min(2 * self._pause, LONGEST_PAUSE)
        self._start = state.step + 2 + self._pause


def create(
    objects: TrainingObjects,
    state: TrainState,
    ctx: DistContext,
    report: Callable[[JsonObject, str], None],
) -> Balancer:
    """Return the balancer of a run; see distributed_training.hooks.CreateBalancer."""
    timer = ForwardTimer(objects.module, objects.strategy.gathers, ctx.device)
    return Balancer(ctx, state, timer, report)


def description(
    step: int, before: list[int], choice: Choice, changes: bool
) -> tuple[JsonObject, str]:
    """Return a measurement as a record of metrics.jsonl, and as a line.

    Args:
        step: the one after which the ranks chose.
        before: the sequences of each rank in a micro-batch until then.
        changes: whether the ranks adopt the choice.
    """
    fastest = min(choice.seconds)
    ratios = ", ".join(f"{time / fastest:.2f}" for time in choice.seconds)
    measured = f"for one sequence the ranks need {ratios} times as long as the fastest"
    after = choice.counts if changes else before
    text = f"the ranks keep {_shown(before)} sequences of a micro-batch: {measured}"
    if changes:
        text = (
            f"from step {step + 2} on the ranks compute {_shown(after)} sequences of a "
            f"micro-batch, not {_shown(before)}: {measured}. The slowest rank then computes "
            f"{choice.gain:.2f} × as fast"
        )
    record = {"step": step, "rank_sequences": after, "rank_seconds_per_token": choice.seconds}
    return record, f"⚖️  --rank_shares auto: {text}."


def _shown(counts: list[int]) -> str:
    return " : ".join(map(str, counts))
