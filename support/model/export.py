"""Export the trained model as a folder that `AutoModelForCausalLM.from_pretrained` loads.

    config.json, generation_config.json, tokenizer files    by `ModelSpec.describe`
    model.safetensors                                       or several files and an index
    README.md                                               the model card

Weights are written one at a time, each directly to its position in its file. An export therefore
needs memory for the largest weight on one rank; no rank needs memory for a second model.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from support.cli.arguments import Arguments
from support.errors import FirstError, TrainingError, UserError
from support.files.atomic import finish_folder, start_folder, write_text
from support.files.safetensors_writer import FILE_BYTES, WeightFiles
from support.memory.system import host_bytes
from support.model import lora
from support.model.card import model_card
from support.model.trained import TrainedModel
from support.model.weights import DTYPES, persistent_buffers
from support.optimizers import OPTIMIZERS
from support.units import GB, perplexity_of
from support.unwrap import unwrapped


class ExportFailed(TrainingError):
    """The trained model could not be written. All ranks raise this error together."""


class Target:
    """Destination folder of an export, with its state at the start of the run.

    Args:
        named: the folder as the user wrote it.
        overwrite: replace whatever the folder contains at the end of the run.
        own: the folder contains an earlier export of the same run.
    """

    # The repository on the hub to which the export is pushed (rank 0), or None.
    repository: str | None = None

    def __init__(self, named: Path, overwrite: bool, own: bool):
        self.named, self.folder, self._overwrite = named, named.absolute(), overwrite
        self._seen = _identity(self.folder) if own else None

    @property
    def may_be_replaced(self) -> bool:
        """Whether the folder may be replaced.

        True with --overwrite, or if the folder is this run's own earlier export and is unchanged.
        """
        return self._overwrite or (self._seen is not None and _identity(self.folder) == self._seen)


def _identity(folder: Path) -> tuple | None:
    try:
        status = folder.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def target_of(args: Arguments, output_dir: Path, earlier: dict | None) -> Target:
    """Return the destination of a run's export.

    It is the folder named by --export_hf, by default `hf` in the run's own folder.

    Args:
        earlier: results.json of the run that --resume continues.
    """
    exported = (earlier or {}).get("export")
    own = not args.export_hf or (
        isinstance(exported, dict) and exported.get("folder") == args.export_hf
    )
    return Target(Path(args.export_hf or output_dir / "hf"), args.overwrite, own)


def finish(trained: TrainedModel, results, target: Target, args: Arguments, state) -> Path | None:
    """Export the trained model, unless the flags exclude it or a complete run has exported it.

    Every rank calls this function.

    Args:
        state: the run's TrainState; None for a run that was complete before it was resumed.
    Returns:
        The folder with the exported model; None if the flags exclude it.
    Raises:
        TrainingError: the export failed; the message says where the trained weights are.
    """
    if args.no_export or args.eval_only:
        return None
    if trained.ctx.broadcast_from_rank0(
        results.was_complete and not args.export_hf and target.folder.exists()
    ):
        return target.folder
    facts = {**results.facts, "merged": args.merge_lora}
    if trained.best_is_loaded:
        loss = facts["best_eval_loss"]
        facts |= {"eval_loss": loss, "perplexity": perplexity_of(loss)}
        facts |= {"steps": facts["best_step"], "train_loss_last": None, "tokens": None}
    card = model_card(facts, trained.identity)
    try:
        exported = export_model(trained, target, args, card)
    except ExportFailed as error:
        if checkpoint := trained.weights_kept(state):
            location = (
                f"The trained weights are in {checkpoint}: `python scripts/convert_checkpoint.py "
                f"{checkpoint} --to hf FOLDER` exports them, and so does the same run with "
                "--resume."
            )
        else:
            location = _rescue(trained, args, card)
        raise TrainingError(f"{error} {location}") from error
    results.update(export=exported)
    return Path(exported["folder"])


def _rescue(trained: TrainedModel, args: Arguments, card: str) -> str:
    """Export the trained model to the temporary directory of rank 0's host.

    Every rank calls this function.

    Returns:
        A sentence that names the location of the weights.
    """
    folder = None
    if trained.ctx.is_main:
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="distributed_training_export_"))
    folder = trained.ctx.broadcast_from_rank0(folder)
    if folder is None:
        return "The trained weights are lost: the temporary folder is not writable."
    try:
        export_model(trained, Target(folder, overwrite=False, own=False), args, card)
    except ExportFailed as error:
        return f"The trained weights are lost: {error}"
    return f"The trained model was written to {folder} instead."


def export_model(trained: TrainedModel, target: Target, args: Arguments, card: str) -> dict:
    """Write the model that a run has trained. Every rank calls this function.

    Returns:
        The `export` entry of results.json. If another run has written to the folder since this run
        started, the model is in a new folder next to it. The entry and a warning name that folder.
    Raises:
        ExportFailed: the model could not be written. No part of it remains on disk.
    """
    ctx, spec, dtype = trained.ctx, trained.spec, DTYPES[args.export_dtype]
    start, errors = time.monotonic(), FirstError()
    temporary = errors.attempt(start_folder, target.folder) if ctx.is_main else None
    folder = temporary.path / "new" if temporary else None
    if temporary and folder:
        ctx.temporary.extend(temporary.paths)
        errors.attempt(spec.describe, folder, dtype, args.merge_lora)
    write = _write_merged if spec.lora and args.merge_lora else _write_trained
    write(trained, folder, dtype, errors)
    final = None
    if temporary and folder:
        errors.attempt(write_text, folder / "README.md", card)
        final = errors.attempt(finish_folder, temporary, target.folder, target.may_be_replaced)
        temporary.remove()
    failed, final = ctx.broadcast_from_rank0((str(errors), final))
    if failed:
        raise ExportFailed(f"The export to {target.named} failed: {failed}")
    export_path = target.named
    if final != target.folder:
        export_path = export_path.with_name(final.name)
        ctx.console.warn(
            f"{target.named} holds another run's export, which is kept: "
            "use --overwrite to replace it."
        )
    ctx.console.print0(f"🤗 {export_path}")
    return {
        "folder": str(export_path),
        "seconds": time.monotonic() - start,
        "host_peak_bytes": ctx.all_gather(host_bytes()[1]),
    }


def _write_trained(
    trained: TrainedModel, folder: Path | None, dtype: torch.dtype, errors: FirstError
) -> None:
    """Write the trained weights: the model's, or its adapters'.

    Every rank calls this function. A rank whose `folder` is None only contributes its shards.
    """
    adapters = trained.spec.lora is not None
    buffers = {} if adapters else persistent_buffers(unwrapped(trained.model))
    stem = "adapter_model" if adapters else "model"
    names = {name: lora.peft_name(name) if adapters else name for name in trained.state.shapes}
    files = None
    if folder:
        shapes = {names[name]: shape for name, shape in trained.state.shapes.items()}
        files = errors.attempt(WeightFiles, folder, shapes, dtype, buffers, FILE_BYTES, stem)
    for name, weight in trained.state.whole_weights():
        if files:
            errors.attempt(files.write, names[name], weight)
    if files:
        errors.attempt(files.finish)


def _write_merged(
    trained: TrainedModel, folder: Path | None, dtype: torch.dtype, errors: FirstError
) -> None:
    """Write the whole model with the adapters added, on the rank that has a `folder`."""
    adapters = {
        name: weight.clone() if folder else None for name, weight in trained.state.whole_weights()
    }

    def write(folder: Path) -> None:
        # The frozen weights are read again from their files: memory-mapped, not copied.
        model = trained.spec.load(trained.ctx, dtype="auto")
        shapes = {
            lora.base_name(name): weight.shape
            for name, weight in model.named_parameters()
            if name not in adapters
        }
        files = WeightFiles(folder, shapes, dtype, persistent_buffers(model))
        for name, weight in lora.merged(model, adapters):
            files.write(name, weight)
        files.finish()

    if folder:
        errors.attempt(write, folder)


def check_room(args: Arguments, ctx, target: Target, output_dir: Path, spec, saves: int) -> None:
    """Check before training that the disks have room for the files that the run will write.

    Raises:
        UserError: the export, or one checkpoint together with the export, does not fit on its disk.
    """
    if not ctx.is_main or ctx.simulated:
        return
    required, total = Counter(), Counter()  # bytes on each disk
    if not (args.no_export or args.eval_only):
        exported = spec.trainable if spec.lora and not args.merge_lora else spec.parameters
        required[_disk(target.folder)] += exported * DTYPES[args.export_dtype].itemsize
    total |= required
    if saves:
        moments = 2 if OPTIMIZERS[args.optim].family == "adamw" else 0
        checkpoint = 4 * (1 + moments) * spec.trainable
        kept = min(saves, args.keep_last + 1) if args.keep_last else saves
        required[_disk(output_dir)] += checkpoint
        total[_disk(output_dir)] += checkpoint * kept
    for disk, size in required.items():
        usage = shutil.disk_usage(disk)
        if usage.total == 0:  # the file system does not report its size
            continue
        free = f"{disk} has {usage.free / GB:.2f} GB free, and "
        if size > usage.free:
            both = saves and disk == _disk(output_dir)
            raise UserError(
                f"{free}{'a checkpoint with the export' if both else 'the export'} of this run "
                f"needs {size / GB:.2f} GB there: free some space, or name another folder with "
                "--output_dir or --export_hf (--no_export skips the export)."
            )
        if total[disk] > usage.free:
            ctx.console.warn(
                f"{free}all files that this run keeps there need {total[disk] / GB:.2f} GB: "
                "--keep_last 2 keeps only the newest checkpoints."
            )


def _disk(folder: Path) -> Path:
    """Return the mount point of the disk that contains `folder`, or will contain it."""
    parents = (folder.absolute(), *folder.absolute().parents)
    return next(parent for parent in parents if parent.is_mount())
