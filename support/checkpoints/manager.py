"""Save, find and load checkpoints, in one format for all strategies and numbers of ranks.

    <output_dir>/checkpoints/
        step-00000004/
            rank-00000-000.safetensors …   the shards of each rank: for each piece of a parameter
                                           its fp32 weight and Adam's moments
            model/                         configuration and tokenizer, so that the checkpoint can
                                           be exported without the run
            manifest.json                  step and counters; file and position of each piece; size
                                           and SHA-256 of each file
        latest                             name of the newest checkpoint
        best                               name of the checkpoint with the best evaluation; written
                                           with --load_best_at_end

A checkpoint is either complete or missing. It is written to a folder with a temporary name; each
file is flushed to disk, the manifest last. Then the folder is renamed, and then `latest` is
updated. An interrupted save leaves the previous checkpoint as it was.

A piece records which elements of which parameter it holds, but nothing about strategies or ranks.
Any strategy on any number of ranks can therefore load the checkpoint of any other, and each rank
reads only the elements of its own shards. A checkpoint contains data only: nothing in it is
executed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from support.checkpoints.compatibility import check_same_run
from support.checkpoints.format import (
    BUFFERS,
    MARKS,
    WHOLE_STATES,
    candidates_in,
    file_entry,
    find_damage,
    list_checkpoints,
    marked,
    read_manifest,
    step_folder,
    step_of,
    write_manifest,
)
from support.checkpoints.recognize import format_of
from support.checkpoints.tensors import PieceWriter, check_shapes, read_shards, write_shards
from support.cluster.context import DistContext
from support.errors import FirstError, OutOfMemory, Preempted, TrainingError, UserError, explain
from support.files import atomic
from support.files.safetensors_writer import save_file
from support.files.user_files import shown
from support.model import export
from support.model.weights import persistent_buffers
from support.strategies import gradients
from support.strategies.optimizer_shards import ShardedState, free_gathered_weights
from support.train_state import NEW_RUN, TrainState
from support.unwrap import unwrapped

GROUP_KEYS = ("lr", "betas", "eps", "weight_decay")  # saved of each group of AdamW


@dataclass(frozen=True)
class TrainingObjects:
    """The objects of a run whose state a checkpoint contains."""

    # As wrapped by the strategy; for DeepSpeed the engine and its optimizer.
    model: nn.Module
    optimizer: Any
    scaler: torch.amp.GradScaler
    stream: Any = None  # the training sequences of --streaming, whose position is saved; else None


class CheckpointManager:
    """Checkpoint manager of a run: resumes it, and saves checkpoints when they are due.

    Args:
        args: --save_every, --save_epochs, --keep_last, --load_best_at_end, --resume,
            --resume_force, --no_save, --eval_only.
        folder: the run's output folder.
        identity: the run signature, see compatibility.run_signature.
    Raises:
        UserError: checkpoints are requested, but they do not support the optimizer.
    """

    def __init__(
        self, args, ctx: DistContext, folder: Path, objects: TrainingObjects, identity: dict, spec
    ):
        self.args, self.ctx, self.folder = args, ctx, folder / "checkpoints"
        self.objects, self.identity, self.spec = objects, identity, spec
        self.model, self.module = objects.model, unwrapped(objects.model)
        self.state: Any = None  # the ShardedState of this rank; None with --eval_only
        if not args.eval_only:
            self.state = ShardedState(self.module, objects.optimizer, ctx.device)
        self.may_save = self._may_save()  # whether this run can write checkpoints
        self._stop = DelayedFlag()
        self._saved_at: int | None = None
        self.best_is_loaded = False  # whether `load_best` left the best weights in the model
        self._loaded_from: Path | None = None
        self._resumed_at = -1  # step of the checkpoint in `folder` that this run continues
        # For each save of this process, how long training waited for it.
        self.seconds: list[float] = []
        # Functions that are called before and after each save.
        self.before_save: list[Callable[[], None]] = []
        self.after_save: list[Callable[[], None]] = []

    def _may_save(self) -> bool:
        if self.args.eval_only:
            return False
        supported = ShardedState.family(self.objects.optimizer) is not None
        if not supported:
            flags = ("save_every", "save_epochs", "load_best_at_end", "resume")
            given = [flag for flag in flags if getattr(self.args, flag) not in (None, False)]
            if given:
                raise UserError(
                    "Checkpoints do not support the DeepSpeed file's optimizer: use AdamW or "
                    f"--optim, or omit --{' and --'.join(given)}."
                )
            if not self.args.no_save:
                self.ctx.console.warn(
                    "Checkpoints do not support the DeepSpeed file's optimizer: a signal will end "
                    "this run without one."
                )
        return supported and not self.args.no_save

    # ------------------------------------------------------------------------------------- resuming

    def resume(self) -> dict:
        """Load the checkpoint that --resume selects. Call it on every rank.

        Nothing on disk is changed, see `take_over`.

        Returns:
            The checkpoint's counters, or those of a new run.
        Raises:
            UserError: no checkpoint is complete and undamaged, or it does not fit this run.
            TrainingError: a file cannot be read.
        """
        if self.may_save:
            self.ctx.stop.defer()
        if self.args.resume is None:
            return NEW_RUN
        path_and_manifest = find(self.args.resume, self.folder, self.ctx)
        if path_and_manifest is None:
            self.ctx.console.warn(
                f"--resume: there is no checkpoint in {self.folder} yet, so this run starts from "
                "the beginning."
            )
            return NEW_RUN
        path, manifest = path_and_manifest
        check_same_run(manifest["identity"], self.identity, self.args.resume_force, self.ctx)
        buffers = self._check_fit(path, manifest)
        self._load_other_states(path, manifest)
        self._load_weights(path, manifest, buffers)
        dist.barrier()  # after it every rank has loaded its shards
        self.ctx.console.print0(f"▶️  Resumed from {path}")
        counters = manifest["counters"]
        if path.resolve() == step_folder(self.folder, counters["step"]).resolve():
            self._saved_at = self._resumed_at = counters["step"]
        best = counters["best"]
        if (
            best
            and self.args.load_best_at_end
            and not self.ctx.broadcast_from_rank0(step_folder(self.folder, best["step"]).is_dir())
        ):
            self.ctx.console.warn(
                f"--load_best_at_end: the checkpoint of the best evaluation (step {best['step']}) "
                f"is not in {self.folder}. Only evaluations from here on are compared."
            )
            counters["best"] = None
        return counters

    def _check_fit(self, path: Path, manifest: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Check the shapes in a checkpoint, and pair each buffer with its saved value."""
        optimizer = ShardedState.family(self.objects.optimizer)
        saved_by = manifest["optimizer"]
        if saved_by not in ("", optimizer):
            raise UserError(
                f"--resume {path}: the checkpoint has the states of {shown(saved_by)}, and this "
                f"run's optimizer is {optimizer}: use the same --optim."
            )
        check_shapes(path, manifest, self.state)
        saved = load_file(path / BUFFERS) if BUFFERS in manifest["files"] else {}
        pairs = []
        for name, buffer in self.module.named_buffers():
            if name in saved:
                if saved[name].shape != buffer.shape:
                    raise UserError(
                        f"--resume {path}: the shape of the buffer {name} is {list(buffer.shape)} "
                        f"in this model, and {list(saved[name].shape)} in the checkpoint."
                    )
                pairs.append((buffer, saved[name]))
        return pairs

    def _load_weights(self, path: Path, manifest: dict, buffers: list) -> None:
        """Load weights, optimizer states and the buffers that `_check_fit` returned."""
        if WHOLE_STATES in manifest["files"]:
            try:
                self.state.load_whole_states(load_file(path / WHOLE_STATES))
            except ValueError as error:
                raise UserError(f"--resume {path}: {WHOLE_STATES}: {shown(error)}.") from error
        read_shards(path, manifest, self.state)
        for buffer, values in buffers:
            buffer.copy_(values)
        self._loaded_from = path

    def _load_other_states(self, path: Path, manifest: dict) -> None:
        """Load the states of the stream, the loss scaler and DeepSpeed's scheduler."""
        objects = self.objects
        try:
            # An imported checkpoint has no position, so its stream starts at the beginning.
            has_position = manifest["stream"] or manifest["counters"]["samples"]
            if objects.stream is not None and has_position:
                objects.stream.resume(manifest["stream"])
            gradients.load_scaler_state(manifest["scaling"], objects.scaler, objects.optimizer)
            self._load_schedule(manifest)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"--resume {path}: its manifest is damaged "
                f"({type(error).__name__}: {shown(error)}). Name an older checkpoint."
            ) from error

    def _load_schedule(self, manifest: dict) -> None:
        """Restore the scheduler of a user's DeepSpeed file; --lr_scheduler depends on the step."""
        scheduler, saved_state = self._scheduler, manifest["lr_scheduler"]
        if scheduler and saved_state:
            scheduler.load_state_dict(saved_state)
            for group, values in zip(self.state.base.param_groups, manifest["groups"], strict=True):
                group["lr"] = values["lr"]
                if "betas" in values:  # not those of SGD
                    group["betas"] = tuple(values["betas"])
        elif scheduler:
            self.ctx.console.warn(
                "--resume: the checkpoint has no state of the DeepSpeed file's scheduler, so the "
                "schedule starts from the beginning."
            )
        elif saved_state:
            self.ctx.console.warn(
                "--resume: the checkpoint was saved with the scheduler of a DeepSpeed file; "
                "--lr_scheduler replaces it."
            )

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
        self._load_weights(best_folder, manifest, self._check_fit(best_folder, manifest))
        self.best_is_loaded = True
        self.ctx.console.print0(f"🏅 Loaded the weights of step {best}, the best evaluation")

    # --------------------------------------------------------------------------------------- saving

    def after_step(self, state: TrainState, stop: torch.Tensor) -> None:
        """Save a checkpoint if one is due; save and stop if a rank received a stop signal.

        Call it on every rank after each step.

        Args:
            stop: scalar tensor, above 0 if any rank received a stop signal; equal on all ranks.
        Raises:
            Preempted: a rank received a stop signal, and the checkpoint is complete.
            TrainingError: the checkpoint cannot be written.
        """
        every, epochs = self.args.save_every, self.args.save_epochs
        if (every and state.step % every == 0) or (epochs and state.at_end_of_epoch):
            self.save(state)
        if self.may_save and self._stop.read(stop):
            self.preempt(state)

    def preempt(self, state: TrainState) -> NoReturn:
        """Save a checkpoint and end the run, because a rank received a stop signal.

        Raises:
            Preempted: the checkpoint is complete.
            TrainingError: this run saves no checkpoints, or the checkpoint cannot be written.
        """
        if not self.may_save:
            raise TrainingError("Stopped by a signal, without a checkpoint.")
        self.save(state)
        raise Preempted(self.model)

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

    def save(self, state: TrainState) -> None:
        """Save a checkpoint of the current step, unless there is one.

        Call it on every rank, between two steps. It returns when the checkpoint is on disk.

        Raises:
            TrainingError: the disk is full, or not writable. All ranks raise it together, and no
                unfinished folder remains.
        """
        if state.step == self._saved_at:
            return
        started = time.monotonic()
        for function in self.before_save:
            function()
        final = step_folder(self.folder, state.step)
        with self.ctx.console.bar("Saving a checkpoint", unit=""):
            self._write(final, self._manifest(state.counters()))
        self._saved_at = state.step
        self.seconds.append(time.monotonic() - started)
        self.ctx.console.print0(f"💾 {final} ({self.seconds[-1]:.1f} s)")
        for function in self.after_save:
            function()

    def _manifest(self, counters: dict) -> dict:
        """Return the manifest without the entries about files and pieces."""
        objects, groups = self.objects, self.state.base.param_groups
        optimizer = ShardedState.family(objects.optimizer)
        keys = GROUP_KEYS if optimizer == "adamw" else ("lr", "weight_decay")
        return {
            "counters": counters,
            "scaling": gradients.scaler_state(objects.scaler, objects.optimizer),
            "identity": self.identity,
            "lr_scheduler": self._scheduler.state_dict() if self._scheduler else {},
            "stream": None if objects.stream is None else objects.stream.progress(),
            "groups": [{key: group[key] for key in keys} for group in groups],
            "optimizer": optimizer,
            "adam_step": self.state.adam_step,
            "shapes": {name: list(shape) for name, shape in self.state.shapes.items()},
        }

    def _write(self, final: Path, manifest: dict) -> None:
        """Write a checkpoint to the folder `final`; every rank calls it."""
        ctx, errors = self.ctx, FirstError()
        unfinished = self.folder / f"{atomic.PARTIAL}{final.name}"
        if ctx.is_main:
            errors.attempt(_start_checkpoint, unfinished)
            ctx.temporary.append(str(unfinished))  # removed if this run fails during the save
        dist.barrier()
        writer = PieceWriter(unfinished, ctx.rank)
        errors.attempt(write_shards, writer, self.state, ctx.world_size)
        if errors.error is not None and isinstance(explain(errors.error), OutOfMemory):
            raise errors.error  # ends the run with the facts on memory; the other ranks are ended
        ranks = ctx.all_gather((writer.pieces, writer.files, str(errors)))
        failed = next(
            (f"{error} [rank {rank}]" for rank, (_, _, error) in enumerate(ranks) if error), ""
        )
        if ctx.is_main:
            if not failed:
                manifest["pieces"] = [piece for pieces, _, _ in ranks for piece in pieces]
                manifest["files"] = {
                    name: entry for _, files, _ in ranks for name, entry in files.items()
                }
                errors.attempt(self._complete, unfinished, final, manifest)
                failed = str(errors)
            ctx.temporary.clean_up(str(unfinished))
        if failed := ctx.broadcast_from_rank0(failed):
            raise TrainingError(f"The checkpoint {final} could not be written: {failed}")
        if ctx.is_main:
            self._mark_latest(final)

    def _complete(self, unfinished: Path, final: Path, manifest: dict) -> None:
        """Write the model's description and the manifest, and rename the folder."""
        model_folder = unfinished / "model"
        export.describe(self.spec, model_folder)
        buffers = {} if self.spec.lora else persistent_buffers(self.module)
        if buffers:
            save_file(buffers, unfinished / BUFFERS)
        if states := self.state.whole_states():
            save_file(states, unfinished / WHOLE_STATES)
            manifest["files"][WHOLE_STATES] = file_entry(unfinished / WHOLE_STATES)
        for path in sorted(path for path in model_folder.rglob("*") if path.is_file()):
            manifest["files"][path.relative_to(unfinished).as_posix()] = file_entry(path)
        atomic.sync_tree(model_folder)
        write_manifest(unfinished, manifest)
        atomic.sync(unfinished)
        os.replace(unfinished, final)

    def _mark_latest(self, final: Path) -> None:
        """Name a complete checkpoint in `latest`, and remove old ones; an error is only reported.

        `find` does not read `latest`, so the checkpoint can be resumed without it.
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

    def __init__(self):
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


def saves_due(args, before: dict, steps: int, blocks: int) -> int:
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


def find(wanted: str, folder: Path, ctx: DistContext) -> tuple[Path, dict] | None:
    """Find the checkpoint to resume from: the newest complete and undamaged one.

    Every rank calls it, and all ranks return the same.

    Args:
        wanted: see `candidates_in`; "" for `folder`.
        folder: the folder of checkpoints of this run.
    Returns:
        The checkpoint's folder and manifest; None if `wanted` is "" and `folder` has none.
    Raises:
        UserError: no checkpoint is complete and undamaged, or `wanted` does not exist.
    """
    candidates = program = None
    if ctx.is_main:  # rank 0 decides: other nodes may see new names in a shared folder later
        candidates = candidates_in(Path(wanted)) if wanted else list_checkpoints(folder)
        program = format_of(Path(wanted)) if wanted and candidates == [] else None
    candidates, program = ctx.broadcast_from_rank0((candidates, program))
    if candidates is None:
        raise UserError(f"{wanted}: no such folder.")
    if program:
        raise UserError(
            f"--resume {wanted} is a checkpoint of {program}. Convert it first: "
            f"python scripts/convert_checkpoint.py {wanted} --to checkpoint NEW_FOLDER"
        )
    for candidate in candidates:
        manifest, problem = verify(candidate, ctx)
        if not problem:
            return candidate, manifest
        if wanted and candidate == Path(wanted):
            raise UserError(f"--resume {wanted}: {problem}.")
        ctx.console.warn(f"Skipped the checkpoint {candidate}: {problem}.")
    if wanted or candidates:
        raise UserError(
            f"--resume: no checkpoint in {wanted or folder} is complete and undamaged."
            + ("" if wanted else " Remove the folder to start from the beginning.")
        )
    return None


def verify(checkpoint: Path, ctx: DistContext) -> tuple[dict, str]:
    """Read a checkpoint's manifest and verify its files.

    Every rank calls it. Each rank verifies a part of the files, and all ranks return the same.

    Returns:
        (manifest, ""), or a clause that says why the checkpoint cannot be used as the second item.
    """
    manifest, problem = ctx.broadcast_from_rank0(read_manifest(checkpoint) if ctx.is_main else None)
    problem = problem or find_damage(checkpoint, manifest, ctx.rank, ctx.world_size)
    return manifest, next(filter(None, ctx.all_gather(problem)), "")
