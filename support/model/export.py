"""Export the trained model as a folder that `AutoModelForCausalLM.from_pretrained` loads.

    config.json, generation_config.json, tokenizer files    written by `describe`, as in checkpoints
    model.safetensors                                       or several files and an index,
                                                            model.safetensors.index.json
    README.md                                               the model card

Weights are written one at a time, each directly to its position in its file. An export therefore
needs memory for the largest weight on one rank; no rank needs memory for a second model.
"""

from __future__ import annotations

import copy
import errno
import itertools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from support.errors import FirstError, TrainingError, UserError
from support.files.atomic import TemporaryFolder, sync_folder, sync_tree, write_text
from support.files.safetensors_writer import FILE_BYTES, WeightFiles
from support.memory import measure as memory
from support.model import lora
from support.model import resolve as models
from support.units import GB


class ExportFailed(TrainingError):
    """The trained model could not be written. All ranks raise this error together."""


class Target:
    """Destination folder of an export, with its state at the start of the run.

    Args:
        named: the folder as the user wrote it.
        overwrite: replace whatever the folder contains at the end of the run.
        own: the folder contains an earlier export of the same run.
    """

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


def target_of(args, output_dir: Path, earlier: dict | None) -> Target:
    """Return the destination of a run's export.

    It is the folder named by --export_hf, by default `hf` in the run's own folder.

    Args:
        args: --export_hf, --overwrite.
        output_dir: the run's folder.
        earlier: results.json of the run that --resume continues.
    """
    exported = (earlier or {}).get("export")
    own = not args.export_hf or (
        isinstance(exported, dict) and exported.get("folder") == args.export_hf
    )
    return Target(Path(args.export_hf or output_dir / "hf"), args.overwrite, own)


def export_model(model, state, spec, target: Target, args, ctx, card: str) -> dict:
    """Write the model that a run has trained. Every rank calls this function.

    Args:
        model: as wrapped by the strategy.
        state: the run's ShardedState.
        spec: the model's description.
        target: the destination folder.
        args: --export_dtype, --merge_lora.
        ctx: the ranks.
        card: the text of the model card.
    Returns:
        The `export` entry of results.json. If another run has written to the folder since this run
        started, the model is in a new folder next to it. The entry and a warning name that folder.
    Raises:
        ExportFailed: the model could not be written. No part of it remains on disk.
    """
    dtype, start, errors = models.DTYPES[args.export_dtype], time.monotonic(), FirstError()
    temporary = errors.attempt(start_folder, target.folder) if ctx.is_main else None
    folder = temporary.path / "new" if temporary else None
    if temporary:
        ctx.temporary += temporary.paths
        errors.attempt(describe, spec, folder, dtype, args.merge_lora)
    if spec.lora and args.merge_lora:
        adapters = {
            name: weight.clone() if folder else None for name, weight in state.whole_weights()
        }
        if folder:
            errors.attempt(_write_merged, adapters, spec, folder, dtype, ctx)
    else:
        _write_trained(
            state,
            models.persistent_buffers(getattr(model, "module", model)),
            spec,
            folder,
            dtype,
            errors,
        )
    final = None
    if folder:
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
    peaks = ctx.all_gather(memory.host_bytes()[1])
    return {
        "folder": str(export_path),
        "seconds": time.monotonic() - start,
        "host_peak_bytes": peaks,
    }


def rescue_weights(
    failed: ExportFailed, checkpoint: Path | None, export_to: Callable[[Target], object], ctx
) -> TrainingError:
    """Preserve the trained weights after a failed export. Every rank calls this function.

    Args:
        failed: the error that `export_model` raised.
        checkpoint: contains the weights. Without one, they are exported to the temporary directory
            of rank 0's host.
        export_to: calls `export_model` with another target.
        ctx: the ranks.
    Returns:
        The error, with a sentence that names the location of the weights.
    """
    if checkpoint:
        convert = f"python scripts/convert_checkpoint.py {checkpoint} --to hf FOLDER"
        return TrainingError(
            f"{failed} The trained weights are in {checkpoint}: `{convert}` exports them, "
            "and so does the same run with --resume."
        )
    folder = None
    if ctx.is_main:
        folder = FirstError().attempt(
            lambda: Path(tempfile.mkdtemp(prefix="distributed_training_export_"))
        )
    folder = ctx.broadcast_from_rank0(folder)
    if folder:
        try:
            export_to(Target(folder, overwrite=False, own=False))
            return TrainingError(f"{failed} The trained model was written to {folder} instead.")
        except ExportFailed as error:
            return TrainingError(f"{failed} The trained weights are lost: {error}")
    return TrainingError(
        f"{failed} The trained weights are lost: the temporary folder is not writable."
    )


def _write_trained(
    state, buffers: dict, spec, folder: Path | None, dtype: torch.dtype, errors: FirstError
) -> None:
    """Write the trained weights: the model's, or its adapters'.

    Every rank calls this function. A rank whose `folder` is None only contributes its shards.
    """
    rename, buffers = (lora.peft_name, {}) if spec.lora else (str, buffers)
    files = None
    if folder:
        announced = {
            rename(name): torch.empty(shape, dtype=dtype, device="meta")
            for name, shape in state.shapes.items()
        }
        announced |= {name: buffer.to("meta") for name, buffer in buffers.items()}
        stem = "adapter_model" if spec.lora else "model"
        files = errors.attempt(WeightFiles, folder, announced, FILE_BYTES, stem)
    for name, weight in state.whole_weights():
        if files:
            errors.attempt(files.write, rename(name), weight)
    if files:
        for name, buffer in buffers.items():
            errors.attempt(files.write, name, buffer)
        errors.attempt(files.check_complete)


def _write_merged(adapters: dict, spec, folder: Path, dtype: torch.dtype, ctx) -> None:
    """Write the whole model with the adapters added, on rank 0.

    The base weights are loaded again from the model's original files.
    """
    model = spec.load(ctx, dtype="auto")  # memory-mapped, not copied
    whole = {
        lora.base_name(name): weight
        for name, weight in model.named_parameters()
        if name not in adapters
    }
    buffers = models.persistent_buffers(model)
    announced = {
        name: torch.empty(weight.shape, dtype=dtype, device="meta")
        for name, weight in whole.items()
    }
    files = WeightFiles(
        folder, announced | {name: buffer.to("meta") for name, buffer in buffers.items()}
    )
    for name, weight in itertools.chain(lora.merged(model, adapters), buffers.items()):
        files.write(name, weight)
    files.check_complete()


def start_folder(folder: Path) -> TemporaryFolder:
    """Create a temporary folder next to `folder`, with an empty `new` in it for `finish_folder`.

    Raises:
        OSError: the parent folder is not writable.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A name has at most 255 bytes, and a character up to four.
    temporary = TemporaryFolder(folder.parent, f".{folder.name[:40]}.partial-")
    (temporary.path / "new").mkdir()
    return temporary


def finish_folder(temporary: TemporaryFolder, folder: Path, replace: bool) -> Path:
    """Flush a new folder to disk and rename it to `folder`.

    If that name is taken, the new name is `folder`-2, `folder`-3 …

    Renaming a folder to the name of a non-empty folder fails. Two processes that finish at the same
    time therefore cannot replace each other's result.

    Args:
        temporary: returned by `start_folder`; the caller removes it.
        folder: the final name.
        replace: move an existing folder of this name into `temporary`, which removes it.
    Returns:
        The final path.
    Raises:
        OSError: the disk is full or not writable. An existing folder keeps its name.
    """
    new, old = temporary.path / "new", temporary.path / "old"
    sync_tree(new)
    if replace and os.path.lexists(folder):
        os.rename(folder, old)
    for number in range(1, 1000):
        final = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            os.rename(new, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                continue
            if old.exists():
                os.rename(old, folder)
            raise
        sync_folder(folder.parent)
        return final
    raise FileExistsError(errno.EEXIST, "exists, and so do 1,000 numbered ones", str(folder))


def check_room(args, ctx, target: Target, output_dir: Path, spec, saves: int) -> None:
    """Check before training that the disks have room for the files that the run will write.

    Args:
        args: --no_export, --eval_only, --export_dtype, --merge_lora, --keep_last.
        ctx: the ranks; all call this function.
        target, output_dir: destinations of the export and of the checkpoints.
        spec: the model's description.
        saves: checkpoints that this run will write.
    Raises:
        UserError: the export, or one checkpoint together with the export, does not fit on its disk.
    """
    if not ctx.is_main or ctx.simulated:
        return
    required, total = Counter(), Counter()  # bytes on each disk
    if not (args.no_export or args.eval_only):
        exported = spec.trainable if spec.lora and not args.merge_lora else spec.parameters
        required[_disk(target.folder)] += exported * models.DTYPES[args.export_dtype].itemsize
    total |= required
    if saves:
        checkpoint = 12 * spec.trainable
        required[_disk(output_dir)] += checkpoint
        total[_disk(output_dir)] += checkpoint * min(
            saves, args.keep_last + 1 if args.keep_last else saves
        )
    for disk, size in required.items():
        usage = shutil.disk_usage(disk)
        if usage.total == 0:  # the file system does not report its size
            continue
        text = f"{disk} has {usage.free / GB:.2f} GB free, and "
        if size > usage.free:
            written = (
                "the export"
                if disk != _disk(output_dir) or not saves
                else "a checkpoint with the export"
            )
            raise UserError(
                f"{text}{written} of this run needs {size / GB:.2f} GB there: free some space, "
                "or name another folder with --output_dir or --export_hf "
                "(--no_export leaves the export out)."
            )
        if total[disk] > usage.free:
            ctx.console.warn(
                f"{text}all that this run keeps there needs {total[disk] / GB:.2f} GB: "
                "--keep_last 2 keeps only the newest checkpoints."
            )


def _disk(folder: Path) -> Path:
    """Return the mount point of the disk that contains `folder`, or will contain it."""
    existing = next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir()
    )
    return next(
        parent
        for parent in (existing, *existing.parents)
        if os.path.ismount(parent) or parent == parent.parent
    )


def describe(spec, folder: Path, dtype: torch.dtype | None = None, whole: bool = False) -> None:
    """Write everything of a model except its weights: configurations and tokenizer.

    For a model with adapters, write the tokenizer and the adapters' configuration.

    Args:
        spec: the model's description.
        folder: created if it does not exist.
        dtype: the type of the weights, recorded in the configuration; None leaves it unchanged.
        whole: describe the model itself although it has adapters, because they have been added to
            its weights.
    """
    folder.mkdir(exist_ok=True)
    spec.tokenizer.save_pretrained(folder)
    if spec.lora and not whole:
        spec.lora.describe(folder)
        return
    config = copy.deepcopy(spec.config)
    config.use_cache = True  # disabled for training only
    for name, value in spec.own_settings.items():
        setattr(config.get_text_config(), name, value)
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    if dtype is not None:
        for name, value in models.as_dtype(dtype).items():
            setattr(config, name, value)
    config.save_pretrained(folder)
    try:
        spec.generation.save_pretrained(folder)
    except ValueError:
        # Older versions of transformers reject the generation configuration of some models.
        write_text(folder / "generation_config.json", spec.generation.to_json_string())
