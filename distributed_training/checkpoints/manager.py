"""Save and load checkpoints, in one format for all strategies and numbers of ranks.

docs/CHECKPOINTS.md lists the files of a checkpoint. A thread writes them from a copy of the states
to a folder with a temporary name and flushes them to disk, the manifest last; then it renames the
folder. A piece records which elements of which parameter it holds, but nothing about strategies or
ranks, so that any strategy on any number of ranks can load it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distributed_training import console
from distributed_training.checkpoints import signature
from distributed_training.checkpoints.contents import Contents
from distributed_training.checkpoints.folder import CheckpointFolder
from distributed_training.data.opening import Datasets
from distributed_training.errors import TrainingError
from distributed_training.files.json_types import JsonObject
from distributed_training.model.spec import ModelSpec
from distributed_training.model.trained_model import TrainedModel
from distributed_training.pending_copy import PendingCopy
from distributed_training.ranks.context import DistContext
from distributed_training.settings.output import OutputSettings
from distributed_training.settings.settings import Settings
from distributed_training.strategies.objects import TrainingObjects
from distributed_training.train_state import NEW_RUN, TrainState

if TYPE_CHECKING:
    from distributed_training.checkpoints.find import FoundCheckpoint
    from distributed_training.checkpoints.saver import Saver


@dataclass
class CheckpointManager:
    """Resumes a run, and saves its checkpoints when they are due. All ranks call the methods."""

    ctx: DistContext
    folder: CheckpointFolder
    contents: Contents
    output: OutputSettings
    keeps_best: bool  # --load_best_at_end: the checkpoint of the best evaluation is kept
    identity: JsonObject  # the run signature
    seconds: list[float] = field(default_factory=list)  # how long training waited for each save
    best_is_loaded: bool = False  # whether `load_best` left the best weights in the model
    # Step of the checkpoint in `folder` that was saved last, or that this run continues.
    _saved_at: int = -1
    _best_at: Path | None = None  # the best checkpoint of a run that continues from another folder
    _loaded_from: Path | None = None  # the checkpoint whose weights were loaded last
    _stop: PendingCopy | None = None  # the stop flag of the step before
    _saver: Saver | None = None  # from the first save on

    @classmethod
    def create(
        cls,
        settings: Settings,
        ctx: DistContext,
        folder: CheckpointFolder,
        objects: TrainingObjects,
        spec: ModelSpec,
        datasets: Datasets,
    ) -> CheckpointManager:
        """Create the manager of a run."""
        training, output = settings.training, settings.output
        identity = signature.run_signature(settings, ctx, spec, datasets, objects.module)
        if training.load_best_at_end:  # before the training, during which the files may change
            from distributed_training.checkpoints import other_runs, verify  # noqa: F401
        sharded = None if training.eval_only else objects.sharded_state(ctx.device)
        if sharded and not output.no_save:  # a signal may save at any step
            from distributed_training.checkpoints import saver  # noqa: F401
        return cls(
            ctx,
            folder,
            Contents(objects, spec, datasets, sharded),
            output,
            training.load_best_at_end,
            identity,
        )

    @property
    def objects(self) -> TrainingObjects:
        """The model as wrapped by the strategy, the optimizer and the loss scaler."""
        return self.contents.objects

    @property
    def spec(self) -> ModelSpec:
        """The model's configuration and tokenizer."""
        return self.contents.spec

    @property
    def may_save(self) -> bool:
        """Whether this run saves checkpoints."""
        return (
            self.folder.is_shared and self.contents.sharded is not None and not self.output.no_save
        )

    @property
    def continues_folder(self) -> bool:
        """Whether this run continues the one in its output folder, and not in another one."""
        return self._saved_at >= 0 and self._best_at is None

    def resume(self, found: FoundCheckpoint | None) -> JsonObject:
        """Load a checkpoint (None: a new run) and return the counters; nothing on disk is changed.

        Raises:
            UserError: the checkpoint does not fit this run.
        """
        self.ctx.stop.end_if_requested()
        if found is None:
            return NEW_RUN
        path, manifest = found
        from distributed_training.checkpoints import best, other_runs  # only a run that resumes

        saved_by, forced = manifest["identity"], self.output.resume_force
        other_runs.refuse_other_run(saved_by, self.identity, forced)
        other_runs.report_changes(saved_by, self.identity)
        self._load_weights(path, manifest)
        self.contents.load_progress(manifest)
        evaluation, best_at = best.best_of(found, self.identity, self.keeps_best, self.ctx)
        counters = {**manifest["counters"], "best": evaluation}
        dist.barrier()  # after it every rank has loaded its shards
        console.print0(f"▶️  Resumed from {path}")
        if path.resolve() == self.folder.of_step(counters["step"]).resolve():
            self._saved_at = counters["step"]
        elif self.keeps_best and evaluation:
            self._best_at = best_at
        return counters

    def _verified(self, folder: Path) -> tuple[JsonObject, str]:
        """Return the manifest of a checkpoint, and what is wrong with it or ""; see `verify`."""
        from distributed_training.checkpoints import other_runs, verify  # most runs load none

        manifest, problem = verify.verify(folder, self.ctx)
        return manifest, problem or other_runs.other_weights(manifest["identity"], self.identity)

    def _load_weights(self, path: Path, manifest: JsonObject) -> None:
        self.contents.load_weights(path, manifest)
        self._loaded_from = path

    def take_over(self, state: TrainState, clean: bool) -> None:
        """Rename checkpoints after the resumed one, when all checks of the run have passed.

        Those are damaged, or of a replaced run. `clean` also removes what killed runs left. Call it
        before the first save.
        """
        best = state.best if self.keeps_best else None
        if self.ctx.is_main:
            if clean:
                self.folder.remove_leftovers()
            if best and self._best_at:
                from distributed_training.checkpoints.best import take_over  # of another folder

                take_over(self._best_at, best["step"], self.folder)
            else:
                self.folder.set_aside_after(self._saved_at)
            if best:
                self.folder.mark("best", best["step"])
        if best and self._best_at:  # a copy to another disk may take longer than a collective may
            self.ctx.once_per_node("best checkpoint", lambda: None)
            if best["step"] == state.step:
                self._saved_at = state.step

    def load_best(self, best: int, now: int) -> None:
        """Load the weights of the best evaluation's step; if damaged, those of `now` stay."""
        self.finish_saving()
        best_folder = self.folder.of_step(best)
        if best == now:
            self.best_is_loaded, self._loaded_from = True, best_folder
            return
        manifest, problem = self._verified(best_folder)
        if problem:
            kept = "cannot be used, so the model keeps the last weights"
            console.warn(f"--load_best_at_end: {best_folder} {kept}: {problem}.")
            return
        self.objects.free_gathered()
        self._load_weights(best_folder, manifest)
        self.best_is_loaded = True
        console.print0(f"🏅 Loaded the weights of step {best}, the best evaluation")

    def load_saved(self, step: int) -> None:
        """Load the weights and optimizer states of a checkpoint that this process has saved."""
        self.finish_saving()
        folder = self.folder.of_step(step)
        manifest, problem = self._verified(folder)
        if problem:
            raise TrainingError(f"{folder} cannot be read again: {problem}.")
        self.objects.free_gathered()
        self._load_weights(folder, manifest)

    def is_due(self, state: TrainState) -> bool:
        """Whether to save a checkpoint of the current step: --save_every, --save_epochs."""
        every_steps = self.output.save_every and state.step % self.output.save_every == 0
        return bool(every_steps or (self.output.save_epochs and state.at_end_of_epoch))

    def stop_requested(self, stop: torch.Tensor) -> bool:
        """Whether to save and stop; `stop` is a scalar, above 0 if a rank received a signal."""
        if not self.may_save:
            return False
        previous, self._stop = self._stop, PendingCopy(stop)
        flag = previous if stop.is_cuda else self._stop  # the host does not wait for this step
        return flag is not None and flag.read().item() > 0

    def after_evaluation(self, state: TrainState) -> None:
        """Save a checkpoint if this evaluation is the best so far."""
        if not (self.keeps_best and state.best and state.best["step"] == state.step):
            return
        self.save(state)
        if self.ctx.is_main:
            # With regular saves --keep_last decides which checkpoints are removed.
            keeps_old = bool(self.output.save_every or self.output.save_epochs)
            mark = partial(self.folder.replace_best, state.step, keeps_old)
            if self._saver is None:  # the run was resumed at this step
                mark()
            else:
                self._saver.when_complete(mark)

    def save_before_stop(self, state: TrainState) -> None:
        """Save a checkpoint because of a stop signal, or raise a TrainingError."""
        if not self.may_save:
            raise TrainingError("Stopped by a signal, without a checkpoint.")
        self.save_now(state)

    def save(self, state: TrainState) -> None:
        """Save a checkpoint of the current step, unless there is one, while training continues.

        Raises:
            TrainingError: the one before cannot be written. Rank 0 raises it, which ends the other
                ranks. If this one cannot, `check_saving` does, and nothing unfinished remains.
        """
        if state.step != self._saved_at:
            self._save(state, background=True)

    def save_now(self, state: TrainState, announced: bool = True) -> None:
        """Save as `save`; the checkpoint is on disk afterwards.

        Args:
            announced: print its path and the time that it took.
        """
        if state.step != self._saved_at:
            self._save(state, False, announced)
        self.finish_saving()

    def _save(self, state: TrainState, background: bool, announced: bool = True) -> None:
        from distributed_training.checkpoints.saver import Saver  # not if nothing is saved

        if self._saver is None:
            self._saver = Saver(self.folder, self.contents, self.ctx)
        started = time.monotonic()
        with console.bar("Saving a checkpoint", unit=""):
            manifest = self.contents.manifest(state.counters(), self.identity)
            self._saver.save(state.step, manifest, background, announced)
        self._saved_at = state.step
        self.seconds.append(time.monotonic() - started)

    def check_saving(self) -> None:
        """Raise the TrainingError of a save that failed in the background (rank 0)."""
        if self._saver is not None:
            self._saver.check()

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on disk; see `save` for the errors."""
        if self._saver is not None:
            with console.bar("Saving a checkpoint", unit=""):
                self._saver.wait()

    @property
    def saves(self) -> JsonObject:
        """Number and seconds of the saves of this process, for results.json."""
        saver = self._saver
        return {
            "count": saver.count if saver else 0,
            "wait_seconds": saver.wait_seconds if saver else 0.0,
            "write_seconds": saver.write_seconds if saver else 0.0,
        }

    def trained_model(self, state: TrainState | None) -> TrainedModel:
        """Return what an export needs; `state` is None for a completed run."""
        return TrainedModel(
            ctx=self.ctx,
            spec=self.spec,
            objects=self.objects,
            sharded=self.contents.sharded,
            kind=self.contents.datasets.kind,
            identity=self.identity,
            is_best=self.best_is_loaded,
            keep_weights=partial(self._keep_weights, state),
        )

    def _keep_weights(self, state: TrainState | None) -> Path | None:
        """Return a checkpoint with the weights of a model whose export failed, or None.

        One is saved if necessary, also with --no_save.
        """
        if self.best_is_loaded or state is None:
            return self._loaded_from
        try:
            self.save_now(state)
        except TrainingError as error:
            console.warn(str(error))
            return None
        return self.folder.of_step(state.step)
