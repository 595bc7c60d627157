"""Logs every optimizer step: to metrics.jsonl, the console and the trackers."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from support import console as progress
from support.cli.arguments import Arguments
from support.cluster.context import DistContext
from support.data.batches import steps_of
from support.errors import explain
from support.report.metrics_file import MetricsFile
from support.report.profiling import Trace
from support.report.step_meter import StepMeter
from support.report.trackers import start_trackers
from support.strategies import gradients
from support.train_state import TrainState
from support.units import human_bytes, perplexity_of


class MetricsLogger:
    """Logs training step by step; the numbers stay on the device until a line is logged.

    It starts the profiler and the trackers of the flags.

    Attributes:
        mark, after_backward: of the meter, for the training loops.
        losses: loss of each step since this process started, up to date after `flush`.
    """

    def __init__(
        self, args: Arguments, ctx: DistContext, folder: Path, state: TrainState, meter: StepMeter
    ):
        self._args, self._ctx, self._state, self.meter = args, ctx, state, meter
        self.mark, self.after_backward = meter.mark, meter.after_backward
        self.file = MetricsFile(folder / "metrics.jsonl", ctx.console)
        self.trackers = start_trackers(args, ctx, folder, state.step)
        self.trace = Trace(args.profile, ctx) if args.profile else None
        self.losses: list[float] = []
        self._samples: list[int] = []  # of each step, over all ranks
        self._samples_before = state.samples
        self._tokens: list[int] = []
        self._pending: list[dict] = []  # steps whose numbers are still on the device
        self._bar = progress.bar("", None, "step", active=False)  # replaced in each epoch
        self._epoch = self._batch = self._batches = 0  # of the epoch: its number, and its steps
        self._epoch_first_step = 0  # value of state.step when this process started the epoch
        self._rate: float | None = None  # tokens per second of the last step that was flushed
        self._device_memory = ""  # after the last step that was logged

    # ----------------------------------------------------------------------------- during training

    def start_epoch(self) -> None:
        """Start the progress bar of the epoch's remaining steps, and the clock."""
        state = self._state
        if self._epoch != state.epoch:
            self._epoch, self._epoch_first_step = state.epoch, state.step
        self._batch = steps_of(state.position, state.global_batch)
        remaining = steps_of(state.num_sequences - state.position, state.global_batch)
        self._batches = self._batch + min(remaining, state.total_steps - state.step)
        self._bar = self._ctx.console.bar(f"Epoch {self._epoch}", self._batches, done=self._batch)
        self.meter.pause()

    def end_step(
        self, loss: torch.Tensor, lr: float, grad_norm: torch.Tensor | float | None, tokens
    ) -> None:
        """Record the optimizer step that `TrainState.advance` has just counted.

        Args:
            loss: mean over the tokens of the global batch; a scalar tensor, left on the device.
            grad_norm: norm of the whole gradient before clipping.
            tokens: number of tokens of this step over all ranks; a scalar tensor, left on the
                device.
        Raises:
            TrainingError: the loss of this or an earlier step was not finite, or its gradient norm
                was not (except in fp16). No checkpoint contains that step's update.
        """
        self.meter.end_step()
        if self.trace:
            self.trace.end_step()
            self.meter.pause()
        state, batch = self._state, self._batch
        self._batch += 1
        self._samples.append(state.samples - self._samples_before)
        self._samples_before = state.samples
        record = {"step": state.step, "epoch": self._epoch, "loss": loss.detach().clone()}
        self._pending.append({**record, "lr": lr, "grad_norm": grad_norm, "tokens": tokens})
        is_last = self._batch == self._batches or state.finished
        is_logged = batch % self._args.logging_steps == 0 or is_last
        # On a CPU no kernel runs asynchronously, so reading every loss costs nothing.
        if is_logged or self._ctx.device.type == "cpu":
            self.flush()
        if is_logged or self._ctx.simulated:
            self._log_line(batch, lr)
        if is_logged and (not self._bar.disable or self.trackers.active):
            # The allocator needs time to read the device's memory.
            allocated = self.meter.memory_by_phase.device_bytes()["allocated"] or 0
            self._device_memory = human_bytes(allocated)
            if self.trackers.active:
                self.trackers.memory(state.step, self._ctx.all_gather(allocated))
                self.meter.traffic.discard()  # the bytes of this gather
        if not self._bar.disable and self.losses and self._rate:
            speed = f"{self._rate:,.0f} tok/s, {self._device_memory}"
            text = f"loss {self.losses[-1]:.3f}, lr {lr:.1e}, {speed}"
            self._bar.set_postfix_str(text, refresh=False)  # appears with the next refresh
        self._bar.update()
        if is_last:
            self._bar.close()
        self.meter.mark("data")  # logging is part of training: it delays the next step's data

    def _log_line(self, batch: int, lr: float) -> None:
        """Print one step, after the last step of an epoch also the epoch's mean loss."""
        state, print0 = self._state, self._ctx.console.print0
        if self._ctx.simulated:
            print0(f"Step {state.step}/{state.total_steps} of the memory simulation")
            return
        print0(
            f"Epoch {self._epoch} | Batch {batch}/{self._batches} | "
            f"Loss: {self.losses[-1]:.4f} | LR: {lr:.2e}"
        )
        if not self._args.streaming and (state.at_end_of_epoch or state.finished):
            # In a resumed run the mean is over the epoch's steps since the resume.
            mean = statistics.fmean(self.losses[-(state.step - self._epoch_first_step) :])
            steps_per_epoch = steps_of(state.num_sequences, state.global_batch)
            epochs = self._epoch + steps_of(state.total_steps - state.step, steps_per_epoch)
            print0(f"Epoch {self._epoch}/{epochs} | Average Loss: {mean:.4f}")

    @contextlib.contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Complete the counters first, and exclude the time of this context from the next step."""
        self.flush()
        yield
        self.meter.pause()

    def flush(self) -> None:
        """Copy the numbers of the steps so far to the host, and write them; waits for the GPU."""
        meter = self.meter
        meter.read()
        pending, self._pending = self._pending, []
        for record in pending:
            seconds = sum(meter.steps[record["step"] - 1 - meter.first_step].values())
            if self._ctx.simulated:  # its losses mean nothing
                self._state.training_seconds += seconds
                continue
            tokens = int(record.pop("tokens"))
            loss = record["loss"] = float(record["loss"])
            norm = record["grad_norm"]
            norm = record["grad_norm"] = None if norm is None else float(norm)
            # In fp16 an overflow skips the update. DeepSpeed's norm is -1 for such gradients.
            usable = norm is None or 0 <= norm < math.inf or self._ctx.precision == "fp16"
            if not (math.isfinite(loss) and usable):
                raise gradients.not_finite(loss, record["step"])
            self.losses.append(loss)
            self._tokens.append(tokens)
            self._state.add_measurement(loss, tokens, seconds)
            self._rate = tokens / seconds if seconds else None
            self._write({**record, "tokens_per_second": self._rate, "seconds": seconds})

    def start_evaluation(self) -> None:
        """Write the steps so far: wandb drops a step that is logged after a later one.

        Raises:
            TrainingError: see `end_step`; a model with a non-finite loss is not evaluated.
        """
        self.flush()
        self.meter.memory_by_phase.doing = "evaluation"

    def log_evaluation(self, loss: float) -> None:
        """Record an evaluation after the current step, and print whether it ends the run."""
        state, print0 = self._state, self._ctx.console.print0
        perplexity = perplexity_of(loss)
        print0(f"Evaluation | Loss: {loss:.4f} | Perplexity: {perplexity:.2f}")
        self._write({"step": state.step, "eval_loss": loss, "perplexity": perplexity})
        if state.stopped_early and state.best:
            print0(
                f"🛑 Stopped early: {state.patience} evaluations in a row no better than "
                f"that of step {state.best['step']}."
            )

    def _write(self, record: dict) -> None:
        self.trackers.log(record)
        if self._ctx.is_main:
            self.file.append(record)

    # ------------------------------------------------------------------------------ after training

    def speed(self) -> dict:
        """Return this rank's throughput and step times; see `StepMeter.speed`."""
        return self.meter.speed(self._samples, self._tokens)

    def close(self, sample: str | None = None) -> None:
        """Finish the trace, the curves (with the text of --generate) and metrics.jsonl."""
        self._bar.close()
        if self._ctx.is_main:
            self.file.flush()
        if self.trace:
            with errors_as_notices(self._ctx):
                self.trace.stop()
        self.trackers.close(self._state.step, sample)


@contextlib.contextmanager
def errors_as_notices(ctx: DistContext) -> Iterator[None]:
    """Print an error of files for other tools as a notice: training itself has completed."""
    try:
        yield
    except Exception as error:
        ctx.console.warn(str(explain(error)))
