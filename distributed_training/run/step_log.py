"""The log of the steps and evaluations: metrics.jsonl, console, progress bar, trackers."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from distributed_training import console
from distributed_training.data.batches import steps_of
from distributed_training.data.facts import Targets, bits_per_byte
from distributed_training.data.opening import NOTHING_TO_EVALUATE
from distributed_training.errors import explain, redact_value
from distributed_training.files.atomic import write_text
from distributed_training.files.json_types import JsonObject
from distributed_training.pending_copy import PendingCopy
from distributed_training.ranks.context import DistContext
from distributed_training.records.metrics_file import MetricsFile
from distributed_training.run.step_meter import StepMeter
from distributed_training.strategies import gradients
from distributed_training.train_state import TrainState
from distributed_training.units import perplexity_of

if TYPE_CHECKING:
    from tqdm import tqdm

    from distributed_training.run.prompts import GeneratedText
    from distributed_training.run.trackers import Trackers

Numbers = dict[str, torch.Tensor | float | None]  # of a step; some are still on the device


@dataclass
class Epoch:
    """The steps of an epoch that are logged, as its progress bar shows them."""

    number: int
    batch: int  # the number of its next step, from 0: the steps that have been logged
    batches: int  # its steps, or those up to the last step of the run
    bar: tqdm

    @property
    def is_complete(self) -> bool:
        """Whether its last step has been logged."""
        return self.batch == self.batches

    def count_step(self) -> int:
        """Count a step as logged; return its number."""
        self.batch += 1
        return self.batch - 1


class SentSteps(NamedTuple):
    """Steps whose numbers are being copied to the host."""

    steps: list[Numbers]
    copy: PendingCopy  # of all their tensors
    batch: str | None  # of the last step, as its line shows it; None: it has no line


class LogOptions(NamedTuple):
    """What a run logs."""

    steps: int  # --logging_steps
    streaming: bool  # the number of epochs is not known
    targets: Targets | None  # of an evaluation, on rank 0


@dataclass
class StepLog:
    """The log of the steps and evaluations of a run. All ranks call the methods.

    The numbers of a step stay on the device until a line is due. A GPU's numbers are then copied to
    the host, which logs them when it has launched the next step, so that the GPU is never idle.
    """

    ctx: DistContext
    state: TrainState  # gets the numbers that were copied from the device
    meter: StepMeter  # measures the steps
    file: MetricsFile
    trackers: Trackers | None  # of --report_to, on rank 0
    trace: torch.profiler.profile | None  # of --profile
    draw_losses: Callable[[Path], None] | None  # draws metrics.jsonl, on rank 0
    at_end: list[Callable[[], object]]  # write the files of other tools
    options: LogOptions
    work: list[tuple[int, int]] = field(default_factory=list)  # sequences and tokens of each step
    _pending: list[Numbers] = field(default_factory=list)  # steps whose numbers are on the device
    _sent: SentSteps | None = None  # those before; received at the start of `log_step`
    _losses: list[float] = field(default_factory=list)  # of the epoch's steps in this process
    _rate: float | None = None  # tokens per second of the last step that was logged
    _epoch: Epoch | None = None  # None before the first step

    def cut(self) -> None:
        """Remove the records of an earlier run after the checkpoint from which this one starts."""
        path = self.file.path
        if self.ctx.is_main and not path.is_file():
            write_text(path, "")
        elif self.ctx.is_main:
            from distributed_training.records.metrics_reader import cut_at  # not in a new run

            cut_at(path, self.state.step)

    def start_epoch(self) -> None:
        """Start the progress bar of the epoch's remaining steps, and the clock."""
        state = self.state
        done = steps_of(state.position, state.global_batch)
        remaining = steps_of(state.num_sequences - state.position, state.global_batch)
        batches = done + min(remaining, state.total_steps - state.step)
        bar = console.bar(f"Epoch {state.epoch}", batches, done=done)
        self._epoch = Epoch(state.epoch, done, batches, bar)
        self.meter.pause()

    def log_step(
        self,
        loss: torch.Tensor,
        lr: float,
        grad_norm: torch.Tensor | float | None,
        tokens: torch.Tensor,
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
        epoch, state = self._epoch, self.state
        assert epoch is not None  # `start_epoch` comes first
        self._receive()  # the kernels of this step are launched, so the GPU does not become idle
        self.meter.end_step()
        if self.trace:
            self.trace.step()
            self.meter.pause()
        batch = epoch.count_step()
        numbers: Numbers = {"step": state.step, "epoch": epoch.number}
        numbers |= {"loss": loss.detach().clone(), "lr": lr, "grad_norm": grad_norm}
        self._pending.append({**numbers, "tokens": tokens, "samples": state.step_samples})
        is_logged = batch % self.options.steps == 0 or epoch.is_complete
        # On a CPU no kernel runs asynchronously, so reading every loss costs nothing.
        reads_now = epoch.is_complete or self.ctx.device.type == "cpu"
        if is_logged or reads_now:
            self._send(f"Batch {batch}/{epoch.batches}" if is_logged else None)
        if reads_now:
            self._receive()
        if self.ctx.simulated:
            console.print0(f"Step {state.step}/{state.total_steps} of the memory simulation")
        if state.last_loss is not None and self._rate:
            text = f"loss {state.last_loss:.3f}, lr {lr:.1e}, {self._rate:,.0f} tok/s"
            epoch.bar.set_postfix_str(text, refresh=False)  # appears with the next refresh
        epoch.bar.update()
        if epoch.is_complete:
            self._print_mean(epoch)
            epoch.bar.close()
        self.meter.mark("data")  # logging is part of training: it delays the next step's data

    def log_skipped(self) -> None:
        """Record the optimizer step that `TrainState.skip` has just counted."""
        epoch, state = self._epoch, self.state
        assert epoch is not None  # `start_epoch` comes first
        self.flush()
        console.print0(
            f"⏭️  Step {state.step} skipped: the model is not trained on its "
            f"{state.step_samples} sequences"
        )
        epoch.count_step()
        epoch.bar.update()
        if epoch.is_complete:
            self._print_mean(epoch)
            epoch.bar.close()
        self.meter.pause()

    def _print_mean(self, epoch: Epoch) -> None:
        """Print the mean loss of an epoch that is complete."""
        state, losses = self.state, self._losses
        self._losses = []
        if losses and not self.options.streaming:
            steps_per_epoch = steps_of(state.num_sequences, state.global_batch)
            epochs = epoch.number + steps_of(state.total_steps - state.step, steps_per_epoch)
            mean = statistics.fmean(losses)
            console.print0(f"Epoch {epoch.number}/{epochs}, Average Loss: {mean:.4f}")

    def flush(self) -> None:
        """Log the steps so far, with the numbers that are on the device; waits for the GPU."""
        if self._pending:
            self._send()
        self._receive()

    def _send(self, batch: str | None = None) -> None:
        """Copy the numbers of the pending steps to the host, together; do not wait for them."""
        steps, self._pending = self._pending, []
        tensors = [v for step in steps for v in step.values() if isinstance(v, torch.Tensor)]
        place = {"device": tensors[0].device, "dtype": torch.float64, "non_blocking": True}
        parts = [tensor.detach().to(**place).reshape(()) for tensor in tensors]
        self._sent = SentSteps(steps, PendingCopy(torch.stack(parts)), batch)

    def _receive(self) -> None:
        """Log the steps that were sent, if any; on a GPU this waits until they have ended."""
        if self._sent is None:
            return
        state, (steps, copy, batch), self._sent = self.state, self._sent, None
        numbers = iter(copy.read().tolist())
        for step, seconds in zip(steps, self.meter.read(), strict=True):
            record: dict = {k: next(numbers) if torch.is_tensor(v) else v for k, v in step.items()}
            state.add_seconds(seconds)
            if self.ctx.simulated:  # its losses mean nothing
                continue
            tokens, samples = int(record.pop("tokens")), record.pop("samples")
            loss, norm = record["loss"], record["grad_norm"]
            # In fp16 an overflow skips the update. DeepSpeed's norm is -1 for such gradients.
            usable = norm is None or 0 <= norm < math.inf or self.ctx.precision == "fp16"
            if not (math.isfinite(loss) and usable):
                raise gradients.not_finite(loss, record["step"])
            self._losses.append(loss)
            self.work.append((samples, tokens))
            state.add_step(loss, tokens)
            self._rate = tokens / seconds if seconds else None
            self._log({**record, "tokens_per_second": self._rate, "seconds": seconds})
            if batch and step is steps[-1]:
                place = f"Epoch {step['epoch']} | {batch}"
                console.print0(f"{place} | Loss: {loss:.4f} | LR: {step['lr']:.2e}")

    def _log(self, record: dict) -> None:
        if self.trackers:
            self.trackers.log(record)
        if self.ctx.is_main:
            self.file.append(record)

    def start_evaluation(self) -> None:
        """Log the steps so far: wandb drops a step that is logged after a later one.

        Raises:
            TrainingError: see `log_step`; a model with a non-finite loss is not evaluated.
        """
        self.flush()
        self.meter.memory.begin("evaluation")

    def say_nothing_to_evaluate(self) -> None:
        """Print that an evaluation was due, and there are no validation sequences."""
        self.flush()
        console.warn(f"{NOTHING_TO_EVALUATE}.")

    def log_evaluation(self, loss: float) -> None:
        """Record an evaluation after the current step, and print whether it ends the run."""
        state, print0, perplexity = self.state, console.print0, perplexity_of(loss)
        bits = self.bits_per_byte(loss)
        shown = "" if bits is None else f" | Bits per byte: {bits:.4f}"
        print0(f"Evaluation | Loss: {loss:.4f} | Perplexity: {perplexity:.2f}{shown}")
        record = {"eval_loss": loss, "perplexity": perplexity, "bits_per_byte": bits}
        self._log({"step": state.step, **record})
        if state.stopped_early and state.best:
            print0(
                f"🛑 Stopped early: {state.patience} evaluations in a row no better than "
                f"that of step {state.best['step']}."
            )
        if not state.finished:  # else it is drawn at the end of the run
            self._draw_losses()

    def bits_per_byte(self, loss: float) -> float | None:
        """Return bits per byte of an evaluation; None if the bytes of its text are not known."""
        return bits_per_byte(loss, self.options.targets)

    def log_generated(self, generated: list[GeneratedText]) -> None:
        """Record the texts that were generated, and printed, after an evaluation."""
        self._log({"step": self.state.step, "generated": redact_value(generated)})

    def log_shares(self, record: JsonObject, text: str) -> None:
        """Record which sequences of a micro-batch each rank computes from now on, and print it."""
        self.flush()
        console.print0(text)
        if self.ctx.is_main:
            self.file.append(record)

    def close(self) -> None:
        """End the progress bar, and complete metrics.jsonl and the files of other tools."""
        if self._epoch is not None:
            self._epoch.bar.close()
        if self.trackers:
            self.trackers.close()
        if self.ctx.is_main:
            self.file.append()  # what did not fit on a full disk before
        self._draw_losses()
        for write in self.at_end:
            with errors_as_notices():
                write()

    def _draw_losses(self) -> None:
        if self.draw_losses:
            with errors_as_notices():
                self.draw_losses(self.file.path)


@contextlib.contextmanager
def errors_as_notices() -> Iterator[None]:
    """Print an error of files for other tools as a notice: training itself is not affected."""
    try:
        yield
    except Exception as error:
        console.warn(str(explain(error)))
