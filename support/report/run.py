"""A run from its output folder to the exported model: results.json, metrics, export, sample."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from support.checkpoints.manager import CheckpointManager
from support.cli.arguments import Arguments
from support.cluster.context import DistContext
from support.cluster.failures import Restart
from support.cluster.launch import restart_values
from support.cluster.tuning import keep_freed_memory
from support.data.batches import total_steps
from support.errors import Preempted, UserError
from support.files import atomic
from support.memory.measure import MemoryByPhase
from support.model import export
from support.model.resolve import ModelSpec
from support.report import profiling, summary
from support.report.metrics_log import MetricsLogger, errors_as_notices
from support.report.results import facts_at_start, new_output_dir
from support.report.step_meter import create_meter
from support.train_state import TrainingObjects, TrainState
from support.units import human_count

if TYPE_CHECKING:
    from support.data.chat import Prompt


class Run:
    """A run: its output folder, results.json, measurements and export. All ranks call the methods.

    results.json is written at the start with the status "running", and again at the end. With
    --resume an earlier run's file is kept until this run has loaded its checkpoint.
    """

    target: export.Target  # where the model is exported to
    memory: MemoryByPhase  # after each phase of the run
    metrics: MetricsLogger  # from `start_training` on, as the manager
    manager: CheckpointManager
    _snapshot: profiling.MemorySnapshot | None = None
    _repository: str | None = None  # on the hub, to which the export is pushed (rank 0)

    def __init__(self, ctx: DistContext, folder: Path, facts: dict):
        self.ctx, self.folder = ctx, folder
        self.path, self.facts = folder / "results.json", facts
        self.before: dict | None = None  # the earlier run's results.json, on every rank
        self.kept = False  # whether the file is still the earlier run's

    @classmethod
    def open(cls, args: Arguments, ctx: DistContext) -> Run:
        """Create and lock the output folder, write results.json, start to record memory."""
        summary.say_setup(ctx)
        run = cls(ctx, new_output_dir(args, ctx), facts_at_start(args, ctx))
        if ctx.is_main:
            run.before = read_results(run.path)
            run.kept = args.resume is not None and run.before is not None
            if run.before is None and os.path.lexists(run.path):
                aside = atomic.set_aside(run.path, f"{run.path.name}.damaged")
                ctx.console.warn(f"{run.path} is damaged: ignored, and renamed to {aside.name}.")
            if not run.kept:
                # Before the other ranks continue: if one fails, the file must be this run's.
                run._begin()
        run.before, run.kept, run.facts["started_at"] = ctx.broadcast_from_rank0(
            (run.before, run.kept, run.facts["started_at"])
        )
        ctx.failures.on_failure.append(run.fail)
        from support.strategies.requirements import check_requirements

        check_requirements(args)  # after it, because results.json tells why a run is skipped
        run.target = export.target_of(args, run.folder, run.before)
        if args.push_to_hub:
            from support.model.push import open_repository

            run._repository = open_repository(args, run.folder, ctx)
        memory = run.memory = MemoryByPhase(ctx.device)
        ctx.hang.folder, ctx.hang.doing = run.folder, lambda: memory.doing
        ctx.failures.memory_facts.append(memory.describe)
        if args.memory_snapshot:
            run._snapshot = profiling.MemorySnapshot(args.memory_snapshot, ctx)
        return run

    # ---------------------------------------------------------------------------- results.json

    @property
    def was_complete(self) -> bool:
        """Whether the earlier run, whose file is kept, had completed."""
        return self.kept and self.before is not None and self.before["status"] == "completed"

    def update(self, **facts: Any) -> None:
        """Add or replace facts; they are written with the next status."""
        self.facts.update(facts)

    def _begin(self) -> None:
        """Write this run's file in place of an earlier run's (rank 0)."""
        self.kept = False
        if self.ctx.is_main and self.ctx.lock:
            atomic.remove_leftovers(self.folder)
        self._write()

    def _write(self) -> None:
        if self.ctx.is_main:
            write_json(self.path, self.facts)

    def fail(self, error: UserError) -> bool:
        """Write why the run failed, unless the file already says how it ended; for any rank.

        An earlier run's file that is still kept is not changed.

        Returns:
            False if another rank has already written an error.
        """
        if self.kept:
            return True
        with locked(self.folder):
            recorded = read_results(self.path)
            is_this_run = recorded and recorded.get("started_at") == self.facts["started_at"]
            if recorded and is_this_run and recorded["status"] != "running":
                return recorded["status"] in ("completed", "preempted")
            self.facts.update(status=error.status, reason=str(error), error_kind=error.kind)
            try:
                write_json(self.path, self.facts)
            except OSError:  # a full disk; a rename needs space for a second file
                write_json(self.path, self.facts, atomic.overwrite)
        return True

    # ---------------------------------------------------------------------------- before training

    def announce_model(self, args: Arguments, spec: ModelSpec) -> None:
        """Print what is trained, before the data is read."""

        def ways_to_fit() -> list[str]:
            from support.memory import fit

            return fit.ways_to_fit(args, self.ctx, spec)

        self.ctx.failures.remedies = ways_to_fit  # printed if memory runs out
        verb = "Evaluating" if args.eval_only else "Fine-tuning"
        verb = "Simulating the memory of" if self.ctx.simulated else verb
        base = spec.parameters - (spec.trainable if spec.lora else 0)
        self.ctx.console.print0(
            f"🚀 {verb} {args.model} ({human_count(base)} parameters)\n"
            f"📋 Strategy: {args.strategy.upper()}"
        )
        if not spec.chunked_loss:
            self.ctx.console.print0(
                "🔧 All logits of a batch are computed at once: this model changes them, or has "
                "adapters on its output layer"
            )

    def model_loaded(self, args: Arguments, spec: ModelSpec, dataset: dict, train_data) -> None:
        """Print and record the sizes of the model and of the data (`dataset`: its entry)."""
        self.memory.note("model_loaded")
        if args.generate:  # fails on an unusable prompt before the training
            self._prompt(args, spec, dataset)
        count = "a stream" if args.streaming else f"{train_data.num_sequences:,} samples"
        if args.eval_only:
            count = f"{dataset['validation'].get('blocks', 0):,} validation samples"
        print0, whole = self.ctx.console.print0, spec.parameters
        print0(f"✅ Model loaded: {whole:,} parameters ({whole / 1e6:.1f}M)")
        if spec.lora:
            trained = f"{spec.trainable:,} of {whole:,} parameters are trained"
            print0(f"🔧 LoRA: {trained} ({spec.trainable / whole:.2%})")
        if spec.lora and spec.random and not (args.merge_lora or args.no_export):
            self.ctx.console.warn(
                "The frozen weights are random, and the adapters cannot be used without them: "
                "--merge_lora exports both."
            )
        print0(f"✅ Dataset ready: {count if train_data.num_sequences else 'validation data only'}")
        self.update(
            parameters=whole,
            trainable_parameters=spec.trainable,
            seq_length=args.seq_length,
            dataset=dataset,
        )

    def model_wrapped(self) -> None:
        """Record the memory of the wrapped model."""
        self.memory.note("wrapped")
        keep_freed_memory(self.ctx.device)  # for the next step; see support/cluster/tuning.py

    def was_complete_before(self, args: Arguments, state: TrainState) -> bool:
        """Whether a resumed run has no step left to train.

        The newest checkpoint may be an older one if the earlier run stopped early with the same
        --early_stopping_patience, or if --load_best_at_end kept only the best weights.
        """
        if not self.was_complete or self.before is None:
            return False
        if state.finished:
            return True
        if args.resume != "":  # a checkpoint was named
            return False
        patience = args.early_stopping_patience
        stops_early = bool(patience) and self.before.get("stopped_early") == patience
        steps = total_steps(args, self.ctx.world_size, state.num_sequences)
        return stops_early or (args.load_best_at_end and self.before["steps"] >= steps)

    def start_training(
        self,
        args: Arguments,
        objects: TrainingObjects,
        manager: CheckpointManager,
        state: TrainState,
    ) -> None:
        """Replace the files of an earlier run, and start the metrics."""
        ctx = self.ctx
        meter = create_meter(args, ctx, objects, manager.spec, self.memory, state)
        metrics = MetricsLogger(args, ctx, self.folder, state, meter)
        self.metrics, self.manager = metrics, manager
        manager.around_save = metrics.outside_steps
        # All checks have passed: only now may files of an earlier run be changed.
        manager.take_over(state.best)
        self.update(run_signature=manager.identity)
        self._begin()
        if ctx.is_main:
            metrics.file.cut_at(state.step)
        ctx.hang.state = state
        # Adam's states exist from the first update on, so the second step may need the most memory.
        if values := restart_values(args, self.folder):
            useful = partial(self._smaller_batch_may_help, args, state)
            ctx.failures.restart = Restart(values, useful)
            # A rank may run out of memory while another still starts a tracker or removes files.
            dist.barrier()
        training = f"Training: steps {state.step + 1} to {state.total_steps}"
        ctx.console.print0(f"⏳ {'Evaluating' if args.eval_only else training}")

    def _smaller_batch_may_help(self, args: Arguments, state: TrainState) -> bool:
        """Whether a new start with smaller micro-batches may help after memory ran out."""
        own_batch = args.eval_batch_size and self.memory.doing == "evaluation"
        return state.step < state.first_step + 2 and not self.manager.seconds and not own_batch

    # ----------------------------------------------------------------------------- after training

    def preempt(self, state: TrainState) -> NoReturn:
        """Save a checkpoint and end the run, because a rank received a stop signal.

        Raises:
            Preempted: the checkpoint is complete.
            TrainingError: this run saves no checkpoints, or the checkpoint cannot be written.
        """
        self.manager.save_before_stop(state)
        reason = "stopped by a signal; a checkpoint was saved"
        self.update(status="preempted", reason=reason, **summary.progress(state.counters()))
        self._write()
        self.ctx.console.print0(
            f"⏸️  Stopped by a signal after step {state.step} of {state.total_steps}: "
            "resume with --resume"
        )
        self._close()
        raise Preempted(self.manager.model)

    def finish(self, args: Arguments, state: TrainState, eval_loss: float | None, casting) -> None:
        """Summarize the run, export the model, and print a sample of its text.

        Raises:
            TrainingError: the export failed; the message says where the trained weights are.
        """
        self.memory.note("trained")
        ctx, manager = self.ctx, self.manager
        ctx.hang.state = ctx.failures.restart = None
        if manager.objects.stream is not None:
            self.update(dataset=manager.objects.stream.summary())
        if args.load_best_at_end and state.best:
            manager.load_best(state.best["step"], state.step)
        elif args.load_best_at_end:
            ctx.console.warn("--load_best_at_end: no evaluation gave a finite loss: last weights.")
        self.update(checkpoint_seconds=manager.seconds)
        self.update(**summary.summarize(args, ctx, manager.spec, self.metrics, state, eval_loss))
        summary.say_results(ctx, self.facts, args)
        self._export(args, manager, state, casting)
        self._close(self.facts.get("sample"))
        summary.say_files(ctx, self.path)

    def finish_completed_run(
        self, args: Arguments, manager: CheckpointManager, state: TrainState, casting
    ) -> None:
        """Finish a resumed run that was already complete: export and generate what is missing."""
        self.ctx.console.print0("✅ The run was already complete.")
        self.update(**(self.before or {}))
        if args.load_best_at_end and self.facts.get("best_step"):
            manager.load_best(self.facts["best_step"], state.step)
        elif state.step < self.facts["steps"]:
            self.ctx.console.warn(
                "The last weights are in no checkpoint: nothing is exported, generated or pushed."
            )
            return
        self._export(args, manager, None, casting)

    def _export(
        self, args: Arguments, manager: CheckpointManager, state: TrainState | None, casting
    ) -> None:
        """Export and generate if requested and missing; `state` is None if nothing was trained."""
        folder = export.finish(manager, self, self.target, args, state)
        if args.generate:
            from support.model.generate import generate

            prompt = self._prompt(args, manager.spec, self.facts.get("dataset") or {})
            sample = generate(manager.model, casting, manager.spec, prompt, args.seed, self.ctx)
            self.update(sample=sample)
        if folder and args.push_to_hub:
            from support.model.push import push

            self.update(push=push(self._repository, folder, self.ctx))
        self.ctx.stop.ignore()  # the run is complete
        self.complete()

    def complete(self) -> None:
        """Write the final results (rank 0)."""
        self.update(status="completed")
        self._write()

    def _close(self, sample: str | None = None) -> None:
        """Finish the files of other tools."""
        self.metrics.close(sample)
        if self._snapshot:
            with errors_as_notices(self.ctx):
                self.ctx.console.print0(self._snapshot.write())

    @staticmethod
    def _prompt(args: Arguments, spec: ModelSpec, dataset: dict) -> Prompt:
        """Return the prompt of --generate: in the chat template if conversations were trained.

        Base models have a chat template, too, so an evaluation only is the other case that uses it.
        """
        from support.data.chat import prompt_of

        kind = dataset.get("kind")  # None before a stream's first row
        as_chat = kind == "chat" or (args.eval_only and kind != "pair")
        return prompt_of(args.generate or "", spec.tokenizer, as_chat)


def write_json(path: Path, facts: dict, write=atomic.write_text) -> None:
    """Write results.json; NaN and infinity, which JSON does not have, as null."""
    write(path, json.dumps(atomic.only_finite(facts), indent=2) + "\n")


def read_results(path: Path) -> dict | None:
    """Return the results.json of an earlier run; None if there is none or it is damaged."""
    try:
        results = atomic.read_json(path)
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(results, dict) or not isinstance(results.get("status"), str):
        return None
    return None if results["status"] == "completed" and "steps" not in results else results


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, so that one process writes at a time, if the disk supports locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
