"""Checkpoints: one format for all strategies, complete or not there, and nothing in it is ever
executed.

    <output_dir>/checkpoints/step-00000004/
        rank-00000-000.safetensors …    what each rank holds: per piece of a parameter its fp32 weight and Adam's moments
        model/                          configuration and tokenizer, so that a checkpoint can be exported by itself
        manifest.json                   every piece and where it lies; step, counters; size and SHA-256 of each file
    <output_dir>/checkpoints/latest     name of the newest one
    <output_dir>/checkpoints/best       with --load_best_at_end: name of the one with the best evaluation

A save is written into a folder of another name, each file flushed to disk, the manifest last; then
the folder gets its name, and then `latest` names it. Whatever is interrupted leaves the checkpoint
before as it was.

A piece says which elements of which parameter it holds, and nothing of strategies or ranks: so any
strategy on any number of ranks reads what any other has written, each rank just the elements that
it will hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
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
from support.cli.flags import global_batch
from support.cluster.context import Run
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
    sync_folder,
    sync_tree,
    write_text,
)
from support.files.safetensors_writer import save_file
from support.files.user_files import shown
from support.model import export
from support.model import resolve as models
from support.strategies.optimizer_shards import ShardedState

FILE_BYTES = (
    256 << 20
)  # of one file; so much host memory does a save need in addition to what training holds
GROUP_KEYS = ("lr", "betas", "eps", "weight_decay")  # of an optimizer's parameter groups
SCALER_STATE = (
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "cur_hysteresis",
)  # of DeepSpeed's dynamic loss scaler
BUFFERS = "model/buffers.safetensors"
MARKS = ("latest", "best")  # files that hold a checkpoint's name


class Saver:
    """Resumes a run, and knows when a checkpoint is due and what goes into it next to the tensors.

    Args:
        args: --save_every, --save_epochs, --keep_last, --load_best_at_end, --resume,
            --resume_force, --no_save, --eval_only.
        run: the ranks.
        folder: the run's output folder.
        model, optimizer: as wrapped by the strategy; for DeepSpeed the engine and its optimizer.
        scaler: torch's GradScaler.
        identity: what this run is, see `identify`.
        blueprint: the model's description.
        train: the training blocks; a stream has a place to be saved.
    """

    def __init__(
        self,
        args,
        run: Run,
        folder: Path,
        model,
        optimizer,
        scaler,
        identity: dict,
        blueprint,
        train,
    ):
        self.args, self.run, self.folder, self.model, self.scaler = (
            args,
            run,
            folder / "checkpoints",
            model,
            scaler,
        )
        self.identity, self.blueprint, self.train = identity, blueprint, train
        self.state = (
            None
            if args.eval_only
            else ShardedState(getattr(model, "module", model), optimizer, run.device)
        )
        self.may_save = self._may_save(optimizer)
        self._stop_before, self._saved_at, self.best_is_loaded = None, None, False
        self._loaded_from: Path | None = None
        self._resumed_at = -1  # the step of the checkpoint in `folder` that this run continues
        self.seconds: list[float] = []  # that training waited for each save of this process

    def _may_save(self, optimizer) -> bool:
        if self.args.eval_only:
            return False
        known = ShardedState.knows(optimizer)
        wanted = ("save_every", "save_epochs", "load_best_at_end", "resume")
        if not known and (
            asked := [flag for flag in wanted if getattr(self.args, flag) not in (None, False)]
        ):
            raise UserError(
                "Checkpoints know AdamW's states only: leave the optimizer out of the DeepSpeed file, or leave out "
                f"--{' and --'.join(asked)}."
            )
        if not known and not self.args.no_save:
            self.run.warn(
                "The DeepSpeed file's optimizer is not AdamW: a signal will end this run without a checkpoint."
            )
        return known and not self.args.no_save

    def resume(self) -> dict:
        """Fill weights and moments from the checkpoint that --resume means; nothing on disk is
        changed, see `take_over`.

        Returns:
            The checkpoint's counters, or those of a new run.
        Raises:
            UserError: there is no whole checkpoint, or it is of another run.
        """
        if self.may_save:
            self.run.stop.defer()
        if self.args.resume is None:
            return NEW_RUN
        found = find(self.args.resume, self.folder, self.run)
        if found is None:
            self.run.warn(
                f"--resume: there is no checkpoint in {self.folder} yet, so this run starts from the beginning."
            )
            return NEW_RUN
        path, manifest = found
        check_same_run(manifest["identity"], self.identity, self.args.resume_force, self.run)
        self._load(path, manifest)
        self._loaded_from = path
        self.run.say(f"▶️  Resumed from {path}")
        counters = manifest["counters"]
        if path.resolve() == step_folder(self.folder, counters["step"]).resolve():
            self._saved_at = self._resumed_at = counters["step"]
        best = counters["best"]
        if (
            best
            and self.args.load_best_at_end
            and not self.run.from_main(step_folder(self.folder, best["step"]).is_dir())
        ):
            self.run.warn(
                f"--load_best_at_end: the checkpoint of the best evaluation so far (step {best['step']}) is not in "
                f"{self.folder}: looking for the best from here on."
            )
            counters["best"] = None
        return counters

    def _load(self, path: Path, manifest: dict) -> None:
        """Everything but the counters.

        Raises:
            UserError: the checkpoint does not fit this model, or a state in it is not what the
                library wrote.
        """
        check_shapes(path, manifest, self.state)
        buffers = self._saved_buffers(path, manifest)
        try:
            if self.args.streaming:
                self.train.resume(manifest["stream"])
            self._set_scaling(manifest["scaling"])
            self._set_schedule(manifest)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"--resume {path}: its manifest is damaged ({type(error).__name__}: {shown(error)}): name "
                "an older checkpoint."
            ) from error
        load(path, manifest, self.state)
        for buffer, values in buffers:
            buffer.copy_(values)
        dist.barrier()  # from here on every rank has loaded its part

    def take_over(self, best: dict | None) -> None:
        """Make the folder of checkpoints this run's own; call it when nothing is left that could
        refuse the run.

        Checkpoints after the one that was resumed are renamed: they are broken, or of a run that
        this one replaces.

        Args:
            best: the best evaluation so far, of the checkpoint's counters.
        Raises:
            UserError: something else has the folder's name.
            OSError: the folder is not writable.
        """
        if not self.run.is_main:
            return
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise UserError(f"{self.folder} is no folder, and checkpoints go there: rename it.")
        if self.run.lock:
            remove_leftovers(self.folder)
        for path in list_checkpoints(self.folder):
            if step_of(path) > self._resumed_at:
                set_aside(path, f"aside-{path.name}")
        for mark in MARKS:
            if os.path.lexists(self.folder / mark) and not marked(self.folder, mark):
                aside = set_aside(self.folder / mark, f"{mark}.damaged")
                self.run.warn(
                    f"{self.folder / mark} does not name a checkpoint: ignored, and renamed to {aside.name}."
                )
        if best and self.args.load_best_at_end:
            write_text(self.folder / "best", step_folder(self.folder, best["step"]).name + "\n")

    def _saved_buffers(self, path: Path, manifest: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This model's buffers and the values that the checkpoint has for them.

        Raises:
            UserError: a buffer has another shape there.
        """
        if BUFFERS not in manifest["files"]:
            return []
        pairs = []
        with safe_open(path / BUFFERS, framework="pt") as file:
            saved = set(file.keys())
            for name, buffer in getattr(self.model, "module", self.model).named_buffers():
                if name in saved:
                    pairs.append((buffer, file.get_tensor(name)))
                    if pairs[-1][1].shape != buffer.shape:
                        raise UserError(
                            f"--resume {path}: the buffer {name} is {list(pairs[-1][1].shape)} there, and "
                            f"{list(buffer.shape)} in this model."
                        )
        return pairs

    def _set_schedule(self, manifest: dict) -> None:
        """Let the schedule of a user's DeepSpeed file go on; our own is a function of the step."""
        mine, saved = getattr(self.model, "lr_scheduler", None), manifest["lr_scheduler"]
        if mine and saved:
            mine.load_state_dict(saved)
            for group, values in zip(self.state.base.param_groups, manifest["groups"], strict=True):
                group.update(lr=values["lr"], betas=tuple(values["betas"]))
        elif mine:
            self.run.warn(
                "--resume: the checkpoint has no state of the DeepSpeed file's scheduler, which begins anew."
            )
        elif saved:
            self.run.warn(
                "--resume: the checkpoint's scheduler was a DeepSpeed file's; from here on --lr_scheduler decides."
            )

    def after_step(self, meter, stop: torch.Tensor) -> None:
        """Save if it is time to; save and end if a rank was asked to stop. Call it on every rank,
        after each step.

        Args:
            meter: the run's counters.
            stop: more than 0 if any rank was asked to; the same tensor on all ranks.
        Raises:
            Preempted: the run was asked to stop, and its checkpoint is complete.
        """
        every, epochs = self.args.save_every, self.args.save_epochs
        if (every and meter.step % every == 0) or (epochs and meter.at_end_of_epoch):
            self.save(meter)
        if self.may_save and self._asked(stop):
            self.save_and_stop(meter)

    def after_evaluation(self, meter) -> None:
        """Keep a checkpoint of the best evaluation. Call it on every rank."""
        if not (self.args.load_best_at_end and meter.best and meter.best["step"] == meter.step):
            return
        self.save(meter)
        if self.run.is_main:
            before, now = marked(self.folder, "best"), step_folder(self.folder, meter.step).name
            write_text(self.folder / "best", now + "\n")
            every = self.args.save_every or self.args.save_epochs  # then --keep_last decides
            if before not in ("", now) and not every:
                shutil.rmtree(self.folder / before, ignore_errors=True)

    def load_best(self, best: int, now: int) -> None:
        """Go back to the weights of the best evaluation; call it on every rank, at the end of
        training.

        Args:
            best, now: the step of that evaluation, and the step whose weights are there.
        """
        self.best_is_loaded = True
        if best == now:
            self._loaded_from = step_folder(self.folder, best)
            return
        try:
            path, manifest = find(str(step_folder(self.folder, best)), self.folder, self.run)
        except UserError as error:
            self.run.warn(
                f"--load_best_at_end: ending with the last weights, because of the best ones' checkpoint: {error}"
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
        self.run.say(f"🏅 Back to the weights of step {best}, the best evaluation")

    def _let_go_of_gathered_weights(self) -> None:
        """After an evaluation FSDP and ZeRO-3 still hold some weights whole, which would not follow
        the shards.
        """
        for module in getattr(self.model, "module", self.model).modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if hasattr(self.model, "empty_partition_cache"):
            self.model.empty_partition_cache()

    def _asked(self, stop: torch.Tensor) -> bool:
        """The answer; on a GPU that of the step before, because this step's would have to be waited
        for.
        """
        if not stop.is_cuda:
            return stop.item() > 0
        before, copied = self._stop_before, torch.cuda.Event()
        self._stop_before = torch.empty((), pin_memory=True).copy_(stop, non_blocking=True), copied
        copied.record()
        if before is None:
            return False
        before[1].synchronize()
        return before[0].item() > 0

    def save_and_stop(self, meter) -> NoReturn:
        """Save and raise Preempted; every rank calls it after the same step."""
        self.save(meter)
        raise Preempted(self.model)

    def save(self, meter) -> None:
        """Write a checkpoint of this moment, between two steps, unless there is one."""
        if meter.step == self._saved_at:
            return
        begun = time.monotonic()
        scheduler = getattr(
            self.model, "lr_scheduler", None
        )  # only where a user's DeepSpeed file brings one
        facts = {
            "counters": meter.counters(),
            "scaling": self._scaling(),
            "identity": self.identity,
            "lr_scheduler": scheduler.state_dict() if scheduler else {},
            "stream": self.train.progress() if self.args.streaming else None,
            "groups": [
                {key: group[key] for key in GROUP_KEYS} for group in self.state.base.param_groups
            ],
        }
        with self.run.bar("Saving a checkpoint", unit=""):
            path = save(
                self.folder,
                meter.step,
                facts,
                self.state,
                self.run,
                self.args.keep_last,
                self._write_model,
            )
        self._saved_at = meter.step
        self.seconds.append(time.monotonic() - begun)
        self.run.say(f"💾 {path} ({self.seconds[-1]:.1f} s)")
        meter.restart_clock()

    def weights_kept(self, meter) -> Path | None:
        """A checkpoint with the weights that the model has now, written if there is none; every
        rank calls it.

        Args:
            meter: the run's counters; None of a run that was complete before.
        Returns:
            Its folder; None if there is none and none can be written.
        """
        if self.best_is_loaded or meter is None:
            return self._loaded_from
        if not self.may_save:
            return None
        try:
            self.save(meter)
        except TrainingError as error:
            self.run.warn(str(error))
            return None
        return step_folder(self.folder, meter.step)

    def _write_model(self, folder: Path) -> None:
        export.describe(self.blueprint, folder)
        buffers = (
            {}
            if self.blueprint.lora
            else models.persistent_buffers(getattr(self.model, "module", self.model))
        )
        if buffers:
            save_file(buffers, folder / Path(BUFFERS).name)

    def _scaling(self) -> dict:
        """The loss scaler's state, torch's or DeepSpeed's; {} without one (all but fp16)."""
        if self.scaler.is_enabled():
            return self.scaler.state_dict()
        theirs = self._deepspeed_scaler()
        return {name: getattr(theirs, name) for name in SCALER_STATE} if theirs else {}

    def _set_scaling(self, saved: dict) -> None:
        """Go on with a scaler's state; of the other library's only the scale itself is taken."""
        scale, theirs = saved.get("scale", saved.get("cur_scale")), self._deepspeed_scaler()
        if scale is None:
            return
        if self.scaler.is_enabled():
            state = saved if "scale" in saved else {"scale": scale}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **state})
        elif theirs:
            for name in SCALER_STATE if "cur_scale" in saved else ():
                setattr(theirs, name, saved.get(name, getattr(theirs, name)))
            theirs.cur_scale = scale

    def _deepspeed_scaler(self):
        """DeepSpeed's dynamic loss scaler, if it has one."""
        theirs = getattr(self.state.wrapper, "loss_scaler", None)
        return theirs if hasattr(theirs, "last_overflow_iter") else None


def identify(args, run: Run, blueprint, dataset: dict, model) -> dict:
    """What should be the same in a run that goes on from a checkpoint: {"hard": …, "soft": …,
    "told": …}.

    "hard" differences make the tensors useless; "soft" ones change what is trained or evaluated on;
    "told" ones are the user's to choose, and are only mentioned.
    """
    named = getattr(model, "module", model).named_parameters()
    hard = {
        "parameters": blueprint.parameters,
        "shapes": digest_of_shapes({name: getattr(p, "ds_shape", p.shape) for name, p in named}),
        "tokenizer": tokenizer_fingerprint(blueprint.tokenizer),
    }
    if blueprint.lora:
        hard |= {"lora_r": blueprint.lora.r, "lora_alpha": blueprint.lora.alpha}
        hard["frozen weights"] = (
            f"random, from seed {args.seed}" if blueprint.random else "as they came"
        )  # in no checkpoint
    chats = args.streaming or dataset["kind"] == "chat"  # what a stream holds shows later
    soft = {
        "model": os.path.normpath(args.model),
        "dataset": dataset["sha256"],
        "blocks": dataset["blocks"],
        "seq_length": args.seq_length,
        "seed": args.seed,
        "validation_split": args.validation_split,
        "validation": (dataset.get("validation") or {}).get("sha256"),
        "template": digest_of_text(blueprint.tokenizer.chat_template) if chats else None,
        "shuffle_buffer": args.shuffle_buffer if args.streaming else None,
        "global batch": global_batch(args, run.world_size),
    }
    told = {
        "strategy": args.strategy,
        "ranks": run.world_size,
        "precision": run.precision,
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
    return {"hard": hard, "soft": soft, "told": told}


def digest_of_text(text) -> str:
    """Ten hexadecimal digits for a text, or for several by name."""
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:10]


def digest_of_shapes(shapes: dict) -> str:
    """SHA-256 of the names and shapes of a model's parameters, in whatever order they come."""
    return hashlib.sha256(
        json.dumps(sorted((name, list(shape)) for name, shape in shapes.items())).encode()
    ).hexdigest()


# ------------------------------------------------------------------------------------------- saving


def saves_due(args, before: dict, steps: int, blocks: int) -> int:
    """Checkpoints that a run will write by itself, until its end.

    Args:
        args: --save_every, --save_epochs, --load_best_at_end.
        before: the counters that it starts from.
        steps: of the whole run.
        blocks: in an epoch.
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
    run: Run,
    keep_last: int | None,
    describe,
) -> Path:
    """Write a checkpoint; every rank calls it, and returns when it is complete and on disk.

    Args:
        folder: the run's checkpoints folder.
        step: optimizer steps done; names the checkpoint.
        facts: what goes into the manifest next to the tensors.
        state: where this rank's tensors are.
        run: the ranks.
        keep_last: remove all but so many afterwards; None keeps all.
        describe: writes the model's description into the folder that it is given.
    Returns:
        The new checkpoint's folder.
    Raises:
        TrainingError: the disk is full, or not writable; all ranks raise it, and nothing of the
            checkpoint is left.
    """
    final, errors = step_folder(folder, step), FirstError()
    unfinished = folder / f"{PARTIAL}{final.name}"
    if run.is_main:
        errors.attempt(_start_checkpoint, unfinished)
        run.temporary.append(str(unfinished))  # removed should this run fail before it is complete
    dist.barrier()
    ranks = run.gather(_write_tensors(unfinished, state, run, errors))
    failed = next(
        (f"{rank['error']} [rank {number}]" for number, rank in enumerate(ranks) if rank["error"]),
        "",
    )
    if run.is_main and not failed:
        manifest = {
            **facts,
            "adam_step": state.adam_step,
            "shapes": {name: list(shape) for name, shape in state.shapes.items()},
            "pieces": [piece for rank in ranks for piece in rank["pieces"]],
            "files": {name: found for rank in ranks for name, found in rank["files"].items()},
        }
        errors.attempt(_complete_checkpoint, unfinished, final, manifest, describe)
        errors.attempt(_remove_old, folder, keep_last)
    if run.is_main:
        remove(unfinished)
        run.temporary.remove(str(unfinished))
    if failed := run.from_main(failed or str(errors)):
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
    sync_folder(unfinished)
    os.replace(unfinished, final)
    write_text(final.parent / "latest", final.name + "\n")
    sync_folder(final.parent)
    sync_folder(final.parent.parent)


def _remove_old(folder: Path, keep_last: int | None) -> None:
    for old in list_checkpoints(folder)[keep_last:] if keep_last else ():
        if old.name != marked(folder, "best"):
            shutil.rmtree(old, ignore_errors=True)


def _write_tensors(folder: Path, state: ShardedState, run: Run, errors: FirstError) -> dict:
    """Write what this rank holds, in files of about FILE_BYTES.

    Returns:
        {"pieces": …, "files": …, "error": …}: for the manifest, and what went wrong or "".
    """
    pieces, files, tensors = [], {}, {}

    def write() -> None:
        name = f"rank-{run.rank:05d}-{len(files):03d}.safetensors"
        save_file(tensors, folder / name)
        files[name] = facts_of(folder / name)

    def flush() -> None:
        errors.attempt(write)
        tensors.clear()

    most = FILE_BYTES // 12  # elements in a file, of three fp32 tensors
    room = most
    for shard in state.shards:
        with state.open(shard) as held:
            for piece in [] if state.is_copy else shard.pieces:
                begin, end = 0, piece.numel
                if state.replicated:  # every rank holds all, and each writes an equal part
                    begin, end = (
                        piece.numel * r // run.world_size for r in (run.rank, run.rank + 1)
                    )
                while begin < end:
                    stop = min(end, begin + room)
                    start = piece.start + begin
                    pieces.append(
                        {
                            "name": piece.name,
                            "start": start,
                            "numel": stop - begin,
                            "moments": len(held) > 1,
                            "file": f"rank-{run.rank:05d}-{len(files):03d}.safetensors",
                        }
                    )
                    for kind, flat in held.items():
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
    """Complete a checkpoint: what has a manifest is whole.

    Raises:
        ValueError: no version could read this manifest.
    """
    manifest = json.loads(
        json.dumps({"format_version": FORMAT_VERSION, **manifest})
    )  # as it will be read
    validate(with_defaults(manifest))
    text = json.dumps({**manifest, "sha256": digest_of_json(manifest)})
    if len(text) > LARGEST_BYTES:
        raise ValueError(f"its manifest.json would have more than {LARGEST_BYTES:,} bytes")
    write_text(folder / "manifest.json", text)


def facts_of(path: Path) -> dict:
    """Flush a file to disk; returns its size and digest for the manifest."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


# ------------------------------------------------------------------------------------------ finding


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The number in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def marked(folder: Path, mark: str) -> str:
    """The checkpoint's name in the file `mark`; "" if there is no such file, or something else in
    it."""
    try:
        with open_regular(folder / mark) as file:
            name = file.read(100).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return name if STEP_NAME.fullmatch(name) else ""


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by name, newest first; whether they are whole is another question."""
    return sorted(
        (path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name)), reverse=True
    )


def find(wanted: str, folder: Path, run: Run) -> tuple[Path, dict] | None:
    """The checkpoint to resume from: the newest whole one in `folder`, or the one that was named.

    Every rank checks some of the files, and all agree.
    Args:
        wanted: "" for the newest, or a checkpoint's folder.
    Returns:
        Its folder and manifest; None if there is none at all.
    Raises:
        UserError: none of those that are there is whole, or the one that was named is not.
    """
    candidates = None
    if run.is_main:  # what rank 0 sees: others may see a shared folder's names late
        candidates = candidates_in(Path(wanted)) if wanted else list_checkpoints(folder)
    candidates = run.from_main(candidates)
    if candidates is None:
        raise UserError(f"{wanted}: no such folder.")
    for candidate in candidates:
        manifest, why = run.from_main(read_manifest(candidate) if run.is_main else None)
        why = why or what_is_broken(candidate, manifest, run.rank, run.world_size)
        why = next((found for found in run.gather(why) if found), "")
        if not why:
            return candidate, manifest
        if wanted and candidate == Path(wanted):
            raise UserError(f"--resume {wanted}: {why}.")
        run.warn(f"Passed over the checkpoint {candidate}: {why}.")
    if wanted or candidates:
        raise UserError(
            f"--resume: there is no whole checkpoint in {wanted or folder}"
            + ("." if wanted else "; remove the folder to start anew.")
        )
    return None


def candidates_in(path: Path) -> list[Path] | None:
    """A checkpoint's folder as it is; of a run's folder, or its folder of checkpoints, all of them,
    newest first.

    Returns:
        None if there is no such folder.
    """
    if not path.is_dir():
        return None
    if path.name.startswith("step-") or (path / "manifest.json").exists():
        return [path]
    return list_checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)


def open_alone(wanted: Path) -> tuple[Path, dict]:
    """A checkpoint for a program that is no run: (its folder, its manifest), every file checked.

    Args:
        wanted: a checkpoint's folder, a run's, or a run's folder of checkpoints, of which the
            newest is taken.
    Raises:
        UserError: it is no checkpoint, or not whole.
    """
    wanted = next(iter(candidates_in(wanted) or ()), wanted)
    manifest, why = read_manifest(wanted)
    if why := why or what_is_broken(wanted, manifest):
        raise UserError(f"{wanted}: {why}.")
    return wanted, manifest


# ------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Source:
    """Consecutive elements of a parameter in a checkpoint's file."""

    start: int
    numel: int
    file: str
    key: str
    moments: bool


class Reader:
    """Reads any range of any parameter out of a checkpoint, whatever ranks wrote it.

    Raises:
        TrainingError: a file cannot be read.
    """

    def __init__(self, folder: Path, manifest: dict):
        self.folder, self._files, self._sources = folder, {}, {}
        for piece in manifest["pieces"]:
            key = f"{piece['name']}@{piece['start']}"
            source = Source(piece["start"], piece["numel"], piece["file"], key, piece["moments"])
            self._sources.setdefault(piece["name"], []).append(source)

    def close(self) -> None:
        """Close the files that are open; the next read opens them again."""
        self._files.clear()

    def _open(self, name: str):
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise TrainingError(f"{self.folder / name} cannot be read: {error}") from error
        return self._files[name]

    def _parts(self, name: str, start: int, numel: int) -> Iterator[tuple[Source, int, int]]:
        for source in self._sources.get(name, ()):  # a parameter without elements has none
            begin, end = max(start, source.start), min(start + numel, source.start + source.numel)
            if begin < end:
                yield source, begin, end

    def read_into(self, flat: torch.Tensor, name: str, kind: str, start: int) -> None:
        """Fill a flat tensor with the elements of parameter `name` from `start` on."""
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
    """
    Raises:
        UserError: the checkpoint lacks a parameter, or has it in another shape.
    """
    for name, shape in state.shapes.items():
        there = manifest["shapes"].get(name)
        if there not in (
            list(shape),
            [math.prod(shape)],
        ):  # DeepSpeed's universal files of stage 3 are flat
            raise UserError(
                f"--resume {checkpoint}: {name} is {there or 'missing'} there, and {list(shape)} in this model."
            )


def load(checkpoint: Path, manifest: dict, state: ShardedState) -> None:
    """Fill this rank's masters and moments, and the working copies, from a checkpoint of the same
    shapes.

    Raises:
        TrainingError: a file cannot be read.
    """
    reader = Reader(checkpoint, manifest)
    for shard in state.shards:
        with state.open(shard, write=True) as held:
            for piece in shard.pieces:
                for kind, flat in held.items():
                    reader.read_into(
                        flat[piece.offset : piece.offset + piece.numel],
                        piece.name,
                        kind,
                        piece.start,
                    )
    state.set_adam_step(manifest["adam_step"])
    state.finish_writing()


# ------------------------------------------------------------------------------ same run or another


def check_same_run(saved: dict, now: dict, forced: bool, run: Run) -> None:
    """Refuse a checkpoint of another run.

    Args:
        saved, now: what `identify` said then, and says now. What is not known of then is not
            compared.
        forced: --resume_force: soft differences are only told.
    Raises:
        UserError: names the differences.
    """
    for kind in ("hard", "soft", "told"):
        there, here = saved[kind], now[kind]
        found = [
            f"{key} {shown(there[key])} there, {shown(here[key])} here"
            for key in here
            if key in there and there[key] != here[key]
        ]
        if not found:
            continue
        if kind == "told" or (kind == "soft" and forced):
            run.warn(f"--resume: going on, and not as before: {'; '.join(found)}.")
            continue
        advice = " (--resume_force goes on all the same)" if kind == "soft" else ""
        raise UserError(f"--resume: the checkpoint is of another run: {'; '.join(found)}{advice}.")
