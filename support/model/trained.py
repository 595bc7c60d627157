"""What an export reads of a run that has trained; a CheckpointManager has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import nn

from support.cluster.context import DistContext


class TrainedModel(Protocol):
    """A trained model on all ranks, and where its weights are saved."""

    ctx: DistContext
    spec: Any  # the ModelSpec
    model: nn.Module  # as wrapped by the strategy
    state: Any  # the ShardedState of this rank, which yields the whole weights
    identity: dict  # the run signature
    best_is_loaded: bool  # whether the weights are those of the best evaluation

    def weights_kept(self, state: Any) -> Path | None:
        """Return a checkpoint with these weights, and save one if necessary; None without one."""
