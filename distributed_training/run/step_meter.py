"""Measures each optimizer step: its time by phase, what it communicates, and the memory of one."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from distributed_training import process
from distributed_training.loss_chunks import fits_in_graph
from distributed_training.memory.measure import AFTER, MemoryByPhase, StepMemory
from distributed_training.model.spec import ModelSpec
from distributed_training.ranks.comm_volume import Traffic
from distributed_training.ranks.context import DistContext
from distributed_training.records.metrics_file import PHASES
from distributed_training.strategies.objects import TrainingObjects
from distributed_training.train_state import TrainState


def loss_bytes(
    objects: TrainingObjects, spec: ModelSpec, state: TrainState, compiled: bool, ctx: DistContext
) -> Callable[[], int]:
    """Return a function that returns the bytes which the loss keeps until its backward pass."""
    vocabulary = spec.text_config.vocab_size

    def kept_by_loss() -> int:
        if not spec.chunked_loss:  # cross_entropy keeps the log-probabilities in fp32
            # Of the step that is measured, which is not counted yet.
            return 4 * state.ranks.at(state.step + 1)[ctx.rank] * spec.seq_length * vocabulary
        head = objects.module.get_output_embeddings()
        if compiled and fits_in_graph(head.tokens, vocabulary, ctx.device.type):
            return ctx.dtype.itemsize * head.tokens * vocabulary  # the logits
        return head.kept_bytes

    return kept_by_loss


def create_meter(
    ctx: DistContext,
    memory: MemoryByPhase,
    step_memory: StepMemory,
    state: TrainState,
    skipped: tuple[int, ...] = (),
) -> StepMeter:
    """Return the meter of this rank's steps, which measures the memory of the last one.

    Args:
        skipped: steps of --skip_steps, which the meter does not count.
    """
    measured = state.total_steps - sum(state.step < step <= state.total_steps for step in skipped)
    if state.patience:  # early stopping may end the run at any step, so an early one is measured
        measured = min(measured, state.step + 5)
    if graphs := step_memory.objects.graphs:  # a replay does not allocate
        measured = min(measured, state.step + graphs.eager_steps)
    return StepMeter(memory, step_memory, ctx.monitor.watchdog.traffic, state.step, measured)


@dataclass
class StepMeter:
    """Time, memory and traffic of each optimizer step of this rank.

    A step starts at the end of the previous update and ends at the end of its own update. On a GPU
    the meter records CUDA events and reads them only in `read`: reading a clock after a kernel
    launch would time the launch, and waiting for the kernels would slow training down.
    """

    memory: MemoryByPhase  # of the phases of the first step
    step_memory: StepMemory  # of the step with the number `measured_step`
    traffic: Traffic
    first_step: int  # steps before those of this process
    measured_step: int
    # Seconds by phase (see PHASES) of each step that has been read.
    steps: list[dict[str, float]] = field(default_factory=list)
    # From the start of the process to the end of the first step.
    seconds_to_first_step: float | None = None

    def __post_init__(self) -> None:
        self.step = self.first_step  # steps that have ended
        self._cuda = self.memory.device.type == "cuda"
        # The phase that ends, and a CUDA event or seconds: of the step that has not ended, and of
        # each step that has ended and was not read.
        self._marks: list[tuple[str | None, Any]] = []
        self._ended: list[list[tuple[str | None, Any]]] = []
        # The last mark that was read, and the age of the process then: now, while a GPU is idle.
        self._last, self._age = self._moment(), process.age()

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
        self.memory.begin(AFTER[name])
        is_first = self.step == self.first_step and phase != "data"
        if is_first or self._measures_memory:
            self.memory.peak.mark()
        if is_first:
            self.memory.note(name, mark=False)
        if self._measures_memory:
            if phase == "data":
                self.step_memory.begin()
                if self.step_memory.slows_down:
                    self.traffic.gather_aside(True)
            else:
                self.step_memory.mark(phase)
            self._mark_time(None)  # the next phase excludes the measurement itself

    def after_backward(self) -> None:
        """Count the live tensors of the measured step: after backward all model states exist."""
        self.memory.begin("the update")
        if self._measures_memory:
            self.step_memory.after_backward()
            self._mark_time(None)

    def end_step(self) -> None:
        """End the step; the next one starts at the last mark."""
        self._ended.append(self._marks)
        self._marks = []
        self.traffic.end_step()
        if self._measures_memory:
            self.step_memory.end()
            self.traffic.gather_aside(False)
            self._mark_time(None)
        self.step += 1

    def _mark_time(self, phase: str | None) -> None:
        self._marks.append((phase, self._moment()))

    def _moment(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> list[float]:
        """Append the steps that have ended to `steps`; on a GPU, wait for the end of the last one.

        Returns:
            The seconds of each of these steps.
        """
        ended, self._ended = self._ended, []
        if self._cuda:
            ended[-1][-1][1].synchronize()  # its last mark; the GPU may compute a later step
        for marks in ended:
            seconds = dict.fromkeys(PHASES, 0.0)
            for phase, moment in marks:
                last, self._last = self._last, moment
                passed = last.elapsed_time(moment) / 1000 if self._cuda else moment - last
                self._age += passed
                if phase is not None:
                    seconds[phase] += passed
            self.steps.append(seconds)
            if self.seconds_to_first_step is None:
                self.seconds_to_first_step = self._age
        return [sum(step.values()) for step in self.steps[-len(ended) :]]

    @property
    def warmup_steps(self) -> int:
        """Number of slow first steps (compilation, first allocations) that averages exclude."""
        return min(5, (self.step - self.first_step) // 4)

    def speed(self, work: list[tuple[int, int]]) -> dict:
        """Return throughput and step times, without the warm-up steps, by keys of results.json.

        A step that was slowed down by the measurement of its memory is excluded, if others exist.

        Args:
            work: sequences and tokens of each step in `steps`, over all ranks.
        """
        if not work:
            return {"warmup_steps_excluded": 0}
        slow = self.measured_step - 1 - self.first_step if self.step_memory.slows_down else None
        after_warmup = range(self.warmup_steps, len(work))
        chosen = [index for index in after_warmup if index != slow] or [*after_warmup]
        steps = [self.steps[index] for index in chosen]
        samples, tokens = (sum(column) for column in zip(*(work[i] for i in chosen), strict=True))
        seconds = sorted(sum(step.values()) for step in steps)
        return {
            "warmup_steps_excluded": self.warmup_steps,
            "samples_per_second": samples / sum(seconds),
            "tokens_per_second": tokens / sum(seconds),
            "step_seconds": {
                "median": statistics.median(seconds),
                "p10": seconds[int(0.1 * (len(seconds) - 1))],
                "p90": seconds[math.ceil(0.9 * (len(seconds) - 1))],
            },
            "step_phases_seconds": {
                name: statistics.mean(step[name] for step in steps) for name in PHASES
            },
        }
