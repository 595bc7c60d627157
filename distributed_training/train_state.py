"""How far training has come: what a checkpoint saves besides tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from distributed_training.rank_shares import Entry, RankCounts, divide

# The counters that a checkpoint saves, with their values in a new run.
NEW_RUN: dict[str, Any] = {"step": 0, "samples": 0, "tokens": 0, "best": None}
NEW_RUN |= {"training_seconds": 0.0, "first_loss": None, "last_loss": None}
NEW_RUN |= {"rank_sequences": [], "skipped_steps": []}


@dataclass(frozen=True)
class EvaluationPlan:
    """When to evaluate during training, and which evaluations end it."""

    requested: bool = True  # --eval
    every: int | None = None  # evaluate after so many steps; None: after each epoch
    patience: int | None = None  # evaluations without improvement that end the run; None: no limit


@dataclass
class TrainState:
    """How far training has come, from the start of the run and across resumes.

    `tokens`, `training_seconds` and the losses are up to date after `StepLog.flush`, which copies
    them from the device.
    """

    total_steps: int  # optimizer steps, unless early stopping ends the run; 0 with --eval_only
    num_sequences: int  # in an epoch
    global_batch: int = 1  # sequences in a step over all ranks; the last of an epoch may have fewer
    evaluations: EvaluationPlan = EvaluationPlan()
    step: int = 0  # optimizer steps done
    samples: int = 0  # sequences of these steps, over all ranks
    step_samples: int = 0  # sequences of the last step
    tokens: int = 0  # tokens of these steps, over all ranks
    # Of the best evaluation: {"loss", "step", "waited": evaluations since, "evaluated": the step of
    # the last one}; None before the first.
    best: dict | None = None
    training_seconds: float = 0.0  # time of these steps
    first_loss: float | None = None  # of these steps
    last_loss: float | None = None
    stopped_early: bool = False
    skipped_steps: list[int] = field(default_factory=list)  # of --skip_steps, in order
    ranks: RankCounts = field(default_factory=lambda: RankCounts([]))  # their sequences

    def counters(self) -> dict:
        """Return what a checkpoint saves, with the keys of NEW_RUN."""
        return {name: getattr(self, name) for name in NEW_RUN}

    @property
    def rank_sequences(self) -> list[Entry]:
        """The sequences of the ranks, as a checkpoint saves them."""
        return self.ranks.history

    @property
    def epoch(self) -> int:
        """Number of the epoch of the next step, from 1."""
        return self.samples // self.num_sequences + 1

    @property
    def position(self) -> int:
        """Sequences of this epoch that were trained on."""
        return self.samples % self.num_sequences

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether the last step used the last sequence of an epoch; also true before the first."""
        return self.position == 0

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.step >= self.total_steps or self.stopped_early

    @property
    def evaluation_is_due(self) -> bool:
        """Whether to evaluate now: every N steps or after each epoch, and at the end."""
        every = self.evaluations.every
        on_schedule = self.step % every == 0 if every else self.at_end_of_epoch
        return self.evaluations.requested and (self.finished or on_schedule)

    @property
    def patience(self) -> int | None:
        """The evaluations without improvement that end the run; None: no limit."""
        return self.evaluations.patience

    def evaluation_counts(self, batch_size: int) -> list[int]:
        """Return the sequences of each rank in a batch of an evaluation, in the shares of a step.

        Args:
            batch_size: sequences of a rank on average.
        """
        counts = self.ranks.at(self.step + 1)
        return [*divide(batch_size * len(counts), counts, at_least=1)]

    def advance(self) -> None:
        """Count one optimizer step."""
        self.step_samples = min(self.global_batch, self.num_sequences - self.position)
        self.samples += self.step_samples
        self.step += 1

    def skip(self) -> None:
        """Count one optimizer step that was not made; the sequences of its batch are used."""
        self.advance()
        self.skipped_steps = [*self.skipped_steps, self.step]

    def add_seconds(self, seconds: float) -> None:
        """Record the time of one step."""
        self.training_seconds += seconds

    def add_step(self, loss: float, tokens: int) -> None:
        """Record the loss and the tokens of one step, when the host has them."""
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss
        self.tokens += tokens

    def _trained_since(self, evaluated: int) -> bool:
        """Whether a step was made since an evaluation, which a resumed run may repeat."""
        return bool({*range(evaluated + 1, self.step + 1)} - {*self.skipped_steps})

    def add_evaluation(self, loss: float) -> None:
        """Record an evaluation after the current step, and decide on early stopping."""
        if self.step == 0:  # --eval_first: the model has not been trained yet
            return
        best = self.best
        if best is None or self._trained_since(best.get("evaluated", best["step"])):
            if math.isfinite(loss) and (best is None or loss < best["loss"]):
                best = {"loss": loss, "step": self.step, "waited": 0}
            elif best:
                best = {**best, "waited": best["waited"] + 1}
            self.best = best and {**best, "evaluated": self.step}
        patience_is_over = self.patience and self.best and self.best["waited"] >= self.patience
        self.stopped_early = bool(patience_is_over) and self.step < self.total_steps
