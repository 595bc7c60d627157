"""TrainingObjects: model, optimizer and loss scaler as a strategy has built them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp import GradScaler

from distributed_training.strategies.live_states import LiveStates
from distributed_training.strategies.strategy import Strategy
from distributed_training.strategies.wrapped import unwrapped

if TYPE_CHECKING:
    from distributed_training.strategies.ddp.micro_batch_graph import MicroBatchGraphs
    from distributed_training.strategies.optimizer_shards import ShardedState


@dataclass
class TrainingObjects:
    """The objects of a run whose state a checkpoint contains, and the strategy that built them."""

    strategy: Strategy  # with the options under which it has built the model
    model: nn.Module  # as wrapped by the strategy: for DeepSpeed the engine
    optimizer: Any  # PyTorch's, or DeepSpeed's; None with --eval_only
    # Enabled in fp16; DeepSpeed's engine scales the loss itself.
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))
    # bool scalar on the device, true after the first non-finite loss or gradient norm: see
    # `block_update_if_not_finite`.
    found_inf: torch.Tensor | None = None
    graphs: MicroBatchGraphs | None = None  # with --cuda_graph

    def not_finite_flag(self, device: torch.device) -> torch.Tensor:
        """Return `found_inf`, which is created at the first call."""
        if self.found_inf is None:
            self.found_inf = torch.zeros((), dtype=torch.bool, device=device)
        return self.found_inf

    @property
    def loss_scale(self) -> float:
        """The factor by which DeepSpeed's engine multiplies the loss: 1, except in fp16."""
        return float(getattr(getattr(self.optimizer, "loss_scaler", None), "cur_scale", 1))

    @property
    def module(self) -> nn.Module:
        """The model without its wrapper."""
        return unwrapped(self.model)

    def sharded_state(self, device: torch.device) -> ShardedState:
        """Return this rank's fp32 weights and optimizer states, for checkpoints and export."""
        return self.strategy.states_of(self.module, self.optimizer, device)

    def live_states(self) -> LiveStates:
        """Return the tensors of the model states that are in memory at present."""
        return self.strategy.live_states(self.module, self.optimizer)

    def gathered_bytes(self) -> int:
        """Return the bytes of parameters that are gathered at present on this rank."""
        return self.strategy.gathered_bytes(self.module)

    def free_gathered(self) -> None:
        """Free the whole weights that the engine keeps after an evaluation."""
        self.strategy.free_gathered(self.model)
