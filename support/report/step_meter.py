"""Measures each optimizer step: its time by phase, what it communicates, and the memory of one."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

from support.checkpoints.manager import TrainingObjects
from support.cli.arguments import Arguments
from support.cluster.comm_volume import Traffic
from support.cluster.context import DistContext
from support.memory.measure import AFTER, MemoryByPhase, StepMemory
from support.model.resolve import ModelSpec
from support.report import PHASES
from support.train_state import TrainState, unwrapped

EARLY_MEASURED_STEP = 5  # its memory is measured if early stopping may end the run at any step


def create_meter(
    args: Arguments,
    ctx: DistContext,
    objects: TrainingObjects,
    spec: ModelSpec,
    memory_by_phase: MemoryByPhase,
    state: TrainState,
) -> StepMeter:
    """Return the meter of this rank's steps, which measures the memory of the last one."""
    module = unwrapped(objects.model)
    # A loss that is computed from all logits at once keeps their log-probabilities in fp32.
    all_logits = 4 * args.batch_size * args.seq_length * spec.text_config.vocab_size

    def kept_by_loss() -> int:
        return module.get_output_embeddings().kept_bytes if spec.chunked_loss else all_logits

    detailed = args.profile_memory or ctx.simulated
    peak = memory_by_phase.peak
    step_memory = StepMemory(module, objects.optimizer, peak, detailed, kept_by_loss)
    ctx.failures.memory_facts.append(step_memory.describe)
    last = state.total_steps
    measured_step = min(last, state.step + EARLY_MEASURED_STEP) if state.patience else last
    return StepMeter(memory_by_phase, step_memory, ctx.hang.traffic, state.step, measured_step)


class StepMeter:
    """Time, memory and traffic of each optimizer step of this rank.

    A step starts at the end of the previous update and ends at the end of its own update. On a GPU
    the meter records CUDA events and reads them only in `read`: reading a clock after a kernel
    launch would time the launch, and waiting for the kernels would slow training down.

    Args:
        memory_by_phase: records the phases of the first step.
        step_memory: measures the step with the number `measured_step`.
        first_step: number of steps before those of this process.

    Attributes:
        steps: seconds by phase (see PHASES) of each step that has been read.
        first_step_at: end of the first step, in seconds since 1970; None until it was read.
    """

    def __init__(
        self,
        memory_by_phase: MemoryByPhase,
        step_memory: StepMemory,
        traffic: Traffic,
        first_step: int,
        measured_step: int,
    ):
        self.memory_by_phase, self.step_memory, self.traffic = memory_by_phase, step_memory, traffic
        self.first_step, self.measured_step = first_step, measured_step
        self.step = first_step  # steps that have ended
        self.steps: list[dict[str, float]] = []
        self.first_step_at: float | None = None
        self._cuda = memory_by_phase.device.type == "cuda"
        self._marks: list[tuple[str | None, Any]] = []  # phase, and a CUDA event or seconds
        self._now = dict.fromkeys(PHASES, 0.0)  # seconds of the step that has not ended
        self._last: Any = None  # the last mark that was read

    @property
    def _measures_memory(self) -> bool:
        return self.step + 1 == self.measured_step

    def pause(self) -> None:
        """Exclude the time and the traffic since the last mark (a save, an evaluation)."""
        self.traffic.discard()
        self._mark_time(None)

    def mark(self, phase: str) -> None:
        """Assign the time and the memory since the last mark to a phase of the step (PHASES)."""
        self._mark_time(phase)
        name = "optimizer_step" if phase == "update" else phase
        self.memory_by_phase.doing = AFTER[name]
        is_first = self.step == self.first_step and phase != "data"
        if is_first or self._measures_memory:
            self.memory_by_phase.peak.mark()
        if is_first:
            self.memory_by_phase.note(name, mark=False)
        if not self._measures_memory:
            return
        if phase == "data":
            self.step_memory.begin()
            self.traffic.aside = self.step_memory.slows_down
        else:
            self.step_memory.mark(phase)
        self._mark_time(None)  # the next phase excludes the measurement itself

    def after_backward(self) -> None:
        """Count the live tensors of the measured step: after backward all model states exist."""
        self.memory_by_phase.doing = "the update"
        if self._measures_memory:
            self.step_memory.after_backward()
            self._mark_time(None)

    def end_step(self) -> None:
        """End the step; the next one starts at the last mark."""
        self._marks.append(("end", None))
        self.traffic.end_step()
        if self._measures_memory:
            self.step_memory.end()
            self.traffic.aside = False
            self._mark_time(None)
        self.step += 1

    def _mark_time(self, phase: str | None) -> None:
        moment: Any = time.perf_counter()
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._marks.append((phase, moment))

    def read(self) -> None:
        """Append the steps that have ended to `steps`; on a GPU this waits for their kernels."""
        if self._cuda and self._marks:
            torch.cuda.synchronize()
        for phase, moment in self._marks:
            if phase == "end":
                self.steps.append(self._now)
                self._now = dict.fromkeys(PHASES, 0.0)
                continue
            if phase is not None and self._last is not None:
                last = self._last
                seconds = last.elapsed_time(moment) / 1000 if self._cuda else moment - last
                self._now[phase] += seconds
            self._last = moment
        self._marks.clear()
        if self.first_step_at is None and self.steps:
            self.first_step_at = time.time() - sum(sum(step.values()) for step in self.steps[1:])

    @property
    def warmup_steps(self) -> int:
        """Number of slow first steps (compilation, first allocations) that averages exclude."""
        return min(5, (self.step - self.first_step) // 4)

    def speed(self, samples: list[int], tokens: list[int]) -> dict:
        """Return throughput and step times, without the warm-up steps, by keys of results.json.

        A step that was slowed down by the measurement of its memory is excluded, if others exist.

        Args:
            samples, tokens: numbers of each step in `steps`, over all ranks.
        """
        if not tokens:
            return {"warmup_steps_excluded": 0}
        excluded = self.warmup_steps
        slow = self.measured_step - 1 - self.first_step if self.step_memory.slows_down else None
        all_indices = range(excluded, len(tokens))
        indices = [index for index in all_indices if index != slow] or [*all_indices]
        steps = [self.steps[index] for index in indices]
        seconds = sorted(sum(step.values()) for step in steps)
        return {
            "warmup_steps_excluded": excluded,
            "samples_per_second": sum(samples[index] for index in indices) / sum(seconds),
            "tokens_per_second": sum(tokens[index] for index in indices) / sum(seconds),
            "step_seconds": {
                "median": statistics.median(seconds),
                "p10": seconds[int(0.1 * (len(seconds) - 1))],
                "p90": seconds[math.ceil(0.9 * (len(seconds) - 1))],
            },
            "step_phases_seconds": {
                name: statistics.mean(step[name] for step in steps) for name in PHASES
            },
        }
