"""Step-by-step measurements of a run: time, losses, tokens and memory.

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
from typing import Any

import torch

from support.cli.arguments import global_batch
from support.cluster.comm_volume import Traffic
from support.cluster.context import DistContext
from support.data import batches as data
from support.errors import explain
from support.files.atomic import naming, only_finite, open_regular, set_aside, write_text
from support.memory import measure as memory
from support.progress import Bar
from support.report import profiling as tracing
from support.report.trackers import Trackers, start_trackers
from support.strategies import gradients
from support.units import human_bytes
from support.unwrap import unwrapped

PHASES = ("data", "forward", "backward", "update")
LONGEST_LINE_BYTES = 1 << 16  # of metrics.jsonl; a record has a few hundred bytes
EARLY_MEASURED_STEP = 5  # its memory is measured if early stopping may end the run at any step


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
        # MemoryByPhase and last mark of the step that has not ended.
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


class Meter:
    """Measures training step by step and keeps the numbers on the device until a line is logged.

    Attributes:
        step: optimizer steps done, those before a resume included.
        samples_done: sequences of these steps, over all ranks.
        best: {"loss", "step", "waited": evaluations since} of the best evaluation; None so far.
        samples: sequences of each step since this process started, over all ranks.
        losses, tokens: loss and tokens of the same steps, over all ranks; see `flush`.
    """

    def __init__(
        self,
        args,
        ctx: DistContext,
        folder: Path,
        total_steps: int,
        blocks: int,
        before: dict,
        memory_by_phase,
        step_memory,
    ):
        """Start from the counters of a checkpoint, or of a new run.

        Args:
            folder: of metrics.jsonl, which rank 0 writes.
            total_steps: optimizer steps of the whole run, unless it is stopped early.
            blocks: sequences in an epoch.
            before: the counters to continue from, of a checkpoint (see `counters`) or a new run.
            memory_by_phase: memory.MemoryByPhase, which records the phases of the first step.
            step_memory: memory.StepMemory, which measures one step: the last one; with early
                stopping, where the last one is not known in advance, an early one.
        """
        self.args, self.ctx, self.total_steps, self._blocks = args, ctx, total_steps, blocks
        self.measured_step = total_steps
        if args.early_stopping_patience:
            self.measured_step = min(total_steps, before["step"] + EARLY_MEASURED_STEP)
        self.memory_by_phase, self.step_memory = memory_by_phase, step_memory
        self.trace: tracing.Trace | None = None  # --profile
        self.trackers: Trackers | None = None  # --report_to
        self.at_end: list[Callable[[], None]] = []  # calls that finish files for other tools
        self._bar: Bar | None = None
        # Number of the epoch, and the step after which this process started it.
        self._epoch_began: tuple[int, int] | None = None
        self.timer = StepTimer(ctx.device)
        self.traffic = Traffic()
        self.before = before
        self.step = self.before["step"]
        self.samples_done = self.before["samples"]
        self.best: dict | None = before["best"]
        self.stopped_early = False
        self.samples: list[int] = []
        self.tokens: list[int] = []
        self.tokens_before = (
            before["tokens"]
            if before["tokens"] is not None
            else before["samples"] * args.seq_length
        )
        self.losses: list[float] = []
        self.first_step_at: float | None = None
        self._rate: float | None = None  # tokens per second of the last step that was flushed
        self._held = ""  # device memory after the last step that was logged
        self._pending: list[dict] = []
        self._path = folder / "metrics.jsonl" if ctx.is_main else None

    def start_log(self) -> None:
        """Cut metrics.jsonl at the checkpoint, because the steps after it are run again.

        Call it before training. A damaged file is renamed, and its readable lines are kept.

        Raises:
            OSError: the file cannot be renamed or written.
        """
        if self._path is None:
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
        lines = [
            line
            for step, line in records
            if step < self.step or (step == self.step and b'"loss"' in line)
        ]
        write_text(self._path, b"".join(lines).decode())

    def counters(self) -> dict:
        """Return the counters for a checkpoint, with the keys of checkpoints.format.NEW_RUN.

        They count from the start of the run, the steps before a resume included. `training_seconds`
        is in seconds.
        """
        self.flush()
        first, last = self.before["first_loss"], self.before["last_loss"]
        return {
            "step": self.step,
            "samples": self.samples_done,
            "tokens": self.tokens_before + sum(self.tokens),
            "best": self.best,
            "training_seconds": self.before["training_seconds"]
            + sum(sum(step.values()) for step in self.timer.steps),
            "first_loss": self.losses[0] if first is None and self.losses else first,
            "last_loss": self.losses[-1] if self.losses else last,
        }

    @property
    def warmup_steps(self) -> int:
        """Number of first steps that averages leave out, at most 5.

        They are slow: compilation, first allocations, DeepSpeed's first pass over the model.
        """
        return min(5, (self.step - self.before["step"]) // 4)

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether the last step used the last sequence of the epoch."""
        return self.samples_done % self._blocks == 0

    @property
    def evaluation_is_due(self) -> bool:
        """Whether to evaluate now.

        Evaluations are made every --eval_every steps, or else after each epoch; and at the end.
        """
        every = self.args.eval_every
        return self.args.eval and (
            self.finished or (self.step % every == 0 if every else self.at_end_of_epoch)
        )

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps or self.stopped_early

    @property
    def _in_measured_step(self) -> bool:
        return self.step + 1 == self.measured_step

    def mark(self, phase: str) -> None:
        """Assign the time and the memory since the last mark to this phase of the step.

        Args:
            phase: one of PHASES.
        """
        self.timer.mark(phase)
        name = "optimizer_step" if phase == "update" else phase
        self.memory_by_phase.doing = memory.AFTER[name]
        first = self.step == self.before["step"] and phase != "data"
        if first or self._in_measured_step:
            self.memory_by_phase.peak.mark()
        if first:
            self.memory_by_phase.note(name, mark=False)
        if not self._in_measured_step:
            return
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

    def start_epoch(self, epoch: int) -> None:
        """Count the steps of the epoch's remaining sequences, and start the clock.

        Args:
            epoch: number of the epoch, from 1.
        """
        args, self._epoch = self.args, epoch
        self._global_batch = global_batch(args, self.ctx.world_size)
        if not self._epoch_began or self._epoch_began[0] != epoch:
            self._epoch_began = (epoch, self.step)
        # 0, unless the run resumes in the middle of the epoch.
        self.position = self.samples_done - (epoch - 1) * self._blocks
        self._batch = data.steps_of(self.position, self._global_batch)
        remaining_steps = data.steps_of(self._blocks - self.position, self._global_batch)
        self._batches = self._batch + min(remaining_steps, self.total_steps - self.step)
        self._bar = self.ctx.console.bar(f"Epoch {epoch}", self._batches, done=self._batch)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave out of the next step what happened since the last: an evaluation, a save."""
        self.traffic.discard()
        self.timer.mark(None)

    def end_step(self, loss: torch.Tensor, lr: float, grad_norm, tokens: torch.Tensor) -> None:
        """Record one optimizer step.

        Args:
            loss: mean over the tokens of the global batch; a scalar tensor, left on the device.
            lr: learning rate of this step.
            grad_norm: norm of the whole gradient before clipping; a tensor, a number, or None.
            tokens: number of tokens of this step over all ranks; a scalar tensor, left on the
                device.
        Raises:
            TrainingError: the loss of this or an earlier step was not finite, or its gradient norm
                was not (except in fp16). Neither that step nor a later one updated the weights.
        """
        self.timer.end_step()
        self.traffic.end_step()
        if self._in_measured_step:
            self.step_memory.end()
            self.traffic.aside = False
        if self.trace:
            self.trace.end_step()
        if self._in_measured_step or self.trace:
            self.timer.mark(None)  # measuring memory and writing a trace are not part of training
        batch, batches = self._batch, self._batches
        self._batch += 1
        self.step += 1
        # The last step of an epoch may have fewer sequences.
        self.samples.append(min(self._global_batch, self._blocks - self.position))
        self.samples_done += self.samples[-1]
        self.position += self.samples[-1]
        self._pending.append(
            {
                "step": self.step,
                "epoch": self._epoch,
                "loss": loss.detach().clone(),
                "lr": lr,
                "grad_norm": grad_norm,
                "tokens": tokens,
            }
        )
        is_logged = batch % self.args.logging_steps == 0 or self._batch == batches or self.finished
        # On a CPU no kernel runs asynchronously, so reading every loss costs nothing.
        if is_logged or self.ctx.device.type == "cpu":
            self.flush()
        if self.ctx.simulated:
            self.ctx.console.print0(f"Step {self.step}/{self.total_steps} of the memory simulation")
        elif is_logged:
            self.ctx.console.print0(
                f"Epoch {self._epoch} | Batch {batch}/{batches} | "
                f"Loss: {self.losses[-1]:.4f} | LR: {lr:.2e}"
            )
            self._say_epoch()
        if is_logged and (self._bar.active or (self.trackers and self.trackers.active)):
            self._say_memory()
        self._advance_bar(lr)
        self.timer.mark("data")  # logging is part of training: it delays the next step's data

    def _say_memory(self) -> None:
        """Read the device's memory, for the progress bar and the trackers.

        Called only where lines are logged: the allocator builds a table of all its counters each
        time.
        """
        allocated = self.memory_by_phase.device_bytes()["allocated"]
        self._held = human_bytes(allocated)
        if self.trackers and self.trackers.active:
            self.trackers.memory(self.step, self.ctx.all_gather(allocated))
            self.traffic.discard()  # the bytes of this gather

    def _say_epoch(self) -> None:
        """Print the mean loss of an epoch after its last step.

        In a resumed run the mean is over the epoch's steps since the resume.
        """
        if self.args.streaming or not (self.at_end_of_epoch or self.finished):
            return
        steps = self.step - self._epoch_began[1]
        epochs = self._epoch + data.steps_of(
            self.total_steps - self.step, data.steps_of(self._blocks, self._global_batch)
        )
        self.ctx.console.print0(
            f"Epoch {self._epoch}/{epochs} | "
            f"Average Loss: {statistics.fmean(self.losses[-steps:]):.4f}"
        )

    def _advance_bar(self, lr: float) -> None:
        if self._bar.active and self.losses and self._rate:
            speed = f"{self._rate:,.0f} tok/s, {self._held}"
            self._bar.show(f"loss {self.losses[-1]:.3f}, lr {lr:.1e}, {speed}")
        self._bar.advance()
        if self._batch == self._batches or self.finished:
            self._bar.close()

    def flush(self) -> None:
        """Copy the numbers of the steps so far to the host and write them.

        Raises:
            TrainingError: see `end_step`.
        """
        self.timer.read()
        if self.first_step_at is None and self.timer.steps:
            self.first_step_at = time.time() - sum(
                sum(step.values()) for step in self.timer.steps[1:]
            )
        pending, self._pending = self._pending, []
        for record in () if self.ctx.simulated else pending:
            tokens = int(record.pop("tokens"))
            seconds = sum(self.timer.steps[record["step"] - 1 - self.before["step"]].values())
            record["loss"] = float(record["loss"])
            record["grad_norm"] = (
                None if record["grad_norm"] is None else float(record["grad_norm"])
            )
            # DeepSpeed reports -1 as the norm of gradients that are not finite. In fp16 it has
            # skipped that update.
            norm_is_usable = (
                record["grad_norm"] is None
                or 0 <= record["grad_norm"] < math.inf
                or self.ctx.precision == "fp16"
            )
            if not (math.isfinite(record["loss"]) and norm_is_usable):
                raise gradients.not_finite(record["loss"], record["step"])
            self.losses.append(record["loss"])
            self.tokens.append(tokens)
            self._rate = tokens / seconds if seconds else None
            self._write({**record, "tokens_per_second": self._rate, "seconds": seconds})

    def log_evaluation(self, loss: float, perplexity: float) -> None:
        """Record an evaluation after the current step, and decide on early stopping.

        Args:
            loss: mean over the validation tokens.
            perplexity: of the same tokens.
        """
        self._write({"step": self.step, "eval_loss": loss, "perplexity": perplexity})
        if self.step == 0:  # --eval_first: the model has not been trained yet
            return
        if math.isfinite(loss) and (self.best is None or loss < self.best["loss"]):
            self.best = {"loss": loss, "step": self.step, "waited": 0}
        elif self.best and self.best["step"] != self.step:
            # A resumed run may repeat the evaluation of its checkpoint, which must not count again.
            self.best = {**self.best, "waited": self.best["waited"] + 1}
        patience = self.args.early_stopping_patience
        if patience and self.best and self.best["waited"] >= patience and not self.finished:
            self.stopped_early = True
            self.ctx.console.print0(
                f"🛑 Stopped early: {patience} evaluations in a row no better than "
                f"that of step {self.best['step']}."
            )

    def _write(self, record: dict) -> None:
        if self.trackers:
            self.trackers.log(record)
        if self._path is not None:
            with naming(self._path), open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(only_finite(record)) + "\n")

    def close(self, sample: str | None = None) -> None:
        """Finish the files for other tools: trace, memory snapshot, curves and sample text.

        An error here becomes a warning, because training itself has completed.

        Args:
            sample: the text that --generate produced.
        """
        if self._bar:
            self._bar.close()
        trackers = [lambda: self.trackers.sample(self.step, sample)] if sample else []
        for finish in ([self.trace.stop] if self.trace else []) + [
            *self.at_end,
            *trackers,
            self.trackers.close,
        ]:
            try:
                finish()
            except Exception as error:
                self.ctx.console.warn(str(explain(error)))

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
        slow_index = (
            self.measured_step - 1 - self.before["step"] if self.step_memory.slows_down else None
        )
        all_indices = range(excluded, len(self.samples))
        indices = [i for i in all_indices if i != slow_index] or all_indices
        steps = [self.timer.steps[i] for i in indices]
        seconds = sorted(sum(step.values()) for step in steps)
        if not seconds:
            return {"warmup_steps_excluded": 0}
        return {
            "warmup_steps_excluded": excluded,
            "samples_per_second": sum(self.samples[i] for i in indices) / sum(seconds),
            "tokens_per_second": sum(self.tokens[i] for i in indices) / sum(seconds),
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
                if (
                    isinstance(record, dict)
                    and type(record.get("step")) is int
                    and record.keys() & {"loss", "eval_loss"}
                ):
                    valid_lines.append(
                        (record["step"], line if line.endswith(b"\n") else line + b"\n")
                    )
                elif line.endswith(b"\n") or len(line) == LONGEST_LINE_BYTES:
                    bad_lines.append(number)
    except OSError as error:
        return valid_lines, error.strerror
    return (
        valid_lines,
        f"line {bad_lines[0]}{f' and {len(bad_lines) - 1} more' if len(bad_lines) > 1 else ''}"
        if bad_lines
        else "",
    )


def open_meter(
    args,
    ctx: DistContext,
    folder: Path,
    model,
    optimizer,
    spec,
    steps: int,
    before: dict,
    memory_by_phase,
    blocks: int,
) -> Meter:
    """Return a `Meter` with what --profile_memory, --profile and --report_to add to it.

    Args:
        steps: optimizer steps of the whole run; with --eval_only none are made.
        before, memory_by_phase, blocks: see `Meter`.
    Raises:
        UserError: the trace's folder cannot be created, or wandb could not start.
    """
    detailed = args.profile_memory or ctx.simulated
    module = unwrapped(model)
    # A loss that is computed from all logits at once keeps their log-probabilities in fp32.
    all_logits = 4 * args.batch_size * args.seq_length * spec.text_config.vocab_size

    def kept_by_loss() -> int:
        return module.get_output_embeddings().kept_bytes if spec.chunked_loss else all_logits

    step_memory = memory.StepMemory(module, optimizer, memory_by_phase.peak, detailed, kept_by_loss)
    ctx.failures.memory_facts.append(step_memory.describe)
    meter = Meter(
        args,
        ctx,
        folder,
        0 if args.eval_only else steps,
        blocks,
        before,
        memory_by_phase,
        step_memory,
    )
    meter.traffic.start()
    meter.trackers = start_trackers(args, ctx, folder, before["step"])
    if args.profile:
        meter.trace = tracing.Trace(args.profile, ctx)
        meter.trace.start()
    return meter
