"""StepRecorder: keeps the numbers of a step instead of logging them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from distributed_training.run.step_log import StepLog


class RecordedStep(NamedTuple):
    """The numbers that the training loop logs of a step; they may not be finite."""

    loss: float
    lr: float
    grad_norm: float | None


@dataclass
class StepRecorder(StepLog):
    """A log that keeps the numbers of the last step. It writes and prints nothing."""

    recorded: RecordedStep | None = None

    @classmethod
    def like(cls, log: StepLog) -> StepRecorder:
        """Return a recorder for the run of a log."""
        return cls(log.ctx, log.state, log.meter, log.file, None, None, None, [], log.options)

    def start_epoch(self) -> None:
        """Start the clock."""
        self.meter.pause()

    def log_step(
        self,
        loss: torch.Tensor,
        lr: float,
        grad_norm: torch.Tensor | float | None,
        tokens: torch.Tensor,
    ) -> None:
        """Keep the numbers of a step, also if they are not finite."""
        self.meter.end_step()
        self.meter.read()
        norm = None if grad_norm is None else float(grad_norm)
        self.recorded = RecordedStep(float(loss), lr, norm)
