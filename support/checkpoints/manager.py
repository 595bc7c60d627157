"""Save and load checkpoints, in one format for all strategies and numbers of ranks.

docs/CHECKPOINTS.md lists the files of a checkpoint. It is either complete or missing: it is written
to a folder with a temporary name, each file is flushed to disk, the manifest last, and the folder
is renamed. An interrupted save leaves the previous checkpoint as it was.

A piece records which elements of which parameter it holds, but nothing about strategies or ranks.
Any strategy on any number of ranks can therefore load the checkpoint of any other, and each rank
reads only the elements of its own shards.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from support.checkpoints.compatibility import refuse_other_run, report_changes, run_signature
from support.checkpoints.find import Found, check_optimizer, find_checkpoint, verify
from support.checkpoints.format import (
    ADAFACTOR_STATES,
    BUFFERS,
    MARKS,
    file_entry,
    list_checkpoints,
    marked,
    step_folder,
    step_of,
    write_manifest,
)
from support.checkpoints.tensors import PieceWriter, check_shapes, read_shards, write_shards
from support.cli.arguments import Arguments
from support.cluster.context import DistContext
from support.errors import FirstError, OutOfMemory, Preempted, TrainingError, UserError, explain
from support.files import atomic
from support.model.weights import persistent_buffers
from support.strategies import gradients
from support.strategies.optimizer_shards import PlainState, free_gathered_weights, sharded_state
from support.train_state import NEW_RUN, TrainingObjects, TrainState
from support.unwrap import unwrapped

GROUP_KEYS = ("lr", "betas", "eps", "weight_decay")  # saved of each parameter group, if it has them


class CheckpointManager:
    """Checkpoint manager of a run: resumes it, and saves checkpoints when they are due.

    Args:
        folder: the run's output folder.
        dataset: the dataset's entry in results.json.
    Attributes:
        identity: the run signature, see compatibility.run_signature.
        around_save: returns a context manager that is entered for each save. The run sets it to
            complete the counters before a save, and to exclude the save from the step times.
        seconds: for each save of this process, how long training waited for it.
        best_is_loaded: whether `load_best` left the best weights in the model.
    Raises:
        UserError: checkpoints are requested, but they do not support the optimizer.
    """

    find = staticmethod(find_checkpoint)

    def __init__(
        self,
        args: Arguments,
        ctx: DistContext,
        folder: Path,
        objects: TrainingObjects,
        spec,
        dataset: dict,
    ):
        self.args, self.ctx, self.folder = args, ctx, folder / "checkpoints"
        self.objects, self.spec = objects, spec
        self.identity = run_signature(args, ctx, spec, dataset, objects.model)
        self.model, self.module = objects.model, unwrapped(objects.model)
        self.state: Any = None  # the ShardedState of this rank; None with --eval_only
        if not args.eval_only:
            self.state = sharded_state(self.module, objects.optimizer, ctx.device)
        self.may_save = self._may_save()  # whether this run can write checkpoints
        self.around_save: Callable[[], AbstractContextManager] = nullcontext
        self.seconds: list[float] = []
        self.best_is_loaded = False
        self._stop = DelayedFlag()
        self._saved_at: int | None = None
        self._loaded_from: Path | None = None
        self._resumed_at = -1  # step of the checkpoint in `folder` that this run continues

    def _may_save(self) -> bool:
        if self.args.eval_only:
            return False
        if self.state.family is not None:
            return not self.args.no_save
        problem = "Checkpoints do not support the DeepSpeed file's optimizer"
        flags = ("save_every", "save_epochs", "load_best_at_end", "resume")
        if given := [flag for flag in flags if getattr(self.args, flag) not in (None, False)]:
            raise UserError(f"{problem}: use AdamW or --optim, or omit --{' and --'.join(given)}.")
        if not self.args.no_save:
            self.ctx.console.warn(f"{problem}: a signal will end this run without one.")
        return False

    # ------------------------------------------------------------------------------------- resuming

    def resume(self, found: Found | None) -> dict:
        """Load a checkpoint. Call it on every rank.

        Nothing on disk is changed, see `take_over`.

        Args:
            found: as `find_checkpoint` returned it; None for a new run.
        Returns:
            The checkpoint's counters, or those of a new run.
        Raises:
            UserError: the checkpoint does not fit this run.
            TrainingError: a file cannot be read.
        """
        if self.may_save:
            self.ctx.stop.defer()
        if found is None:
            return NEW_RUN
        path, manifest = found
        refuse_other_run(manifest["identity"], self.identity, self.args.resume_force)
        report_changes(manifest["identity"], self.identity, self.ctx)
        self._load_weights(path, manifest)
        self._load_other_states(manifest)
        counters = self._counters_of(manifest)
        dist.barrier()  # after it every rank has loaded its shards
        self.ctx.console.print0(f"▶️  Resumed from {path}")
        if path.resolve() == step_folder(self.folder, counters["step"]).resolve():
            self._saved_at = self._resumed_at = counters["step"]
        return counters

    def _load_weights(self, path: Path, manifest: dict) -> None:
        """Load weights, optimizer states and buffers, after a check of all shapes."""
        check_optimizer(path, manifest, self.state.family)
        check_shapes(path, manifest, self.state)
        saved = load_file(path / BUFFERS) if BUFFERS in manifest["files"] else {}
        buffers = {name: b for name, b in self.module.named_buffers() if name in saved}
        for name, buffer in buffers.items():
            if saved[name].shape != buffer.shape:
                raise UserError(
                    f"--resume {path}: the shape of the buffer {name} is {list(buffer.shape)} in "
                    f"this model, and {list(saved[name].shape)} in the checkpoint."
                )
        if ADAFACTOR_STATES in manifest["files"]:
            self.state.load_adafactor_states(load_file(path / ADAFACTOR_STATES))
        read_shards(path, manifest, self.state)
        for name, buffer in buffers.items():
            buffer.copy_(saved[name])
        self._loaded_from = path

    def _load_other_states(self, manifest: dict) -> None:
        """Load the states of the stream, the loss scaler and DeepSpeed's scheduler."""
        objects = self.objects
        # An imported checkpoint has no position, so its stream starts at the beginning.
        has_position = manifest["stream"] or manifest["counters"]["samples"]
        if objects.stream is not None and has_position:
            objects.stream.resume(manifest["stream"])
        gradients.load_scaler_state(manifest["scaling"], objects.scaler, objects.optimizer)
        # --lr_scheduler depends on the step only; a scheduler of a DeepSpeed file has a state.
        saved_schedule = manifest["lr_scheduler"]
        if self._scheduler and saved_schedule:
            self._scheduler.load_state_dict(saved_schedule)
            for group, values in zip(self.state.base.param_groups, manifest["groups"], strict=True):
                group["lr"] = values["lr"]
                if "betas" in values:  # not those of SGD
                    group["betas"] = tuple(values["betas"])
        elif self._scheduler or saved_schedule:
            new = "the DeepSpeed file's starts from the beginning"
            self.ctx.console.warn(
                "--resume: the learning rate's schedule changes: "
                f"{new if self._scheduler else '--lr_scheduler replaces that of a DeepSpeed file'}."
            )

    def _counters_of(self, manifest: dict) -> dict:
        """Return a checkpoint's counters, without a best evaluation whose checkpoint is missing."""
        counters, best = manifest["counters"], manifest["counters"]["best"]
        if not (best and self.args.load_best_at_end):
            return counters
        if self.ctx.broadcast_from_rank0(step_folder(self.folder, best["step"]).is_dir()):
            return counters
        self.ctx.console.warn(
            f"--load_best_at_end: the checkpoint of the best evaluation (step {best['step']}) is "
            f"not in {self.folder}. Only evaluations from here on are compared."
        )
        return {**counters, "best": None}

    @property
    def _scheduler(self):
        """The scheduler that a user's DeepSpeed file configures, or None."""
        return getattr(self.model, "lr_scheduler", None)

    def take_over(self, best: dict | None) -> None:
        """Prepare the folder of checkpoints for this run; rank 0 only, no-op on other ranks.

        Call it when all checks have passed, because it changes files of earlier runs. Checkpoints
        after the resumed one are renamed: they are damaged, or of a run that this one replaces.

        Raises:
            UserError: the folder's path exists but is no folder.
            OSError: the folder is not writable.
        """
        if not self.ctx.is_main:
            return
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise UserError(
                f"{self.folder} is not a folder, but checkpoints are saved there: rename it."
            )
        if self.ctx.lock:
            atomic.remove_leftovers(self.folder)
        for path in list_checkpoints(self.folder):
            if step_of(path) > self._resumed_at:
                atomic.set_aside(path, f"aside-{path.name}")
        for mark in MARKS:
            if os.path.lexists(self.folder / mark) and not marked(self.folder, mark):
                aside = atomic.set_aside(self.folder / mark, f"{mark}.damaged")
                self.ctx.console.warn(
                    f"{self.folder / mark} does not name a checkpoint. It was renamed to "
                    f"{aside.name} and is not used."
                )
        if best and self.args.load_best_at_end:
            name = step_folder(self.folder, best["step"]).name
            atomic.write_text(self.folder / "best", f"{name}\n")

    def load_best(self, best: int, now: int) -> None:
        """Load the weights of the best evaluation; call it on every rank, at the end of training.

        If that checkpoint is damaged or missing, the last weights stay, with a warning.

        Args:
            now: the step whose weights are loaded now.
        Raises:
            UserError: the checkpoint does not fit this model.
            TrainingError: a file cannot be read.
        """
        best_folder = step_folder(self.folder, best)
        if best == now:
            self.best_is_loaded, self._loaded_from = True, best_folder
            return
        manifest, problem = verify(best_folder, self.ctx)
        if problem:
            self.ctx.console.warn(
                f"--load_best_at_end: {best_folder} cannot be used, so the model keeps the last "
                f"weights: {problem}."
            )
            return
        free_gathered_weights(self.model)
        self._load_weights(best_folder, manifest)
        self.best_is_loaded = True
        self.ctx.console.print0(f"🏅 Loaded the weights of step {best}, the best evaluation")

    # --------------------------------------------------------------------------------------- saving

    def is_requested(self, stop: torch.Tensor) -> bool:
        """Whether to save and stop, because a rank received a stop signal.

        Args:
            stop: scalar tensor, above 0 if any rank received a stop signal; equal on all ranks.
        """
        return self.may_save and self._stop.read(stop)

    def after_evaluation(self, state: TrainState) -> None:
        """Save a checkpoint if this evaluation is the best so far; call it on every rank."""
        if not (self.args.load_best_at_end and state.best and state.best["step"] == state.step):
            return
        self.save(state)
        if self.ctx.is_main:
            old, new = marked(self.folder, "best"), step_folder(self.folder, state.step).name
            atomic.write_text(self.folder / "best", new + "\n")
            # With regular saves --keep_last decides which checkpoints are removed.
            saves_regularly = self.args.save_every or self.args.save_epochs
            if old not in ("", new) and not saves_regularly:
                shutil.rmtree(self.folder / old, ignore_errors=True)

    def save_before_stop(self, state: TrainState) -> Preempted:
        """Save a checkpoint because of a stop signal, and return the exception that ends the run.

        Raises:
            TrainingError: this run saves no checkpoints, or the checkpoint cannot be written.
        """
        if not self.may_save:
            raise TrainingError("Stopped by a signal, without a checkpoint.")
        self.save(state)
        return Preempted(self.model)

    def save(self, state: TrainState) -> None:
        """Save a checkpoint of the current step, unless there is one.

        Call it on every rank, between two steps. It returns when the checkpoint is on disk.

        Raises:
            TrainingError: the disk is full, or not writable. All ranks raise it together, and no
                unfinished folder remains.
        """
        if state.step == self._saved_at:
            return
        started, final = time.monotonic(), step_folder(self.folder, state.step)
        with self.around_save():
            with self.ctx.console.bar("Saving a checkpoint", unit=""):
                self._write(final, self._manifest(state.counters()))
            self._saved_at = state.step
            self.seconds.append(time.monotonic() - started)
            self.ctx.console.print0(f"💾 {final} ({self.seconds[-1]:.1f} s)")

    def _manifest(self, counters: dict) -> dict:
        """Return the manifest without the entries about files and pieces."""
        objects, state = self.objects, self.state
        return {
            "counters": counters,
            "scaling": gradients.scaler_state(objects.scaler, objects.optimizer),
            "identity": self.identity,
            "lr_scheduler": self._scheduler.state_dict() if self._scheduler else {},
            "stream": None if objects.stream is None else objects.stream.progress(),
            "groups": [
                {key: group[key] for key in GROUP_KEYS if key in group}
                for group in state.base.param_groups
            ],
            "optimizer": state.family,
            "adam_step": state.adam_step,
            "shapes": {name: list(shape) for name, shape in state.shapes.items()},
        }

    def _write(self, final: Path, manifest: dict) -> None:
        """Write a checkpoint to the folder `final`; every rank calls it."""
        ctx, errors = self.ctx, FirstError()
        unfinished = self.folder / f"{atomic.PARTIAL}{final.name}"
        if ctx.is_main:
            errors.attempt(_start_checkpoint, unfinished)
        dist.barrier()
        writer = PieceWriter(unfinished, ctx.rank)
        errors.attempt(write_shards, writer, self.state, ctx.world_size)
        if errors.error is not None and isinstance(explain(errors.error), OutOfMemory):
            raise errors.error  # ends the run with the facts on memory; the other ranks are ended
        ranks = ctx.all_gather((writer.pieces, writer.files, str(errors)))
        failed = next((f"{error} [rank {r}]" for r, (_, _, error) in enumerate(ranks) if error), "")
        if ctx.is_main:
            if not failed:
                manifest["pieces"] = [piece for pieces, _, _ in ranks for piece in pieces]
                manifest["files"] = {name: f for _, files, _ in ranks for name, f in files.items()}
                errors.attempt(self._complete, unfinished, final, manifest)
                failed = str(errors)
            atomic.remove(unfinished)  # it exists after an error only
        if failed := ctx.broadcast_from_rank0(failed):
            raise TrainingError(f"The checkpoint {final} could not be written: {failed}")
        if ctx.is_main:
            self._mark_latest(final)

    def _complete(self, unfinished: Path, final: Path, manifest: dict) -> None:
        """Write the model's description and the manifest, and rename the folder."""
        self.spec.describe(unfinished / "model")
        buffers = {} if self.spec.lora else persistent_buffers(self.module)
        states = self.state.adafactor_states() if isinstance(self.state, PlainState) else {}
        for tensors, name in ((buffers, BUFFERS), (states, ADAFACTOR_STATES)):
            if tensors:
                on_host = {key: t.detach().cpu().clone() for key, t in tensors.items()}
                save_file(on_host, unfinished / name)
        written = {path.relative_to(unfinished).as_posix(): path for path in unfinished.rglob("*")}
        for name in sorted(written.keys() - manifest["files"].keys()):
            if written[name].is_file():
                manifest["files"][name] = file_entry(written[name])
        write_manifest(unfinished, manifest)
        atomic.sync_tree(unfinished / "model")
        atomic.sync(unfinished)
        os.replace(unfinished, final)

    def _mark_latest(self, final: Path) -> None:
        """Name a complete checkpoint in `latest`, and remove old ones; an error is only reported.

        `find_checkpoint` does not read `latest`, so the checkpoint can be resumed without it.
        """
        try:
            atomic.sync(self.folder)
            atomic.sync(self.folder.parent)
            atomic.write_text(self.folder / "latest", final.name + "\n")
            atomic.sync(self.folder)
            _remove_old(self.folder, self.args.keep_last)
        except OSError as error:
            self.ctx.console.warn(
                f"The checkpoint {final} is complete, but {self.folder / 'latest'} could not be "
                f"updated ({error.strerror})."
            )

    def weights_kept(self, state: TrainState | None) -> Path | None:
        """Return a checkpoint with the model's present weights, and save one if necessary.

        Every rank calls it.

        Args:
            state: the run's counters; None for a run that was complete before it was resumed.
        Returns:
            The checkpoint's folder; None if there is none and none can be written.
        """
        if self.best_is_loaded or state is None:
            return self._loaded_from
        if not self.may_save:
            return None
        try:
            self.save(state)
        except TrainingError as error:
            self.ctx.console.warn(str(error))
            return None
        return step_folder(self.folder, state.step)


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


def saves_due(args: Arguments, before: dict, steps: int, blocks: int) -> int:
    """Return how many checkpoints a run will save until its end, if no signal stops it.

    Args:
        steps: optimizer steps of the whole run.
        blocks: sequences in an epoch.
    """
    if args.no_save or args.eval_only:
        return 0
    every = steps // args.save_every - before["step"] // args.save_every if args.save_every else 0
    epochs = max(0, (args.epochs or 1) - before["samples"] // blocks) if args.save_epochs else 0
    return max(0, every) + epochs + bool(args.load_best_at_end)


def _start_checkpoint(unfinished: Path) -> None:
    atomic.remove(unfinished)
    unfinished.mkdir(parents=True)


def _remove_old(folder: Path, keep_last: int | None) -> None:
    for old in list_checkpoints(folder)[keep_last:] if keep_last else ():
        if old.name != marked(folder, "best"):
            shutil.rmtree(old, ignore_errors=True)
