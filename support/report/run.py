"""A run from its output folder to the exported model: results.json, metrics.jsonl, console."""

from __future__ import annotations

import contextlib
import math
import shlex
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from support import console
from support.checkpoints.manager import CheckpointManager
from support.cluster.compiler import check_compile
from support.cluster.context import DistContext
from support.cluster.restart import Restart, restart_values
from support.cluster.tuning import keep_freed_memory
from support.data.batches import steps_of
from support.data.opening import NOTHING_TO_EVALUATE, Datasets
from support.errors import Preempted, UserError, explain
from support.files import atomic
from support.memory.measure import MemoryByPhase
from support.model import export
from support.model.resolve import ModelSpec
from support.report import results
from support.report.metrics_file import MetricsFile, draw_losses
from support.report.step_meter import StepMeter, create_meter
from support.settings.settings import Settings
from support.strategies import gradients
from support.strategies.objects import TrainingObjects
from support.train_state import TrainState
from support.units import human_count, perplexity_of


class Run:
    """A run: its output folder, results.json, metrics.jsonl. All ranks call the methods.

    results.json is written at the start with the status "running", and again at the end. With
    --resume an earlier run's file is kept until this run has loaded its checkpoint. The numbers of
    a step stay on the device until a line is logged.
    """

    target: export.Target  # where the model is exported to
    memory: MemoryByPhase  # after each phase of the run
    # From `start_training` on.
    settings: Settings
    state: TrainState
    manager: CheckpointManager
    meter: StepMeter  # measures the steps: time, memory, traffic
    file: MetricsFile
    trackers: Any = None  # of --report_to, on rank 0
    trace: torch.profiler.profile | None = None  # of --profile
    _repository: str | None = None  # on the hub, to which the export is pushed (rank 0)

    def __init__(self, ctx: DistContext, folder: Path, facts: dict):
        self.ctx, self.folder = ctx, folder
        self.path, self.facts = folder / "results.json", facts
        self._lock: Any = None  # on rank 0: prevents a second run from using the folder
        # The results.json of the run that --resume continues, while the file is still that run's.
        self.earlier: dict | None = None
        self._pending: list[dict] = []  # steps whose numbers are still on the device
        self._work: list[tuple[int, int]] = []  # sequences and tokens of each step of this process
        self._epoch = self._batch = self._batches = 0  # of the epoch: its number, and its steps
        self._losses: list[float] = []  # of the epoch's steps in this process
        self._rate: float | None = None  # tokens per second of the last step that was flushed
        self._bar: Any = None  # of the epoch
        self._at_end: list[Callable[[], object]] = []  # write the files of other tools

    # ----------------------------------------------------------------------------- before training

    @classmethod
    def open(cls, settings: Settings, ctx: DistContext) -> Run:
        """Create and lock the output folder, write results.json, start to record memory."""
        results.say_setup(ctx)
        folder, lock = results.new_output_dir(settings, ctx)
        run = cls(ctx, folder, results.facts_at_start(settings, ctx))
        run._lock = lock
        # The other ranks wait for rank 0 below: if one fails, the file must be this run's.
        found = results.read_results(run.path) if ctx.is_main else None
        if settings.output.resume is not None:
            run.earlier = found
        if ctx.is_main and run.earlier is None:
            run._begin()
        shared = (found, run.earlier, run.facts["started_at"])
        found, run.earlier, run.facts["started_at"] = ctx.broadcast_from_rank0(shared)
        ctx.monitor.record_with(run.fail)
        # From here on results.json tells why a run failed.
        if not (
            settings.training.eval_only and settings.parallelism.configured.whole_parameters
        ):  # else as under dp
            settings.parallelism.configured.check_requirements(
                settings.training.gradient_accumulation_steps
            )
        if settings.model.compile:
            check_compile(ctx.device.type)
        run.target = export.target_of(settings, run.folder, found)
        if settings.output.push_to_hub:
            from support.model.push import open_repository

            run._repository = open_repository(settings.output, run.folder, ctx)
        memory = run.memory = MemoryByPhase(ctx.device)
        ctx.monitor.report_hangs(run.folder, lambda: memory.doing)
        ctx.monitor.explain_memory_with(memory.describe)
        if settings.debug.memory_snapshot:
            from support.report.profiling import record_memory

            run._at_end.append(record_memory(settings.debug.memory_snapshot, ctx))
        return run

    def announce_model(self, settings: Settings, spec: ModelSpec) -> None:
        """Print what is trained, before the data is read."""
        from support.memory import fit

        self.ctx.monitor.advise_with(partial(fit.ways_to_fit, settings, self.ctx, spec))
        verb = "Evaluating" if settings.training.eval_only else "Fine-tuning"
        verb = "Simulating the memory of" if self.ctx.simulated else verb
        base = spec.parameters - (spec.trainable if spec.lora else 0)
        console.print0(
            f"{results.RULE}\n"
            f"🚀 {verb} {settings.model.model} ({human_count(base)} parameters)\n"
            f"📋 Strategy: {settings.parallelism.strategy.upper()}"
        )
        results.say_settings(settings, self.ctx)
        console.print0(results.RULE)

    def dataset_ready(self, settings: Settings, datasets: Datasets) -> None:
        """Print and record the size of the data."""
        self.facts["dataset"] = facts = datasets.facts
        count = (
            "a stream" if settings.data.streaming else f"{datasets.train.num_sequences:,} samples"
        )
        if settings.training.eval_only:
            count = f"{facts['validation'].get('blocks', 0):,} validation samples"
        ready = count if datasets.train.num_sequences else "validation data only"
        console.print0(f"✅ Dataset ready: {ready}")

    def model_loaded(self, settings: Settings, spec: ModelSpec) -> None:
        """Print and record the size of the model."""
        self.memory.note("model_loaded")
        if text := settings.output.generate:  # fails on an unusable prompt before the training
            from support.data.chat import prompt_for

            eval_only = settings.training.eval_only
            prompt_for(text, spec.tokenizer, self.facts["dataset"], eval_only)
        print0, whole = console.print0, spec.parameters
        print0(f"✅ Model loaded: {whole:,} parameters ({whole / 1e6:.1f}M)")
        if spec.lora:
            trained = f"{spec.trainable:,} of {whole:,} parameters are trained"
            print0(f"🔧 LoRA: {trained} ({spec.trainable / whole:.2%})")
            rows = f"The {spec.new_rows} new rows of the embedding" if spec.new_rows else ""
            if rows:
                console.warn(
                    f"{rows} are random, and LoRA freezes them: the new tokens are not learned. "
                    "A run without --lora_r trains all weights."
                )
            if spec.random and not (settings.model.merge_lora or settings.output.no_export):
                console.warn(
                    f"{rows or 'The frozen weights'} are random, and the adapters, which do not "
                    "contain them, cannot be used without them: --merge_lora exports both."
                )
        self.facts.update(
            parameters=whole, trainable_parameters=spec.trainable, seq_length=spec.seq_length
        )

    def start_training(
        self,
        settings: Settings,
        objects: TrainingObjects,
        manager: CheckpointManager,
        state: TrainState,
    ) -> None:
        """Replace the files of an earlier run, and start to measure steps."""
        ctx = self.ctx
        self.settings, self.manager, self.state = settings, manager, state
        self.meter = create_meter(settings, ctx, objects, manager.spec, self.memory, state)
        self.file = MetricsFile(self.folder / "metrics.jsonl")
        if settings.output.report_to and ctx.is_main:
            from support.report.trackers import Trackers

            length = manager.spec.seq_length
            self.trackers = Trackers(settings, self.folder, state.step, length)
        if settings.debug.profile:
            from support.report.profiling import start_trace

            self.trace, stop = start_trace(settings.debug.profile, ctx)
            self._at_end.insert(0, stop)
        # All checks have passed: only now may files of an earlier run be changed.
        manager.take_over(state.best, clean=self._lock is not None)
        self.facts["run_signature"] = manager.identity
        self._begin()
        if ctx.is_main:
            self.file.cut_at(state.step)
        if ctx.device.type == "cpu":
            from support.memory.fit import keeps_large_tensors

            keep_freed_memory(large=keeps_large_tensors(settings, ctx, manager.spec))
        # Adam's states exist from the first update on, so the second step may need the most memory.
        restart = None
        if settings.training.auto_micro_batch and settings.training.batch_size > 1:
            values = restart_values(settings, self.folder)
            restart = Restart(values, self._smaller_batch_may_help)
        ctx.monitor.training_starts(state, restart)
        if restart:
            # A rank may run out of memory while another still starts a tracker or removes files.
            dist.barrier()
        title = f"🚂 Starting Training ({objects.strategy.title})"
        title = "⏳ Starting the memory simulation" if ctx.simulated else title
        steps = f"{title}: steps {state.step + 1} to {state.total_steps}"
        console.print0("⏳ Evaluating" if settings.training.eval_only else steps)

    def _smaller_batch_may_help(self) -> bool:
        """Whether a new start with smaller micro-batches may help after memory ran out."""
        own_batch = self.settings.training.eval_batch_size and self.memory.doing == "evaluation"
        early = self.state.step < self.state.first_step + 2
        return early and not self.manager.seconds and not own_batch

    # -------------------------------------------------------------------------------- results.json

    @property
    def was_complete(self) -> bool:
        """Whether the run that --resume continues had completed."""
        return self.earlier is not None and self.earlier["status"] == "completed"

    def was_complete_at(self, settings: Settings, state: TrainState) -> bool:
        """Whether the earlier run had completed at this step: the last one, or its early stop."""
        if self.earlier is None or not self.was_complete:
            return False
        stopped = settings.training.early_stopping_patience and self.earlier.get("stopped_early")
        return state.finished or bool(stopped and self.earlier.get("steps") == state.step)

    def _begin(self) -> None:
        """Write this run's file in place of an earlier run's (rank 0)."""
        self.earlier = None
        if self._lock:
            atomic.remove_leftovers(self.folder)
        self._write()

    def _write(self) -> None:
        if self.ctx.is_main:
            atomic.write_text(self.path, results.as_json(self.facts))

    def fail(self, error: UserError) -> bool:
        """Write why the run failed, unless the file already says how it ended; for any rank.

        Returns:
            False if another rank has already written an error.
        """
        if self.earlier is not None or not (self.ctx.is_main or self.ctx.shares_output):
            return True  # rank 0 records the first failure of another host
        recorded = results.read_results(self.path) or {}
        is_this_run = recorded.get("started_at") == self.facts["started_at"]
        if is_this_run and recorded["status"] != "running":
            return recorded["status"] in ("completed", "preempted")
        self.facts.update(status=error.status, reason=str(error), error_kind=error.kind)
        text = results.as_json(self.facts)
        try:
            atomic.write_text(self.path, text)
        except OSError:  # a full disk has no room for a second file
            atomic.overwrite(self.path, text)
        return True

    # ----------------------------------------------------------------------------- during training

    def start_epoch(self) -> None:
        """Start the progress bar of the epoch's remaining steps, and the clock."""
        state = self.state
        self._epoch = state.epoch
        self._batch = steps_of(state.position, state.global_batch)
        remaining = steps_of(state.num_sequences - state.position, state.global_batch)
        self._batches = self._batch + min(remaining, state.total_steps - state.step)
        self._bar = console.bar(f"Epoch {self._epoch}", self._batches, done=self._batch)
        self.meter.pause()

    def after_backward(self) -> None:
        """Let the meter count memory; from the first step on, a stop signal waits for its end."""
        self.meter.after_backward()
        self.ctx.stop.defer(self.manager.may_save)

    def log_step(
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
            self.trace.step()
            self.meter.pause()
        state, batch = self.state, self._batch
        self._batch += 1
        record = {"step": state.step, "epoch": self._epoch, "loss": loss.detach().clone()}
        record |= {"lr": lr, "grad_norm": grad_norm}
        self._pending.append({**record, "tokens": tokens, "samples": state.step_samples})
        is_last = self._batch == self._batches
        is_logged = batch % self.settings.output.logging_steps == 0 or is_last
        # On a CPU no kernel runs asynchronously, so reading every loss costs nothing.
        if is_logged or self.ctx.device.type == "cpu":
            self.flush()
        if is_logged or self.ctx.simulated:
            self._print_step(batch, lr)
        if state.last_loss is not None and self._rate:
            text = f"loss {state.last_loss:.3f}, lr {lr:.1e}, {self._rate:,.0f} tok/s"
            self._bar.set_postfix_str(text, refresh=False)  # appears with the next refresh
        self._bar.update()
        if is_last:
            self._bar.close()
        self.meter.mark("data")  # logging is part of training: it delays the next step's data

    def _print_step(self, batch: int, lr: float) -> None:
        """Print one step, after the last step of an epoch also the epoch's mean loss."""
        state, print0 = self.state, console.print0
        if self.ctx.simulated:
            print0(f"Step {state.step}/{state.total_steps} of the memory simulation")
            return
        print0(
            f"Epoch {self._epoch} | Batch {batch}/{self._batches} | "
            f"Loss: {state.last_loss:.4f} | LR: {lr:.2e}"
        )
        if self._batch == self._batches:
            mean, self._losses = statistics.fmean(self._losses), []
            if not self.settings.data.streaming:
                steps_per_epoch = steps_of(state.num_sequences, state.global_batch)
                epochs = self._epoch + steps_of(state.total_steps - state.step, steps_per_epoch)
                print0(f"Epoch {self._epoch}/{epochs}, Average Loss: {mean:.4f}")

    def flush(self) -> None:
        """Copy the numbers of the steps so far to the host, and log them; waits for the GPU."""
        state = self.state
        pending, self._pending = self._pending, []
        seconds_of_steps = self.meter.read()
        for record, seconds in zip(copied_to_host(pending), seconds_of_steps, strict=True):
            state.training_seconds += seconds
            if self.ctx.simulated:  # its losses mean nothing
                continue
            tokens, samples = int(record.pop("tokens")), record.pop("samples")
            loss, norm = record["loss"], record["grad_norm"]
            # In fp16 an overflow skips the update. DeepSpeed's norm is -1 for such gradients.
            usable = norm is None or 0 <= norm < math.inf or self.ctx.precision == "fp16"
            if not (math.isfinite(loss) and usable):
                raise gradients.not_finite(loss, record["step"])
            self._losses.append(loss)
            self._work.append((samples, tokens))
            state.first_loss = loss if state.first_loss is None else state.first_loss
            state.last_loss = loss
            state.tokens += tokens
            self._rate = tokens / seconds if seconds else None
            self._log({**record, "tokens_per_second": self._rate, "seconds": seconds})

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
        self.memory.doing = "evaluation"

    def skip_evaluation(self) -> None:
        """Print that there are no validation sequences."""
        console.warn(f"{NOTHING_TO_EVALUATE}.")

    def log_evaluation(self, loss: float) -> None:
        """Record an evaluation after the current step, and print whether it ends the run."""
        state, print0, perplexity = self.state, console.print0, perplexity_of(loss)
        print0(f"Evaluation | Loss: {loss:.4f} | Perplexity: {perplexity:.2f}")
        self._log({"step": state.step, "eval_loss": loss, "perplexity": perplexity})
        if state.stopped_early and state.best:
            print0(
                f"🛑 Stopped early: {state.patience} evaluations in a row no better than "
                f"that of step {state.best['step']}."
            )
        if not state.finished:  # else it is drawn at the end of the run
            self._draw_losses()

    def save(self) -> None:
        """Save a checkpoint of the current step, which is excluded from the time of the steps."""
        self.flush()  # completes the counters
        self.manager.save(self.state)
        self.meter.pause()

    # ----------------------------------------------------------------------------- after training

    def preempt(self) -> NoReturn:
        """Save a checkpoint and end the run, because a rank received a stop signal.

        Raises:
            Preempted: the checkpoint is complete.
            TrainingError: this run saves no checkpoints, or the checkpoint cannot be written.
        """
        self.flush()
        self.manager.save_before_stop(self.state)
        reason = "stopped by a signal; a checkpoint was saved"
        self.facts.update(status="preempted", reason=reason, **self._progress())
        self._write()
        console.print0(
            f"⏸️  Stopped by a signal after step {self.state.step} of {self.state.total_steps}: "
            "resume with --resume"
        )
        self._close()
        raise Preempted(self.manager.model)

    def finish(self, eval_loss: float | None, casting) -> None:
        """Summarize the run, export the model, and print a sample of its text.

        Raises:
            TrainingError: the export failed; the message says where the trained weights are.
        """
        self.memory.note("trained")
        settings, ctx, manager, state = self.settings, self.ctx, self.manager, self.state
        ctx.monitor.training_ends()
        if manager.stream is not None:
            self.facts["dataset"] = manager.stream.summary()
        if settings.training.load_best_at_end and state.best:
            manager.load_best(state.best["step"], state.step)
        elif settings.training.load_best_at_end:
            console.warn("--load_best_at_end: no evaluation gave a finite loss: last weights.")
        self.flush()
        best = state.best or {}
        self.facts.update(
            checkpoint_seconds=manager.seconds,
            **self._progress(),
            eval_loss=eval_loss,
            perplexity=None if eval_loss is None else perplexity_of(eval_loss),
            best_eval_loss=best.get("loss"),
            best_step=best.get("step"),
            stopped_early=state.patience if state.stopped_early else None,
            **results.measured(settings, ctx, manager.spec, self.meter, self._work),
        )
        results.say_results(ctx, self.facts, settings)
        self._export(settings, manager, state, casting)
        self._close()
        console.print0(f"📁 {self.path}")
        if not ctx.simulated:
            page = f"python scripts/report.py {shlex.quote(str(self.folder))}"
            console.print0(f"📊 A page with its curves: {page}")

    def finish_completed_run(
        self, settings: Settings, manager: CheckpointManager, state: TrainState, casting
    ) -> None:
        """Finish a resumed run that was already complete: export and generate what is missing."""
        console.print0("✅ The run was already complete.")
        self.facts.update(self.earlier or {})
        if settings.training.load_best_at_end and self.facts.get("best_step"):
            manager.load_best(self.facts["best_step"], state.step)
        self._export(settings, manager, None, casting)

    def _progress(self) -> dict:
        """Return the counters of the run under the keys of results.json."""
        state = self.state
        return {
            "steps": state.step,
            "samples": state.samples,
            "tokens": state.tokens,
            "training_seconds": state.training_seconds,
            "train_loss_first": state.first_loss,
            "train_loss_last": state.last_loss,
        }

    def _export(
        self, settings: Settings, manager: CheckpointManager, state: TrainState | None, casting
    ) -> None:
        """Export and generate if requested and missing; `state` is None if nothing was trained."""
        folder = export.finish(manager.trained_model(state), self, self.target, settings)
        if text := settings.output.generate:
            from support.data.chat import prompt_for
            from support.model.generate import generate

            tokenizer, dataset = manager.spec.tokenizer, self.facts.get("dataset") or {}
            prompt = prompt_for(text, tokenizer, dataset, settings.training.eval_only)
            sample = generate(
                manager.model, casting, manager.spec, prompt, settings.training.seed, self.ctx
            )
            self.facts["sample"] = sample
        if folder and settings.output.push_to_hub:
            from support.model.push import push

            self.facts["push"] = push(self._repository, folder, self.ctx)
        self.ctx.stop.ignore()  # the run is complete
        self.facts["status"] = "completed"
        self._write()

    def _close(self) -> None:
        """Finish the files of other tools."""
        if self._bar is not None:
            self._bar.close()
        if self.trackers:
            self.trackers.close()
        if self.ctx.is_main:
            self.file.append()  # what did not fit on a full disk before
        self._draw_losses()
        for write in self._at_end:
            with errors_as_notices():
                write()

    def _draw_losses(self) -> None:
        if self.ctx.is_main:
            with errors_as_notices():
                draw_losses(self.file.path)


def copied_to_host(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records with floats instead of scalar tensors, which are copied together.

    Reading one tensor after the other would wait for the GPU each time.
    """
    tensors = [v for record in records for v in record.values() if isinstance(v, torch.Tensor)]
    if not tensors:
        return records
    device = tensors[0].device
    parts = [tensor.detach().to(device, torch.float64).reshape(()) for tensor in tensors]
    copies = iter(torch.stack(parts).tolist())
    return [
        {key: next(copies) if isinstance(v, torch.Tensor) else v for key, v in record.items()}
        for record in records
    ]


@contextlib.contextmanager
def errors_as_notices() -> Iterator[None]:
    """Print an error of files for other tools as a notice: training itself is not affected."""
    try:
        yield
    except Exception as error:
        console.warn(str(explain(error)))
