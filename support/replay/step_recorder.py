"""StepRecorder: keeps the numbers of a step instead of logging them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from support.report.step_meter import StepMeter


class RecordedStep(NamedTuple):
    """The numbers that the training loop logs of a step; they may not be finite."""

    loss: float
    lr: float
    grad_norm: float | None


class StepRecorder:
    """Stands for the StepLog of a training loop: keeps the numbers of the last step."""

    def __init__(self, meter: StepMeter) -> None:
        self.meter = meter
        self.recorded: RecordedStep | None = None

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
