"""Time of each phase of each optimizer step, measured without waiting for the GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

PHASES = ("data", "forward", "backward", "update")


class StepTimer:
    """Seconds of each phase of each optimizer step.

    A step starts at the end of the previous update and ends at the end of its own update. On a GPU
    the timer records CUDA events and reads them only in `read`: reading a clock after a kernel
    launch would time the launch, and waiting for the kernels would slow training down.

    Attributes:
        steps: seconds by phase (see PHASES) of each step that has been read.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, Any]] = []
        # Seconds by phase, and the last mark, of the step that has not ended.
        self._step = dict.fromkeys(PHASES, 0.0)
        self._before: Any = None  # an event of CUDA, or seconds
        self.steps: list[dict[str, float]] = []

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, phase: str | None) -> None:
        """Assign the time since the last mark to `phase`; None leaves it out (a pause)."""
        self._marks.append((phase, self._now()))

    def end_step(self) -> None:
        """End the current step; the next step starts at the last mark."""
        self._marks.append(("end", None))

    def read(self) -> None:
        """Convert the marks to seconds and append the steps that have ended to `steps`.

        On a GPU this waits for the work launched so far, so call it only where a line is logged.
        """
        if self.cuda and self._marks:
            torch.cuda.synchronize()
        for phase, moment in self._marks:
            if phase == "end":
                self.steps.append(self._step)
                self._step = dict.fromkeys(PHASES, 0.0)
                continue
            if phase is not None and self._before is not None:
                self._step[phase] += self._seconds_to(moment)
            self._before = moment
        self._marks.clear()

    def _seconds_to(self, moment) -> float:
        return self._before.elapsed_time(moment) / 1000 if self.cuda else moment - self._before
