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

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule

from support.checkpoints.format import (
    FORMAT_VERSION,
    LARGEST_BYTES,
    NEW_RUN,
    STEP_NAME,
    read_manifest,
    validate,
    what_is_broken,
    with_defaults,
)
from support.cli.arguments import global_batch
from support.cluster.context import DistContext
from support.data.tokenize import tokenizer_fingerprint
from support.errors import FirstError, Preempted, TrainingError, UserError
from support.files.atomic import (
    PARTIAL,
    digest_of_json,
    open_regular,
    remove,
    remove_leftovers,
    set_aside,
    sha256_of,
    sync,
    sync_tree,
    write_text,
)
from support.files.safetensors_writer import save_file
from support.files.user_files import shown
from support.model import export
from support.model.weights import persistent_buffers
from support.strategies.optimizer_shards import ShardedState
from support.unwrap import unwrapped

# Size limit of one file of tensors, and the host memory that a save needs on top of training.
FILE_BYTES = 256 << 20
GROUP_KEYS = ("lr", "betas", "eps", "weight_decay")  # saved of each parameter group
# Attributes of DeepSpeed's dynamic loss scaler that are saved.
SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
BUFFERS = "model/buffers.safetensors"
MARKS = ("latest", "best")  # files that contain the name of a checkpoint


@dataclass(frozen=True)
class TrainingObjects:
    """The objects of a run whose state a checkpoint contains.

    Attributes:
        model, optimizer: as wrapped by the strategy; for DeepSpeed the engine and its optimizer.
        scaler: torch's GradScaler.
        stream: the training sequences of --streaming, whose position is saved; else None.
    """

    model: nn.Module
    optimizer: Any
    scaler: torch.amp.GradScaler
    stream: Any = None


class CheckpointManager:
    """Checkpoint manager of a run: resumes it, and saves checkpoints when they are due.

    Args:
        args: --save_every, --save_epochs, --keep_last, --load_best_at_end, --resume,
            --resume_force, --no_save, --eval_only.
        ctx: the ranks.
        folder: the run's output folder.
        objects: the objects to save and load.
        identity: the run signature, see `run_signature`.
        spec: the model's description.
    Attributes:
        may_save: whether this run can write checkpoints.
        best_is_loaded: whether `load_best` left the best weights in the model.
        seconds: for each save of this process, how long training waited for it.
        state: the ShardedState of this rank; None with --eval_only.
        after_save: functions that are called after each save.
    Raises:
        UserError: checkpoints are requested, but the optimizer is not AdamW.
    """

    def __init__(
        self, args, ctx: DistContext, folder: Path, objects: TrainingObjects, identity: dict, spec
    ):
        self.args, self.ctx, self.folder = args, ctx, folder / "checkpoints"
        self.model, self.scaler, self.stream = objects.model, objects.scaler, objects.stream
        self.identity, self.spec = identity, spec
        self.state = (
            None
            if args.eval_only
            else ShardedState(unwrapped(self.model), objects.optimizer, ctx.device)
        )
        self.may_save = self._may_save(objects.optimizer)
        self._stop_before, self._saved_at, self.best_is_loaded = None, None, False
        self._loaded_from: Path | None = None
        self._resumed_at = -1  # step of the checkpoint in `folder` that this run continues
        self.seconds: list[float] = []
        self.after_save: list[Callable[[], None]] = []

    def _may_save(self, optimizer) -> bool:
        if self.args.eval_only:
            return False
        is_adamw = ShardedState.knows(optimizer)
        save_flags = ("save_every", "save_epochs", "load_best_at_end", "resume")
        if not is_adamw and (
            given_flags := [
                flag for flag in save_flags if getattr(self.args, flag) not in (None, False)
            ]
        ):
            raise UserError(
                "Checkpoints know AdamW's states only: leave the optimizer out of the DeepSpeed "
                f"file, or leave out --{' and --'.join(given_flags)}."
            )
        if not is_adamw and not self.args.no_save:
            self.ctx.console.warn(
                "The DeepSpeed file's optimizer is not AdamW: a signal will end this run without "
                "a checkpoint."
            )
        return is_adamw and not self.args.no_save

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
        self._load(path, manifest)
        self._loaded_from = path
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
                f"--load_best_at_end: the checkpoint of the best evaluation so far "
                f"(step {best['step']}) is not in "
                f"{self.folder}: looking for the best from here on."
            )
            counters["best"] = None
        return counters

    def _load(self, path: Path, manifest: dict) -> None:
        """Load everything except the counters.

        Raises:
            UserError: the checkpoint does not fit this model, or a state in it is not one that the
                library wrote.
            TrainingError: a file cannot be read.
        """
        check_shapes(path, manifest, self.state)
        buffers = self._saved_buffers(path, manifest)
        try:
            if self.stream is not None:
                self.stream.resume(manifest["stream"])
            self._set_scaling(manifest["scaling"])
            self._set_schedule(manifest)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"--resume {path}: its manifest is damaged "
                f"({type(error).__name__}: {shown(error)}): name an older checkpoint."
            ) from error
        load(path, manifest, self.state)
        for buffer, values in buffers:
            buffer.copy_(values)
        dist.barrier()  # after it every rank has loaded its shards

    def take_over(self, best: dict | None) -> None:
        """Prepare the folder of checkpoints for this run; rank 0 only, no-op on other ranks.

        Call it when all checks have passed, because it changes files of earlier runs. Checkpoints
        after the resumed one are renamed: they are damaged, or of a run that this one replaces.

        Args:
            best: the best evaluation so far, from the checkpoint's counters.
        Raises:
            UserError: the folder's path exists but is no folder.
            OSError: the folder is not writable.
        """
        if not self.ctx.is_main:
            return
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise UserError(f"{self.folder} is no folder, and checkpoints go there: rename it.")
        if self.ctx.lock:
            remove_leftovers(self.folder)
        for path in list_checkpoints(self.folder):
            if step_of(path) > self._resumed_at:
                set_aside(path, f"aside-{path.name}")
        for mark in MARKS:
            if os.path.lexists(self.folder / mark) and not marked(self.folder, mark):
                aside = set_aside(self.folder / mark, f"{mark}.damaged")
                self.ctx.console.warn(
                    f"{self.folder / mark} does not name a checkpoint: ignored, and renamed to "
                    f"{aside.name}."
                )
        if best and self.args.load_best_at_end:
            write_text(self.folder / "best", step_folder(self.folder, best["step"]).name + "\n")

    def _saved_buffers(self, path: Path, manifest: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each saved buffer of this model with its value in the checkpoint.

        Raises:
            UserError: a buffer has another shape in the checkpoint.
        """
        if BUFFERS not in manifest["files"]:
            return []
        pairs = []
        with safe_open(path / BUFFERS, framework="pt") as file:
            saved_names = set(file.keys())
            for name, buffer in unwrapped(self.model).named_buffers():
                if name in saved_names:
                    pairs.append((buffer, file.get_tensor(name)))
                    if pairs[-1][1].shape != buffer.shape:
                        raise UserError(
                            f"--resume {path}: the buffer {name} is {list(pairs[-1][1].shape)} "
                            f"there, and {list(buffer.shape)} in this model."
                        )
        return pairs

    def _set_schedule(self, manifest: dict) -> None:
        """Restore the scheduler of a user's DeepSpeed file; --lr_scheduler depends on the step."""
        scheduler, saved_state = getattr(self.model, "lr_scheduler", None), manifest["lr_scheduler"]
        if scheduler and saved_state:
            scheduler.load_state_dict(saved_state)
            for group, values in zip(self.state.base.param_groups, manifest["groups"], strict=True):
                group.update(lr=values["lr"], betas=tuple(values["betas"]))
        elif scheduler:
            self.ctx.console.warn(
                "--resume: the checkpoint has no state of the DeepSpeed file's scheduler, "
                "which begins anew."
            )
        elif saved_state:
            self.ctx.console.warn(
                "--resume: the checkpoint's scheduler was a DeepSpeed file's; "
                "from here on --lr_scheduler decides."
            )

    def after_step(self, meter, stop: torch.Tensor) -> None:
        """Save a checkpoint if one is due; save and stop if a rank received a stop signal.

        Call it on every rank after each step.

        Args:
            meter: the run's counters.
            stop: scalar tensor, above 0 if any rank received a stop signal; equal on all ranks.
        Raises:
            Preempted: a rank received a stop signal, and the checkpoint is complete.
            TrainingError: the checkpoint cannot be written.
        """
        every, epochs = self.args.save_every, self.args.save_epochs
        if (every and meter.step % every == 0) or (epochs and meter.at_end_of_epoch):
            self.save(meter)
        if self.may_save and self._asked(stop):
            self.save_and_stop(meter)

    def after_evaluation(self, meter) -> None:
        """Save a checkpoint if this evaluation is the best so far; call it on every rank.

        Raises:
            TrainingError: the checkpoint cannot be written.
        """
        if not (self.args.load_best_at_end and meter.best and meter.best["step"] == meter.step):
            return
        self.save(meter)
        if self.ctx.is_main:
            old, new = marked(self.folder, "best"), step_folder(self.folder, meter.step).name
            write_text(self.folder / "best", new + "\n")
            # With regular saves --keep_last decides which checkpoints are removed.
            saves_regularly = self.args.save_every or self.args.save_epochs
            if old not in ("", new) and not saves_regularly:
                shutil.rmtree(self.folder / old, ignore_errors=True)

    def load_best(self, best: int, now: int) -> None:
        """Load the weights of the best evaluation; call it on every rank, at the end of training.

        If that checkpoint is damaged or missing, the last weights stay, with a warning.

        Args:
            best: the step of the best evaluation.
            now: the step whose weights are loaded now.
        Raises:
            UserError: the checkpoint does not fit this model.
            TrainingError: a file cannot be read.
        """
        self.best_is_loaded = True
        if best == now:
            self._loaded_from = step_folder(self.folder, best)
            return
        try:
            path, manifest = find(str(step_folder(self.folder, best)), self.folder, self.ctx)
        except UserError as error:
            self.ctx.console.warn(
                "--load_best_at_end: ending with the last weights, because of the best ones' "
                f"checkpoint: {error}"
            )
            self.best_is_loaded = False
            return
        self._let_go_of_gathered_weights()
        check_shapes(path, manifest, self.state)
        buffers = self._saved_buffers(path, manifest)
        load(path, manifest, self.state)
        for buffer, values in buffers:
            buffer.copy_(values)
        self._loaded_from = path
        self.ctx.console.print0(f"🏅 Back to the weights of step {best}, the best evaluation")

    def _let_go_of_gathered_weights(self) -> None:
        """Free the full weights that FSDP and ZeRO-3 keep after an evaluation.

        They would not be updated together with the shards.
        """
        for module in unwrapped(self.model).modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if hasattr(self.model, "empty_partition_cache"):
            self.model.empty_partition_cache()

    def _asked(self, stop: torch.Tensor) -> bool:
        """Return whether a rank received a stop signal; on a GPU, one step later.

        To read this step's value, the host would have to wait for the GPU.
        """
        if not stop.is_cuda:
            return stop.item() > 0
        previous, copied = self._stop_before, torch.cuda.Event()
        self._stop_before = torch.empty((), pin_memory=True).copy_(stop, non_blocking=True), copied
        copied.record()
        if previous is None:
            return False
        previous[1].synchronize()
        return previous[0].item() > 0

    def save_and_stop(self, meter) -> NoReturn:
        """Save a checkpoint and raise Preempted; every rank calls it after the same step.

        Raises:
            Preempted: the checkpoint is complete.
            TrainingError: the checkpoint cannot be written.
        """
        self.save(meter)
        raise Preempted(self.model)

    def save(self, meter) -> None:
        """Save a checkpoint of the current step, unless there is one; call it on every rank.

        Call it between two steps.

        Raises:
            TrainingError: the checkpoint cannot be written.
        """
        if meter.step == self._saved_at:
            return
        started = time.monotonic()
        # None unless a user's DeepSpeed file configures a scheduler.
        scheduler = getattr(self.model, "lr_scheduler", None)
        manifest_entries = {
            "counters": meter.counters(),
            "scaling": self._scaling(),
            "identity": self.identity,
            "lr_scheduler": scheduler.state_dict() if scheduler else {},
            "stream": self.stream.progress() if self.stream is not None else None,
            "groups": [
                {key: group[key] for key in GROUP_KEYS} for group in self.state.base.param_groups
            ],
        }
        with self.ctx.console.bar("Saving a checkpoint", unit=""):
            path = save(
                self.folder,
                meter.step,
                manifest_entries,
                self.state,
                self.ctx,
                self.args.keep_last,
                self._write_model,
            )
        self._saved_at = meter.step
        self.seconds.append(time.monotonic() - started)
        self.ctx.console.print0(f"💾 {path} ({self.seconds[-1]:.1f} s)")
        for function in self.after_save:
            function()

    def weights_kept(self, meter) -> Path | None:
        """Return a checkpoint with the model's present weights, and save one if necessary.

        Every rank calls it.

        Args:
            meter: the run's counters; None for a run that was complete before it was resumed.
        Returns:
            The checkpoint's folder; None if there is none and none can be written.
        """
        if self.best_is_loaded or meter is None:
            return self._loaded_from
        if not self.may_save:
            return None
        try:
            self.save(meter)
        except TrainingError as error:
            self.ctx.console.warn(str(error))
            return None
        return step_folder(self.folder, meter.step)

    def _write_model(self, folder: Path) -> None:
        export.describe(self.spec, folder)
        buffers = {} if self.spec.lora else persistent_buffers(unwrapped(self.model))
        if buffers:
            save_file(buffers, folder / Path(BUFFERS).name)

    def _scaling(self) -> dict:
        """Return the state of PyTorch's or DeepSpeed's loss scaler; {} for all but fp16."""
        if self.scaler.is_enabled():
            return self.scaler.state_dict()
        ds_scaler = self._deepspeed_scaler()
        return {name: getattr(ds_scaler, name) for name in SCALER_STATE} if ds_scaler else {}

    def _set_scaling(self, saved: dict) -> None:
        """Restore the loss scaler; a state of the other library gives only its scale."""
        scale, ds_scaler = saved.get("scale", saved.get("cur_scale")), self._deepspeed_scaler()
        if scale is None:
            return
        if self.scaler.is_enabled():
            state = saved if "scale" in saved else {"scale": scale}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **state})
        elif ds_scaler:
            for name in SCALER_STATE if "cur_scale" in saved else ():
                setattr(ds_scaler, name, saved.get(name, getattr(ds_scaler, name)))
            ds_scaler.cur_scale = scale

    def _deepspeed_scaler(self):
        """Return DeepSpeed's dynamic loss scaler, or None."""
        scaler = getattr(self.state.wrapper, "loss_scaler", None)
        return scaler if hasattr(scaler, "last_overflow_iter") else None


def run_signature(args, ctx: DistContext, spec, dataset: dict, model) -> dict:
    """Return the run signature, which a resumed run compares with that of its checkpoint.

    Returns:
        {"hard": …, "soft": …, "told": …}. "hard" entries must match: otherwise the tensors are
        useless. "soft" entries should match: they decide which data the model is trained and
        evaluated on. "told" entries are informational: a difference is only reported.
    """
    named = unwrapped(model).named_parameters()
    must_match = {
        "parameters": spec.parameters,
        "shapes": digest_of_shapes({name: getattr(p, "ds_shape", p.shape) for name, p in named}),
        "tokenizer": tokenizer_fingerprint(spec.tokenizer),
    }
    if spec.lora:
        must_match |= {"lora_r": spec.lora.r, "lora_alpha": spec.lora.alpha}
        # The frozen weights are not part of a checkpoint.
        must_match["frozen weights"] = (
            f"random, from seed {args.seed}" if spec.random else "as they came"
        )
    # Whether a stream contains conversations is not known in advance.
    may_be_chat = args.streaming or dataset["kind"] == "chat"
    should_match = {
        "model": os.path.normpath(args.model),
        "dataset": dataset["sha256"],
        "blocks": dataset["blocks"],
        "seq_length": args.seq_length,
        "seed": args.seed,
        "validation_split": args.validation_split,
        "validation": (dataset.get("validation") or {}).get("sha256"),
        "template": digest_of_text(spec.tokenizer.chat_template) if may_be_chat else None,
        "shuffle_buffer": args.shuffle_buffer if args.streaming else None,
        "global batch": global_batch(args, ctx.world_size),
    }
    informational = {
        "strategy": args.strategy,
        "ranks": ctx.world_size,
        "precision": ctx.precision,
        "batch_size": args.batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "epochs": args.epochs,
        "max_steps": args.max_steps,
        "lr": args.lr,
        "lr_scheduler": args.lr_scheduler,
        "warmup_steps": args.warmup_steps,
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
        "dropout": args.dropout,
        "from_scratch": args.from_scratch,
        "lora_dropout": args.lora_dropout,
        "fused_gelu": args.fused_gelu,
    }
    return {"hard": must_match, "soft": should_match, "told": informational}


def digest_of_text(text) -> str:
    """Return the first ten hexadecimal digits of the SHA-256 of a text or a dict of texts."""
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:10]


def digest_of_shapes(shapes: dict) -> str:
    """Return the SHA-256 of the names and shapes of parameters, independent of their order."""
    return hashlib.sha256(
        json.dumps(sorted((name, list(shape)) for name, shape in shapes.items())).encode()
    ).hexdigest()


# ------------------------------------------------------------------------------------------- saving


def saves_due(args, before: dict, steps: int, blocks: int) -> int:
    """Return how many checkpoints a run will save until its end, if no signal stops it.

    Args:
        args: --save_every, --save_epochs, --load_best_at_end, --epochs, --no_save, --eval_only.
        before: the counters that the run starts from.
        steps: optimizer steps of the whole run.
        blocks: sequences in an epoch.
    """
    if args.no_save or args.eval_only:
        return 0
    every = steps // args.save_every - before["step"] // args.save_every if args.save_every else 0
    epochs = max(0, (args.epochs or 1) - before["samples"] // blocks) if args.save_epochs else 0
    return max(0, every) + epochs + bool(args.load_best_at_end)


def save(
    folder: Path,
    step: int,
    facts: dict,
    state: ShardedState,
    ctx: DistContext,
    keep_last: int | None,
    describe,
) -> Path:
    """Write a checkpoint; every rank calls it, and it returns when the checkpoint is on disk.

    Args:
        folder: the run's folder of checkpoints.
        step: optimizer steps done, which the checkpoint's name contains.
        facts: entries of the manifest besides those about the tensors.
        state: the masters and moments of this rank.
        ctx: the ranks.
        keep_last: number of checkpoints to keep; None keeps all.
        describe: a function that writes the model's description into a given folder.
    Returns:
        The new checkpoint's folder.
    Raises:
        TrainingError: the disk is full, or not writable. All ranks raise it together, and no
            unfinished folder remains.
    """
    final, errors = step_folder(folder, step), FirstError()
    unfinished = folder / f"{PARTIAL}{final.name}"
    if ctx.is_main:
        errors.attempt(_start_checkpoint, unfinished)
        ctx.temporary.append(str(unfinished))  # removed if this run fails during the save
    dist.barrier()
    ranks = ctx.all_gather(_write_tensors(unfinished, state, ctx, errors))
    failed = next(
        (f"{rank['error']} [rank {number}]" for number, rank in enumerate(ranks) if rank["error"]),
        "",
    )
    if ctx.is_main and not failed:
        manifest = {
            **facts,
            "adam_step": state.adam_step,
            "shapes": {name: list(shape) for name, shape in state.shapes.items()},
            "pieces": [piece for rank in ranks for piece in rank["pieces"]],
            "files": {name: entry for rank in ranks for name, entry in rank["files"].items()},
        }
        errors.attempt(_complete_checkpoint, unfinished, final, manifest, describe)
        errors.attempt(_remove_old, folder, keep_last)
    if ctx.is_main:
        remove(unfinished)
        ctx.temporary.remove(str(unfinished))
    if failed := ctx.broadcast_from_rank0(failed or str(errors)):
        raise TrainingError(f"The checkpoint {final} could not be written: {failed}")
    return final


def _start_checkpoint(unfinished: Path) -> None:
    remove(unfinished)
    unfinished.mkdir(parents=True)


def _complete_checkpoint(unfinished: Path, final: Path, manifest: dict, describe) -> None:
    describe(unfinished / "model")
    described = sorted(path for path in (unfinished / "model").rglob("*") if path.is_file())
    manifest["files"] |= {
        path.relative_to(unfinished).as_posix(): facts_of(path) for path in described
    }
    sync_tree(unfinished / "model")
    write_manifest(unfinished, manifest)
    sync(unfinished)
    os.replace(unfinished, final)
    write_text(final.parent / "latest", final.name + "\n")
    sync(final.parent)
    sync(final.parent.parent)


def _remove_old(folder: Path, keep_last: int | None) -> None:
    for old in list_checkpoints(folder)[keep_last:] if keep_last else ():
        if old.name != marked(folder, "best"):
            shutil.rmtree(old, ignore_errors=True)


def _write_tensors(folder: Path, state: ShardedState, ctx: DistContext, errors: FirstError) -> dict:
    """Write the weights and moments of this rank, in files of about FILE_BYTES.

    Returns:
        {"pieces": …, "files": …, "error": …}: entries of the manifest, and the first error or "".
    """
    pieces, files, tensors = [], {}, {}

    def write() -> None:
        name = f"rank-{ctx.rank:05d}-{len(files):03d}.safetensors"
        save_file(tensors, folder / name)
        files[name] = facts_of(folder / name)

    def flush() -> None:
        errors.attempt(write)
        tensors.clear()

    most = FILE_BYTES // 12  # elements in a file: three fp32 values each
    room = most
    for shard in state.shards:
        with state.open(shard) as tensors_of_shard:
            for piece in [] if state.is_copy else shard.pieces:
                begin, end = 0, piece.numel
                if state.replicated:  # every rank has all elements and writes an equal part of them
                    begin, end = (
                        piece.numel * r // ctx.world_size for r in (ctx.rank, ctx.rank + 1)
                    )
                while begin < end:
                    stop = min(end, begin + room)
                    start = piece.start + begin
                    pieces.append(
                        {
                            "name": piece.name,
                            "start": start,
                            "numel": stop - begin,
                            "moments": len(tensors_of_shard) > 1,
                            "file": f"rank-{ctx.rank:05d}-{len(files):03d}.safetensors",
                        }
                    )
                    for kind, flat in tensors_of_shard.items():
                        part = flat[piece.offset + begin : piece.offset + stop]
                        tensors[f"{piece.name}@{start}/{kind}"] = part.detach().to(
                            "cpu", torch.float32, copy=True
                        )
                    room -= stop - begin
                    begin = stop
                    if room == 0:
                        flush()
                        room = most
    if tensors:
        flush()
    return {"pieces": pieces, "files": files, "error": str(errors)}


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write manifest.json, which makes a checkpoint complete.

    Args:
        folder: the checkpoint's folder, with all files that the manifest lists.
        manifest: without format version and digest.
    Raises:
        ValueError: the manifest is invalid or too large, so that it could not be read.
        OSError: the disk is full, or not writable.
    """
    # Validate the manifest as it will be read: JSON turns tuples into lists, for example.
    manifest = json.loads(json.dumps({"format_version": FORMAT_VERSION, **manifest}))
    validate(with_defaults(manifest))
    text = json.dumps({**manifest, "sha256": digest_of_json(manifest)})
    if len(text) > LARGEST_BYTES:
        raise ValueError(f"its manifest.json would have more than {LARGEST_BYTES:,} bytes")
    write_text(folder / "manifest.json", text)


def facts_of(path: Path) -> dict:
    """Flush a file to disk and return its entry in the manifest: size in bytes and SHA-256.

    Raises:
        OSError: the file cannot be read or flushed.
    """
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


# ------------------------------------------------------------------------------------------ finding


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def marked(folder: Path, mark: str) -> str:
    """Return the checkpoint's name in the file `mark`, or "" if it is missing or invalid."""
    try:
        with open_regular(folder / mark) as file:
            name = file.read(100).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return name if STEP_NAME.fullmatch(name) else ""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder by name, newest first, without checking them."""
    return sorted(
        (path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name)), reverse=True
    )


def find(wanted: str, folder: Path, ctx: DistContext) -> tuple[Path, dict] | None:
    """Find the checkpoint to resume from: the newest complete and undamaged one.

    Every rank calls it. Each rank verifies a part of the files, and all ranks return the same.

    Args:
        wanted: a checkpoint's folder, a run's folder or a run's folder of checkpoints; "" for
            `folder`.
        folder: the folder of checkpoints of this run.
        ctx: the ranks.
    Returns:
        The checkpoint's folder and manifest; None if `wanted` is "" and `folder` has none.
    Raises:
        UserError: no checkpoint is complete and undamaged, or `wanted` does not exist.
    """
    candidates = None
    if ctx.is_main:  # rank 0 decides: other nodes may see new names in a shared folder later
        candidates = candidates_in(Path(wanted)) if wanted else list_checkpoints(folder)
    candidates = ctx.broadcast_from_rank0(candidates)
    if candidates is None:
        raise UserError(f"{wanted}: no such folder.")
    for candidate in candidates:
        manifest, problem = ctx.broadcast_from_rank0(
            read_manifest(candidate) if ctx.is_main else None
        )
        problem = problem or what_is_broken(candidate, manifest, ctx.rank, ctx.world_size)
        problem = next(
            (rank_problem for rank_problem in ctx.all_gather(problem) if rank_problem), ""
        )
        if not problem:
            return candidate, manifest
        if wanted and candidate == Path(wanted):
            raise UserError(f"--resume {wanted}: {problem}.")
        ctx.console.warn(f"Passed over the checkpoint {candidate}: {problem}.")
    if wanted or candidates:
        raise UserError(
            f"--resume: there is no whole checkpoint in {wanted or folder}"
            + ("." if wanted else "; remove the folder to start anew.")
        )
    return None


def candidates_in(path: Path) -> list[Path] | None:
    """Return the checkpoints that a path may mean, newest first, without checking them.

    Args:
        path: a checkpoint's folder, a run's folder, or a run's folder of checkpoints.
    Returns:
        [path] for a checkpoint's folder, else all checkpoints of the run; None if there is no such
        folder.
    """
    if not path.is_dir():
        return None
    if path.name.startswith("step-") or (path / "manifest.json").exists():
        return [path]
    return list_checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)


def open_alone(wanted: Path) -> tuple[Path, dict]:
    """Open a checkpoint in a single process, without a process group, and verify every file.

    Args:
        wanted: a checkpoint's folder, a run's folder or a run's folder of checkpoints; of the last
            two the newest checkpoint is taken.
    Returns:
        The checkpoint's folder and manifest.
    Raises:
        UserError: the folder is no checkpoint, or the checkpoint is incomplete or damaged.
    """
    wanted = next(iter(candidates_in(wanted) or ()), wanted)
    manifest, problem = read_manifest(wanted)
    if problem := problem or what_is_broken(wanted, manifest):
        raise UserError(f"{wanted}: {problem}.")
    return wanted, manifest


# ------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Source:
    """Consecutive elements of a parameter in a file of a checkpoint.

    Attributes:
        start: index of the first element in the flattened parameter.
        numel: number of elements.
        file: name of the file, relative to the checkpoint's folder.
        key: name of the tensors in the file, without "/weight", "/exp_avg" or "/exp_avg_sq".
        moments: whether the file contains the moments, too.
    """

    start: int
    numel: int
    file: str
    key: str
    moments: bool


class Reader:
    """Reader for any range of elements of any parameter in a checkpoint.

    Args:
        folder: the checkpoint's folder.
        manifest: as `read_manifest` returned it.
    """

    def __init__(self, folder: Path, manifest: dict):
        self.folder, self._files, self._sources = folder, {}, {}
        for piece in manifest["pieces"]:
            key = f"{piece['name']}@{piece['start']}"
            source = Source(piece["start"], piece["numel"], piece["file"], key, piece["moments"])
            self._sources.setdefault(piece["name"], []).append(source)

    def close(self) -> None:
        """Close the open files; the next read opens them again."""
        self._files.clear()

    def _open(self, name: str):
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise TrainingError(f"{self.folder / name} cannot be read: {error}") from error
        return self._files[name]

    def _parts(self, name: str, start: int, numel: int) -> Iterator[tuple[Source, int, int]]:
        for source in self._sources.get(name, ()):  # an empty parameter has no sources
            begin, end = max(start, source.start), min(start + numel, source.start + source.numel)
            if begin < end:
                yield source, begin, end

    def read_into(self, flat: torch.Tensor, name: str, kind: str, start: int) -> None:
        """Fill a flat tensor with consecutive elements of a parameter; missing moments are 0.

        Args:
            flat: tensor of shape [numel] to fill.
            name: the parameter.
            kind: "weight", "exp_avg" or "exp_avg_sq".
            start: index of the first element in the flattened parameter.
        Raises:
            TrainingError: a file cannot be read, or the checkpoint lacks some of the elements.
        """
        filled = 0
        for source, begin, end in self._parts(name, start, flat.numel()):
            filled += end - begin
            if kind != "weight" and not source.moments:
                flat[begin - start : end - start].zero_()
                continue
            part = self._open(source.file).get_slice(f"{source.key}/{kind}")[
                begin - source.start : end - source.start
            ]
            flat[begin - start : end - start].copy_(part)
        if filled != flat.numel():
            raise TrainingError(
                f"The checkpoint {self.folder} holds {filled} of {flat.numel()} elements of {name}."
            )


def check_shapes(checkpoint: Path, manifest: dict, state: ShardedState) -> None:
    """Check that a checkpoint has all parameters of this model, in the same shapes.

    Flat tensors are accepted, because DeepSpeed's stage 3 writes them to universal checkpoints.

    Raises:
        UserError: the checkpoint lacks a parameter, or has it in another shape.
    """
    for name, shape in state.shapes.items():
        saved_shape = manifest["shapes"].get(name)
        if saved_shape not in (list(shape), [math.prod(shape)]):
            raise UserError(
                f"--resume {checkpoint}: {name} is {saved_shape or 'missing'} there, "
                f"and {list(shape)} in this model."
            )


def load(checkpoint: Path, manifest: dict, state: ShardedState) -> None:
    """Load this rank's masters, moments and working copies of the weights from a checkpoint.

    Args:
        checkpoint: the checkpoint's folder; its shapes were checked by `check_shapes`.
        manifest: the checkpoint's manifest.
        state: the masters and moments of this rank, which are overwritten.
    Raises:
        TrainingError: a file cannot be read.
    """
    reader = Reader(checkpoint, manifest)
    for shard in state.shards:
        with state.open(shard, write=True) as tensors_of_shard:
            for piece in shard.pieces:
                for kind, flat in tensors_of_shard.items():
                    reader.read_into(
                        flat[piece.offset : piece.offset + piece.numel],
                        piece.name,
                        kind,
                        piece.start,
                    )
    state.set_adam_step(manifest["adam_step"])
    state.finish_writing()


# ------------------------------------------------------------------------- comparing run signatures


def check_same_run(saved: dict, now: dict, forced: bool, ctx: DistContext) -> None:
    """Compare the run signatures of a checkpoint and of this run, and refuse another run's.

    Args:
        saved: the run signature in the checkpoint. Entries that it lacks are not compared.
        now: the run signature of this run, see `run_signature`.
        forced: --resume_force, with which "soft" differences only cause a warning.
        ctx: the ranks.
    Raises:
        UserError: the signatures differ; the message lists the differences.
    """
    for kind in ("hard", "soft", "told"):
        saved_values, current_values = saved[kind], now[kind]
        differences = [
            f"{key} {shown(saved_values[key])} there, {shown(current_values[key])} here"
            for key in current_values
            if key in saved_values and saved_values[key] != current_values[key]
        ]
        if not differences:
            continue
        if kind == "told" or (kind == "soft" and forced):
            ctx.console.warn(f"--resume: going on, and not as before: {'; '.join(differences)}.")
            continue
        advice = " (--resume_force goes on all the same)" if kind == "soft" else ""
        raise UserError(
            f"--resume: the checkpoint is of another run: {'; '.join(differences)}{advice}."
        )
