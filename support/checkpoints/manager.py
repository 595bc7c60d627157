"""Save and load checkpoints, in one format for all strategies and numbers of ranks.

docs/CHECKPOINTS.md lists the files of a checkpoint. They are written to a folder with a temporary
name and flushed to disk, the manifest last; then the folder is renamed. A piece records which
elements of which parameter it holds, but nothing about strategies or ranks, so that any strategy on
any number of ranks can load it.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from support import console
from support.checkpoints import format as files
from support.checkpoints.find import (
    FoundCheckpoint,
    find_checkpoint,
    refuse_other_run,
    report_changes,
    verify,
)
from support.checkpoints.saving import PieceWriter, write_shards
from support.checkpoints.signature import run_signature
from support.cluster.context import DistContext
from support.data.opening import Datasets
from support.errors import FirstError, OutOfMemory, TrainingError, explain, redact_value
from support.files import atomic
from support.files.json_types import JsonObject
from support.files.safetensors_writer import save_file
from support.model.export import TrainedModel
from support.model.spec import ModelSpec
from support.model.weights import persistent_buffers
from support.settings.output import OutputSettings
from support.settings.settings import Settings
from support.strategies import gradients
from support.strategies.objects import TrainingObjects
from support.strategies.optimizer_shards import ShardedState
from support.train_state import NEW_RUN, TrainState

if TYPE_CHECKING:
    from torch import nn

    from support.data.streaming import Stream

GROUP_KEYS = ("lr", "betas", "eps", "weight_decay")  # saved of each parameter group, if it has them


@dataclass
class CheckpointManager:
    """Resumes a run, and saves its checkpoints when they are due. All ranks call the methods."""

    ctx: DistContext
    folder: Path  # of the checkpoints
    objects: TrainingObjects
    spec: ModelSpec
    output: OutputSettings
    keeps_best: bool  # --load_best_at_end: the checkpoint of the best evaluation is kept
    identity: JsonObject  # the run signature
    stream: Stream | None  # the training sequences of --streaming, whose position is saved
    _state: ShardedState | None  # of this rank; None with --eval_only
    seconds: list[float] = field(default_factory=list)  # how long training waited for each save
    best_is_loaded: bool = False  # whether `load_best` left the best weights in the model
    # Step of the checkpoint in `folder` that was saved last, or that this run continues.
    _saved_at: int = -1
    _loaded_from: Path | None = None  # the checkpoint whose weights were loaded last
    _stop: DelayedFlag = field(default_factory=lambda: DelayedFlag())

    @classmethod
    def create(
        cls,
        settings: Settings,
        ctx: DistContext,
        folder: Path,
        objects: TrainingObjects,
        spec: ModelSpec,
        datasets: Datasets,
    ) -> CheckpointManager:
        """Create the manager of a run, whose checkpoints are in `folder`."""
        return cls(
            ctx,
            folder,
            objects,
            spec,
            settings.output,
            settings.training.load_best_at_end,
            identity=run_signature(settings, ctx, spec, datasets.facts, objects.module),
            stream=datasets.stream,
            _state=None if settings.training.eval_only else objects.sharded_state(ctx.device),
        )

    @property
    def model(self) -> nn.Module:
        """The model, as wrapped by the strategy."""
        return self.objects.model

    @property
    def state(self) -> ShardedState:
        """The weights and optimizer states of this rank; --eval_only loads and saves none."""
        assert self._state is not None
        return self._state

    @property
    def may_save(self) -> bool:
        """Whether this run saves checkpoints."""
        return self.ctx.shares_output and self._state is not None and not self.output.no_save

    find = staticmethod(find_checkpoint)  # before the manager is created

    def resume(self, found: FoundCheckpoint | None) -> JsonObject:
        """Load a checkpoint (None: a new run) and return the counters; nothing on disk is changed.

        Raises:
            UserError: the checkpoint does not fit this run.
        """
        self.ctx.stop.end_if_requested()
        if found is None:
            return NEW_RUN
        path, manifest = found
        refuse_other_run(manifest["identity"], self.identity, self.output.resume_force)
        report_changes(manifest["identity"], self.identity)
        self._load_weights(path, manifest)
        counters, objects = manifest["counters"], self.objects
        # An imported checkpoint has no position.
        if self.stream is not None and (manifest["stream"] or counters["samples"]):
            self.stream.resume(manifest["stream"])
        gradients.load_scaler_state(manifest["scaling"], objects.scaler, objects.optimizer)
        if self.keeps_best and (best := counters["best"]):
            best_folder = files.step_folder(self.folder, best["step"])
            if not self.ctx.broadcast_from_rank0(best_folder.is_dir()):
                counters = {**counters, "best": None}
                console.warn(f"{best_folder} is missing: a later evaluation is the best.")
        dist.barrier()  # after it every rank has loaded its shards
        console.print0(f"▶️  Resumed from {path}")
        if path.resolve() == files.step_folder(self.folder, counters["step"]).resolve():
            self._saved_at = counters["step"]
        return counters

    def _load_weights(self, path: Path, manifest: JsonObject) -> None:
        """Load weights, optimizer states and buffers, after a check of all shapes."""
        from support.checkpoints.loading import check_shapes, read_shards

        check_shapes(path, manifest, self.state)
        if files.ADAFACTOR_STATES in manifest["files"]:
            from support.strategies import adafactor_states

            adafactor_states.write(self.state, load_file(path / files.ADAFACTOR_STATES))
        read_shards(path, manifest, self.state)
        saved = load_file(path / files.BUFFERS) if files.BUFFERS in manifest["files"] else {}
        for name, buffer in self.objects.module.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])
        self._loaded_from = path

    def take_over(self, best: dict | None, clean: bool) -> None:
        """Rename checkpoints after the resumed one, when all checks of the run have passed.

        Those are damaged, or of a replaced run. `clean` also removes what killed runs left. Call it
        before the first save.
        """
        if not self.ctx.is_main:
            return
        if clean:
            atomic.remove_leftovers(self.folder)
        for path in files.list_checkpoints(self.folder):
            if files.step_of(path) > self._saved_at:
                atomic.set_aside(path, f"aside-{path.name}")
        if best and self.keeps_best:
            self._mark("best", best["step"])

    def load_best(self, best: int, now: int) -> None:
        """Load the weights of the best evaluation's step; if damaged, those of `now` stay."""
        best_folder = files.step_folder(self.folder, best)
        if best == now:
            self.best_is_loaded, self._loaded_from = True, best_folder
            return
        manifest, problem = verify(best_folder, self.ctx)
        if problem:
            kept = "cannot be used, so the model keeps the last weights"
            console.warn(f"--load_best_at_end: {best_folder} {kept}: {problem}.")
            return
        self.objects.free_gathered()
        self._load_weights(best_folder, manifest)
        self.best_is_loaded = True
        console.print0(f"🏅 Loaded the weights of step {best}, the best evaluation")

    def is_due(self, state: TrainState) -> bool:
        """Whether to save a checkpoint of the current step: --save_every, --save_epochs."""
        every_steps = self.output.save_every and state.step % self.output.save_every == 0
        return bool(every_steps or (self.output.save_epochs and state.at_end_of_epoch))

    def stop_requested(self, stop: torch.Tensor) -> bool:
        """Whether to save and stop; `stop` is a scalar, above 0 if a rank received a signal."""
        return self.may_save and self._stop.read(stop)

    def after_evaluation(self, state: TrainState) -> None:
        """Save a checkpoint if this evaluation is the best so far."""
        if not (self.keeps_best and state.best and state.best["step"] == state.step):
            return
        self.save(state)
        if self.ctx.is_main:
            old = files.marked(self.folder, "best")
            self._mark("best", state.step)
            # With regular saves --keep_last decides which checkpoints are removed.
            saves_regularly = self.output.save_every or self.output.save_epochs
            if old not in ("", files.marked(self.folder, "best")) and not saves_regularly:
                shutil.rmtree(self.folder / old, ignore_errors=True)

    def save_before_stop(self, state: TrainState) -> None:
        """Save a checkpoint because of a stop signal, or raise a TrainingError."""
        if not self.may_save:
            raise TrainingError("Stopped by a signal, without a checkpoint.")
        self.save(state)

    def _mark(self, mark: str, step: int) -> None:
        name = files.step_folder(self.folder, step).name
        atomic.write_text(self.folder / mark, f"{name}\n")

    def save(self, state: TrainState) -> None:
        """Save a checkpoint of the current step, unless there is one; it is on disk afterwards.

        Raises:
            TrainingError: it cannot be written. All ranks raise it, and nothing unfinished remains.
        """
        if state.step == self._saved_at:
            return
        started, final = time.monotonic(), files.step_folder(self.folder, state.step)
        with console.bar("Saving a checkpoint", unit=""):
            self._write(final, self._manifest(state.counters()))
        self._saved_at = state.step
        self.seconds.append(time.monotonic() - started)
        console.print0(f"💾 {final} ({self.seconds[-1]:.1f} s)")

    def _manifest(self, counters: JsonObject) -> JsonObject:
        """Return the manifest without the entries about files and pieces."""
        objects, state = self.objects, self.state
        return {
            "counters": counters,
            "scaling": gradients.scaler_state(objects.scaler, objects.optimizer),
            "identity": redact_value(self.identity),
            "lr_scheduler": {},  # --lr_scheduler depends on the step only
            "stream": None if self.stream is None else self.stream.progress(),
            "groups": [
                {key: group[key] for key in GROUP_KEYS if key in group}
                for group in state.base.param_groups
            ],
            "optimizer": state.family,
            "adam_step": state.adam_step,
            "shapes": {name: list(shape) for name, shape in state.shapes.items()},
        }

    def _write(self, final: Path, manifest: JsonObject) -> None:
        """Write a checkpoint to the folder `final`."""
        ctx, errors = self.ctx, FirstError()
        unfinished = self.folder / f"{atomic.PARTIAL}{final.name}"
        if ctx.is_main:
            atomic.remove(unfinished)
            errors.attempt(unfinished.mkdir, 0o777, True)
        dist.barrier()
        writer = PieceWriter(unfinished, ctx.rank)
        errors.attempt(write_shards, writer, self.state, ctx.world_size)
        if errors.error is not None and isinstance(explain(errors.error), OutOfMemory):
            raise errors.error  # its report has remedies; it ends the other ranks
        ranks = ctx.all_gather((writer.pieces, writer.files, str(errors)))
        failed = next((f"{error} [rank {r}]" for r, (_, _, error) in enumerate(ranks) if error), "")
        if ctx.is_main:
            if not failed:
                manifest["pieces"] = [piece for pieces, _, _ in ranks for piece in pieces]
                manifest["files"] = {name: f for _, entry, _ in ranks for name, f in entry.items()}
                errors.attempt(self._complete, unfinished, final, manifest)
                failed = str(errors)
            atomic.remove(unfinished)  # it exists after an error only
        if failed := ctx.broadcast_from_rank0(failed):
            raise TrainingError(f"The checkpoint {final} could not be written: {failed}")

    def _complete(self, unfinished: Path, final: Path, manifest: JsonObject) -> None:
        """Write the model's description and the manifest, rename the folder, remove old ones."""
        self.spec.describe(unfinished / "model")
        buffers = {} if self.spec.lora else persistent_buffers(self.objects.module)
        states: dict[str, torch.Tensor] = {}
        if self.state.family == "adafactor":
            from support.strategies import adafactor_states

            states = adafactor_states.read(self.state)
        for tensors, name in ((buffers, files.BUFFERS), (states, files.ADAFACTOR_STATES)):
            if tensors:
                on_host = {key: t.detach().cpu().clone() for key, t in tensors.items()}
                save_file(on_host, unfinished / name)
        for path in sorted(unfinished.rglob("*")):
            name = path.relative_to(unfinished).as_posix()
            if path.is_file() and name not in manifest["files"]:
                manifest["files"][name] = files.file_entry(path)
        files.write_manifest(unfinished, manifest)
        atomic.sync_tree(unfinished / "model")
        atomic.sync(unfinished)
        os.replace(unfinished, final)
        if self.output.keep_last:
            for old in files.list_checkpoints(self.folder)[self.output.keep_last :]:
                if old.name != files.marked(self.folder, "best"):
                    shutil.rmtree(old, ignore_errors=True)
        try:  # the checkpoint is complete, also if the disk is full now
            atomic.sync(self.folder)
            atomic.sync(self.folder.parent)
            self._mark("latest", files.step_of(final))  # for users only
        except OSError as error:
            console.warn(f"checkpoints/latest cannot be written: {error.strerror}.")

    def trained_model(self, state: TrainState | None) -> TrainedModel:
        """Return what an export needs; `state` is None for a completed run."""
        keep = partial(self._keep_weights, state)
        parts = (self.ctx, self.spec, self.objects, self._state, self.identity)
        return TrainedModel(*parts, self.best_is_loaded, keep)

    def _keep_weights(self, state: TrainState | None) -> Path | None:
        """Return a checkpoint with the weights of a model whose export failed, or None.

        One is saved if necessary, also with --no_save.
        """
        if self.best_is_loaded or state is None:
            return self._loaded_from
        try:
            self.save(state)
        except TrainingError as error:
            console.warn(str(error))
            return None
        return files.step_folder(self.folder, state.step)


class DelayedFlag:
    """Reader of a flag on the device; the host waits for the previous step, not for this one."""

    def __init__(self) -> None:
        self._previous: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def read(self, flag: torch.Tensor) -> bool:
        """Return whether a scalar tensor is above 0; on a GPU, the tensor of the previous call."""
        if not flag.is_cuda:
            return flag.item() > 0
        previous, copied = self._previous, torch.cuda.Event()
        self._previous = torch.empty((), pin_memory=True).copy_(flag, non_blocking=True), copied
        copied.record()
        if previous is None:
            return False
        previous[1].synchronize()
        return previous[0].item() > 0
