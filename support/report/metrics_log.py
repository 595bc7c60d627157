"""Measurements of every optimizer step: losses, tokens, time and memory.

They go into metrics.jsonl, to the console and the progress bar, and to the trackers.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from support import progress
from support.cluster.context import DistContext
from support.data.batches import steps_of
from support.errors import explain
from support.files.atomic import naming, only_finite, open_regular, set_aside, write_text
from support.memory import measure as memory
from support.report.profiling import Trace
from support.report.step_timer import PHASES, StepTimer
from support.report.trackers import start_trackers
from support.strategies import gradients
from support.train_state import TrainState
from support.units import human_bytes, perplexity_of
from support.unwrap import unwrapped

LONGEST_LINE_BYTES = 1 << 16  # of metrics.jsonl; a record has a few hundred bytes
EARLY_MEASURED_STEP = 5  # its memory is measured if early stopping may end the run at any step


class MetricsLogger:
    """Measures training step by step, and keeps the numbers on the device until a line is logged.

    It starts the profiler and the trackers of the flags.

    Args:
        memory_by_phase: records the phases of the first step.
        step_memory: measures one step: the last one; with early stopping, where the last one is not
            known in advance, an early one.
    """

    def __init__(
        self,
        args,
        ctx: DistContext,
        folder: Path,
        state: TrainState,
        memory_by_phase: memory.MemoryByPhase,
        step_memory: memory.StepMemory,
    ):
        self.args, self.ctx, self.folder, self.state = args, ctx, folder, state
        self.memory_by_phase, self.step_memory = memory_by_phase, step_memory
        self.measured_step = state.total_steps
        if state.patience:
            self.measured_step = min(state.total_steps, state.step + EARLY_MEASURED_STEP)
        self.trackers = start_trackers(args, ctx, folder, state.step)
        self.trace = Trace(args.profile, ctx) if args.profile else None
        self.at_end: list[Callable[[], None]] = []  # finish files for other tools, see `close`
        self.timer, self.traffic = StepTimer(ctx.device), ctx.hang.traffic
        self.losses: list[float] = []  # of each step since this process started, see `flush`
        self.first_step_at: float | None = None
        self._samples: list[int] = []
        self._samples_before = state.samples
        self._tokens: list[int] = []
        self._pending: list[dict] = []  # steps whose numbers are still on the device
        self._bar = progress.bar("", None, "step", active=False)  # replaced by each epoch's own
        self._epoch = 0
        self._epoch_first_step = 0  # value of state.step when this process started the epoch
        self._rate: float | None = None  # tokens per second of the last step that was flushed
        self._device_memory = ""  # after the last step that was logged

    @property
    def _path(self) -> Path:
        return self.folder / "metrics.jsonl"

    def start_file(self) -> None:
        """Cut metrics.jsonl at the checkpoint, because the steps after it are run again.

        Call it before training. A damaged file is renamed, and its readable lines are kept.
        """
        if not self.ctx.is_main:
            return
        records, damage = read_metrics(self._path)
        if damage:
            new_path = set_aside(self._path, f"{self._path.name}.damaged")
            self.ctx.console.warn(
                f"{self._path} is damaged ({damage}): what cannot be read is left out, "
                f"and the file as it was is {new_path.name}."
            )
        # A checkpoint at the end of an epoch is saved before that epoch's evaluation, so the
        # evaluation of the checkpoint's own step is repeated.
        present = self.state.step
        kept = [
            line
            for step, line in records
            if step < present or (step == present and b'"loss"' in line)
        ]
        write_text(self._path, b"".join(kept).decode())

    # ----------------------------------------------------------------------------- during training

    def start_epoch(self) -> None:
        """Start the progress bar of the epoch's remaining steps, and the clock."""
        state = self.state
        if self._epoch != state.epoch:
            self._epoch, self._epoch_first_step = state.epoch, state.step
        self._batch = steps_of(state.position, self.state.global_batch)
        remaining = steps_of(state.num_sequences - state.position, self.state.global_batch)
        self._batches = self._batch + min(remaining, state.total_steps - state.step)
        self._bar = self.ctx.console.bar(f"Epoch {self._epoch}", self._batches, done=self._batch)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time since the last step (an evaluation, a save) from the next one."""
        self.traffic.discard()
        self.timer.mark(None)

    @property
    def _in_measured_step(self) -> bool:
        return self.state.step + 1 == self.measured_step

    def mark(self, phase: str) -> None:
        """Assign the time and the memory since the last mark to this phase of the step.

        Args:
            phase: one of PHASES.
        """
        self.timer.mark(phase)
        name = "optimizer_step" if phase == "update" else phase
        self.memory_by_phase.doing = memory.AFTER[name]
        is_first = self.state.step == self.state.first_step and phase != "data"
        if is_first or self._in_measured_step:
            self.memory_by_phase.peak.mark()
        if is_first:
            self.memory_by_phase.note(name, mark=False)
        if not self._in_measured_step:
            return
        # The measurement itself is excluded from the next phase.
        if phase == "data":
            self.step_memory.begin()
            self.traffic.aside = self.step_memory.slows_down
        else:
            self.step_memory.mark(phase)
        self.timer.mark(None)

    def after_backward(self) -> None:
        """Call it after the backward pass of the step's last micro-batch.

        In the measured step this counts the live tensors, because all model states exist now.
        """
        self.memory_by_phase.doing = "the update"
        if self._in_measured_step:
            self.step_memory.after_backward()
            self.timer.mark(None)

    def end_step(self, loss: torch.Tensor, lr: float, grad_norm, tokens: torch.Tensor) -> None:
        """Record the optimizer step that `TrainState.advance` has just counted.

        Args:
            loss: mean over the tokens of the global batch; a scalar tensor, left on the device.
            grad_norm: norm of the whole gradient before clipping; a tensor, a number, or None.
            tokens: number of tokens of this step over all ranks; a scalar tensor, left on the
                device.
        Raises:
            TrainingError: the loss of this or an earlier step was not finite, or its gradient norm
                was not (except in fp16). No checkpoint contains that step's update.
        """
        is_measured = self.state.step == self.measured_step
        self.timer.end_step()
        self.traffic.end_step()
        if is_measured:
            self.step_memory.end()
            self.traffic.aside = False
        if self.trace:
            self.trace.end_step()
        if is_measured or self.trace:
            self.timer.mark(None)  # measuring memory and writing a trace are not part of training
        state, batch = self.state, self._batch
        self._batch += 1
        self._samples.append(state.samples - self._samples_before)
        self._samples_before = state.samples
        record = {"step": state.step, "epoch": self._epoch, "loss": loss.detach().clone()}
        self._pending.append({**record, "lr": lr, "grad_norm": grad_norm, "tokens": tokens})
        is_last = self._batch == self._batches or state.finished
        is_logged = batch % self.args.logging_steps == 0 or is_last
        # On a CPU no kernel runs asynchronously, so reading every loss costs nothing.
        if is_logged or self.ctx.device.type == "cpu":
            self.flush()
        if self.ctx.simulated:
            step, total = state.step, state.total_steps
            self.ctx.console.print0(f"Step {step}/{total} of the memory simulation")
        elif is_logged:
            self._log_line(batch, lr)
        if is_logged and (not self._bar.disable or self.trackers.active):
            self._log_device_memory()
        self._advance_bar(lr, is_last)
        self.timer.mark("data")  # logging is part of training: it delays the next step's data

    def _log_line(self, batch: int, lr: float) -> None:
        """Print one step, after the last step of an epoch also the epoch's mean loss."""
        state = self.state
        self.ctx.console.print0(
            f"Epoch {self._epoch} | Batch {batch}/{self._batches} | "
            f"Loss: {self.losses[-1]:.4f} | LR: {lr:.2e}"
        )
        if not self.args.streaming and (state.at_end_of_epoch or state.finished):
            # In a resumed run the mean is over the epoch's steps since the resume.
            mean = statistics.fmean(self.losses[-(state.step - self._epoch_first_step) :])
            steps_per_epoch = steps_of(state.num_sequences, self.state.global_batch)
            epochs = self._epoch + steps_of(state.total_steps - state.step, steps_per_epoch)
            self.ctx.console.print0(f"Epoch {self._epoch}/{epochs} | Average Loss: {mean:.4f}")

    def _log_device_memory(self) -> None:
        """Read the device's memory, for the progress bar and the trackers.

        Called only where lines are logged: the allocator builds a table of all its counters each
        time.
        """
        allocated = self.memory_by_phase.device_bytes()["allocated"]
        self._device_memory = human_bytes(allocated)
        if self.trackers.active:
            self.trackers.memory(self.state.step, self.ctx.all_gather(allocated))
            self.traffic.discard()  # the bytes of this gather

    def _advance_bar(self, lr: float, is_last: bool) -> None:
        if not self._bar.disable and self.losses and self._rate:
            speed = f"{self._rate:,.0f} tok/s, {self._device_memory}"
            text = f"loss {self.losses[-1]:.3f}, lr {lr:.1e}, {speed}"
            self._bar.set_postfix_str(text, refresh=False)  # appears with the next refresh
        self._bar.update()
        if is_last:
            self._bar.close()

    def flush(self) -> None:
        """Copy the numbers of the steps so far to the host, and write them; waits for the GPU."""
        self.timer.read()
        if self.first_step_at is None and self.timer.steps:
            later_steps = sum(sum(step.values()) for step in self.timer.steps[1:])
            self.first_step_at = time.time() - later_steps
        pending, self._pending = self._pending, []
        for record in pending:
            index = record["step"] - 1 - self.state.first_step
            seconds = sum(self.timer.steps[index].values())
            if self.ctx.simulated:  # its losses mean nothing
                self.state.training_seconds += seconds
                continue
            tokens = int(record.pop("tokens"))
            loss = record["loss"] = float(record["loss"])
            if record["grad_norm"] is not None:
                record["grad_norm"] = float(record["grad_norm"])
            if not (math.isfinite(loss) and self._is_usable(record["grad_norm"])):
                raise gradients.not_finite(loss, record["step"])
            self.losses.append(loss)
            self._tokens.append(tokens)
            self.state.add_measurement(loss, tokens, seconds)
            self._rate = tokens / seconds if seconds else None
            self._write({**record, "tokens_per_second": self._rate, "seconds": seconds})

    def _is_usable(self, grad_norm: float | None) -> bool:
        """Whether a gradient norm is finite or unknown; in fp16 an overflow skips the update."""
        # DeepSpeed reports -1 as the norm of gradients that are not finite.
        return grad_norm is None or 0 <= grad_norm < math.inf or self.ctx.precision == "fp16"

    def start_evaluation(self) -> None:
        """Write the steps so far: wandb drops a step that is logged after a later one.

        Raises:
            TrainingError: see `end_step`; a model with a non-finite loss is not evaluated.
        """
        self.flush()
        self.memory_by_phase.doing = "evaluation"

    def log_evaluation(self, loss: float) -> None:
        """Record an evaluation after the current step, and say if early stopping ended the run."""
        state = self.state
        perplexity = perplexity_of(loss)
        self.ctx.console.print0(f"Evaluation | Loss: {loss:.4f} | Perplexity: {perplexity:.2f}")
        self._write({"step": state.step, "eval_loss": loss, "perplexity": perplexity})
        if state.stopped_early:
            self.ctx.console.print0(
                f"🛑 Stopped early: {state.patience} evaluations in a row no better than "
                f"that of step {state.best['step']}."
            )

    def _write(self, record: dict) -> None:
        self.trackers.log(record)
        if self.ctx.is_main:
            with naming(self._path), open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(only_finite(record)) + "\n")

    # ------------------------------------------------------------------------------ after training

    def close(self, sample: str | None = None) -> None:
        """Finish the files for other tools: trace, memory snapshot, curves and sample text.

        An error here becomes a warning, because training itself has completed.
        """
        self._bar.close()
        finishers = [self.trace.stop] if self.trace else []
        finishers += self.at_end
        if sample:
            finishers.append(lambda: self.trackers.sample(self.state.step, sample))
        finishers.append(self.trackers.close)
        for finish in finishers:
            try:
                finish()
            except Exception as error:
                self.ctx.console.warn(str(explain(error)))

    @property
    def warmup_steps(self) -> int:
        """Number of first steps that averages leave out, at most 5.

        They are slow: compilation, first allocations, DeepSpeed's first pass over the model.
        """
        return min(5, (self.state.step - self.state.first_step) // 4)

    def speed(self) -> dict:
        """Return this rank's throughput and step times, without the warm-up steps.

        A step that the measurement of memory slowed down is left out too.

        Returns:
            The keys of results.json from warmup_steps_excluded to step_phases_seconds; samples and
            tokens are of all ranks. Only warmup_steps_excluded, which is 0, if nothing was timed.
        """
        excluded = self.warmup_steps
        if self.ctx.simulated:
            return {"warmup_steps_excluded": 0}
        all_indices = range(excluded, len(self._samples))
        slow = self.measured_step - 1 - self.state.first_step
        indices = [i for i in all_indices if not (i == slow and self.step_memory.slows_down)]
        indices = indices or [*all_indices]
        steps = [self.timer.steps[i] for i in indices]
        seconds = sorted(sum(step.values()) for step in steps)
        if not seconds:
            return {"warmup_steps_excluded": 0}
        return {
            "warmup_steps_excluded": excluded,
            "samples_per_second": sum(self._samples[i] for i in indices) / sum(seconds),
            "tokens_per_second": sum(self._tokens[i] for i in indices) / sum(seconds),
            "step_seconds": {
                "median": statistics.median(seconds),
                "p10": seconds[int(0.1 * (len(seconds) - 1))],
                "p90": seconds[math.ceil(0.9 * (len(seconds) - 1))],
            },
            "step_phases_seconds": {
                name: statistics.mean(step[name] for step in steps) for name in PHASES
            },
        }


def read_metrics(path: Path) -> tuple[list[tuple[int, bytes]], str]:
    """Read the lines of metrics.jsonl that hold a step with a loss or an evaluation.

    An incomplete last line, as a killed run leaves it, is dropped and is not damage.

    Returns:
        ([(step, line)], damage): each line ends with a newline; `damage` says which lines are
        invalid, or why the file cannot be read, and is "" if the file is valid or missing.
    """
    valid_lines, bad_lines = [], []
    if not os.path.lexists(path):
        return valid_lines, ""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE_BYTES), b""), 1):
                try:
                    record = json.loads(line.decode())
                except (ValueError, RecursionError):
                    record = None
                step = record.get("step") if isinstance(record, dict) else None
                if type(step) is int and record.keys() & {"loss", "eval_loss"}:
                    valid_lines.append((step, line.removesuffix(b"\n") + b"\n"))
                elif line.endswith(b"\n") or len(line) == LONGEST_LINE_BYTES:
                    bad_lines.append(number)
    except OSError as error:
        return valid_lines, error.strerror
    if not bad_lines:
        return valid_lines, ""
    more = f" and {len(bad_lines) - 1} more" if len(bad_lines) > 1 else ""
    return valid_lines, f"line {bad_lines[0]}{more}"


def step_memory_of(
    args, ctx: DistContext, objects, spec, memory_by_phase: memory.MemoryByPhase
) -> memory.StepMemory:
    """Return the measurement of the memory of one step.

    Args:
        args: --profile_memory, --batch_size, --seq_length.
        objects: the model and the optimizer as wrapped by the strategy.
        memory_by_phase: whose peak of the device it shares.
    """
    module = unwrapped(objects.model)
    # A loss that is computed from all logits at once keeps their log-probabilities in fp32.
    all_logits = 4 * args.batch_size * args.seq_length * spec.text_config.vocab_size

    def kept_by_loss() -> int:
        return module.get_output_embeddings().kept_bytes if spec.chunked_loss else all_logits

    detailed = args.profile_memory or ctx.simulated
    step_memory = memory.StepMemory(
        module, objects.optimizer, memory_by_phase.peak, detailed, kept_by_loss
    )
    ctx.failures.memory_facts.append(step_memory.describe)
    return step_memory
