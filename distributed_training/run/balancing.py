"""--rank_shares auto: what changes the shares of the ranks while a run trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from distributed_training.files.json_types import JsonObject
from distributed_training.ranks.context import DistContext
from distributed_training.strategies.objects import TrainingObjects
from distributed_training.train_state import TrainState


class Balancer(Protocol):
    """Changes the shares of the ranks while a run trains."""

    def after_step(self) -> None:
        """Measure, and maybe change the shares of later steps; every rank calls it."""

    def skip_step(self) -> None:
        """Called instead of `after_step` for a step that --skip_steps leaves out."""


class FixedShares:
    """The Balancer of a run whose ranks keep their shares."""

    def after_step(self) -> None:
        """Do nothing."""

    def skip_step(self) -> None:
        """Do nothing."""


class CreateBalancer(Protocol):
    """Creates the Balancer of --rank_shares auto."""

    def __call__(
        self,
        objects: TrainingObjects,
        state: TrainState,
        ctx: DistContext,
        report: Callable[[JsonObject, str], None],
    ) -> Balancer:
        """Create it; `report` logs a record of metrics.jsonl, and prints a line about it."""
