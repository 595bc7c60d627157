"""TrainedModel: what an export and the prompts of --generate need of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from distributed_training.model.spec import ModelSpec
from distributed_training.ranks.context import DistContext
from distributed_training.strategies.objects import TrainingObjects

if TYPE_CHECKING:
    from distributed_training.strategies.optimizer_shards import ShardedState


class TrainedModel(NamedTuple):
    """A trained model, as it is exported."""

    ctx: DistContext
    spec: ModelSpec
    objects: TrainingObjects  # its model is wrapped
    sharded: ShardedState | None  # this rank's weights; None with --eval_only
    kind: str | None  # of the rows that it was trained on
    identity: dict  # the run signature
    is_best: bool  # whether the weights are those of the best evaluation, and not the last
    # Returns a checkpoint with these weights, which may be saved for it, or None.
    keep_weights: Callable[[], Path | None]

    @property
    def module(self) -> nn.Module:
        """The model without its wrapper."""
        return self.objects.module

    @property
    def weights(self) -> ShardedState:
        """This rank's weights; --eval_only exports nothing."""
        assert self.sharded is not None
        return self.sharded
