"""The trained model as a folder that `AutoModelForCausalLM.from_pretrained` reads.

    config.json, generation_config.json, tokenizer files     what `describe` writes; a checkpoint holds them, too
    model.safetensors                                        or several files and model.safetensors.index.json
    README.md                                                the model card

Weights are written one by one, each straight to its place in its file, so that exporting needs the
memory of the largest weight on one rank and not of a second model, on any rank.
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
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers

from support.cli.flags import EMBEDDED_MODEL
from support.cli.validate import is_local_model
from support.errors import FirstError, TrainingError, UserError
from support.files.atomic import TemporaryFolder, sync_folder, sync_tree, write_text
from support.files.safetensors_writer import FILE_BYTES, WeightFiles
from support.memory import measure as memory
from support.model import lora
from support.model import resolve as models


class ExportFailed(TrainingError):
    """The trained model could not be written; all ranks raise it together."""


class Target:
    """The folder that an export goes to, as it was when the run began.

    Args:
        named: the folder as the user named it.
        overwrite: replace whatever is there at the end.
        own: what is there is an earlier export of the same run.
    """

    def __init__(self, named: Path, overwrite: bool, own: bool):
        self.named, self.folder, self._overwrite = named, named.absolute(), overwrite
        self._seen = _identity(self.folder) if own else None

    @property
    def may_be_replaced(self) -> bool:
        """Whether --overwrite allows it, or this run's own earlier export is there, unchanged."""
        return self._overwrite or (self._seen is not None and _identity(self.folder) == self._seen)


def _identity(folder: Path) -> tuple | None:
    try:
        found = folder.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def target_of(args, output_dir: Path, earlier: dict | None) -> Target:
    """Where --export_hf sends a run's model; by default into the run's own folder.

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


def export_model(model, state, blueprint, target: Target, args, run, card: str) -> dict:
    """Write the model that a run has trained; every rank calls it.

    Args:
        model: as wrapped by the strategy.
        state: the run's ShardedState.
        blueprint: the model's description.
        target: where it goes.
        args: --export_dtype, --merge_lora.
        run: the ranks.
        card: the model card's text.
    Returns:
        What results.json says of it. If another run has written to the folder since this one began,
        the model is in a folder next to it, which is named here and in a message.
    Raises:
        ExportFailed: it could not be written; nothing of it is left.
    """
    dtype, begun, errors = models.DTYPES[args.export_dtype], time.monotonic(), FirstError()
    writing = errors.attempt(start_folder, target.folder) if run.is_main else None
    folder = writing.path / "new" if writing else None
    if writing:
        run.temporary += writing.paths
        errors.attempt(describe, blueprint, folder, dtype, args.merge_lora)
    if blueprint.lora and args.merge_lora:
        adapters = {
            name: weight.clone() if folder else None for name, weight in state.whole_weights()
        }
        if folder:
            errors.attempt(_write_merged, adapters, blueprint, folder, dtype, run)
    else:
        _write_trained(
            state,
            models.persistent_buffers(getattr(model, "module", model)),
            blueprint,
            folder,
            dtype,
            errors,
        )
    final = None
    if folder:
        errors.attempt(write_text, folder / "README.md", card)
        final = errors.attempt(finish_folder, writing, target.folder, target.may_be_replaced)
        writing.remove()
    failed, final = run.from_main((str(errors), final))
    if failed:
        raise ExportFailed(f"The export to {target.named} failed: {failed}")
    named = target.named
    if final != target.folder:
        named = named.with_name(final.name)
        run.warn(
            f"{target.named} holds another run's export, which is kept: use --overwrite to replace it."
        )
    run.say(f"🤗 {named}")
    peaks = run.gather(memory.host_bytes()[1])
    return {"folder": str(named), "seconds": time.monotonic() - begun, "host_peak_bytes": peaks}


def rescue_weights(
    failed: ExportFailed, checkpoint: Path | None, export_to: Callable[[Target], object], run
) -> TrainingError:
    """Keep the trained weights after a failed export; every rank calls it.

    Args:
        failed: what `export_model` raised.
        checkpoint: holds the weights. Without one they are exported to the temporary folder of rank
            0's host.
        export_to: calls `export_model` with another target.
        run: the ranks.
    Returns:
        The error with a sentence that says where the weights are.
    """
    if checkpoint:
        convert = f"python scripts/convert_checkpoint.py {checkpoint} --to hf FOLDER"
        return TrainingError(
            f"{failed} The trained weights are in {checkpoint}: `{convert}` exports them, and so does "
            "the same run with --resume."
        )
    folder = None
    if run.is_main:
        folder = FirstError().attempt(
            lambda: Path(tempfile.mkdtemp(prefix="distributed_training_export_"))
        )
    folder = run.from_main(folder)
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
    state, buffers: dict, blueprint, folder: Path | None, dtype: torch.dtype, errors: FirstError
) -> None:
    """What was trained: the model, or its adapters. Every rank calls it; one without a folder only
    gives its share.
    """
    rename, buffers = (lora.peft_name, {}) if blueprint.lora else (str, buffers)
    files = None
    if folder:
        announced = {
            rename(name): torch.empty(shape, dtype=dtype, device="meta")
            for name, shape in state.shapes.items()
        }
        announced |= {name: buffer.to("meta") for name, buffer in buffers.items()}
        stem = "adapter_model" if blueprint.lora else "model"
        files = errors.attempt(WeightFiles, folder, announced, FILE_BYTES, stem)
    for name, weight in state.whole_weights():
        if files:
            errors.attempt(files.write, rename(name), weight)
    if files:
        for name, buffer in buffers.items():
            errors.attempt(files.write, name, buffer)
        errors.attempt(files.check_complete)


def _write_merged(adapters: dict, blueprint, folder: Path, dtype: torch.dtype, run) -> None:
    """The whole model, its weights read again from where it came from, with the adapters added; on
    rank 0."""
    model = blueprint.load(run, dtype="auto")  # only mapped
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
    """A temporary folder next to `folder`, with an empty folder `new` in it, see `finish_folder`.

    Raises:
        OSError: the folder above is not writable.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A name has at most 255 bytes, and a character up to four.
    temporary = TemporaryFolder(folder.parent, f".{folder.name[:40]}.partial-")
    (temporary.path / "new").mkdir()
    return temporary


def finish_folder(temporary: TemporaryFolder, folder: Path, replace: bool) -> Path:
    """Flush what was written to disk and move it to `folder`, or if that is taken to `folder`-2,
    `folder`-3 …

    Renaming a folder to the name of one with contents fails, so two processes that finish at the
    same instant cannot replace each other's.

    Args:
        temporary: of `start_folder`; the caller removes it.
        folder: the name.
        replace: what has the name is moved into `temporary`, and so removed.
    Returns:
        Where it is now.
    Raises:
        OSError: the disk is full, or not writable; what had the name has it still.
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


def check_room(args, run, target: Target, output_dir: Path, blueprint, saves: int) -> None:
    """Before training: is there room for what will be written at the end?

    Args:
        args: --no_export, --eval_only, --export_dtype, --merge_lora, --keep_last.
        run: the ranks; all call it.
        target, output_dir: where the export and the checkpoints go.
        blueprint: the model's description.
        saves: checkpoints that this run will write.
    Raises:
        UserError: the export, or one checkpoint with it, does not fit on its disk.
    """
    if not run.is_main or run.simulated:
        return
    least, most = Counter(), Counter()  # bytes on each disk
    if not (args.no_export or args.eval_only):
        exported = (
            blueprint.trainable if blueprint.lora and not args.merge_lora else blueprint.parameters
        )
        least[_disk(target.folder)] += exported * models.DTYPES[args.export_dtype].itemsize
    most |= least
    if saves:
        checkpoint = 12 * blueprint.trainable
        least[_disk(output_dir)] += checkpoint
        most[_disk(output_dir)] += checkpoint * min(
            saves, args.keep_last + 1 if args.keep_last else saves
        )
    for disk, size in least.items():
        usage = shutil.disk_usage(disk)
        if usage.total == 0:  # the file system does not report its size
            continue
        text = f"{disk} has {usage.free / 2**30:.2f} GB free, and "
        if size > usage.free:
            what = (
                "the export"
                if disk != _disk(output_dir) or not saves
                else "a checkpoint with the export"
            )
            raise UserError(
                f"{text}{what} of this run needs {size / 2**30:.2f} GB there: free some space, or name another "
                "folder with --output_dir or --export_hf (--no_export leaves the export out)."
            )
        if most[disk] > usage.free:
            run.warn(
                f"{text}all that this run keeps there needs {most[disk] / 2**30:.2f} GB: --keep_last 2 keeps only "
                "the newest checkpoints."
            )


def _disk(folder: Path) -> Path:
    """The mount point of the disk that holds `folder`, or will hold it."""
    existing = next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir()
    )
    return next(
        parent
        for parent in (existing, *existing.parents)
        if os.path.ismount(parent) or parent == parent.parent
    )


def describe(
    blueprint, folder: Path, dtype: torch.dtype | None = None, whole: bool = False
) -> None:
    """Write all of a model but its weights: configuration, generation configuration and tokenizer;
    of adapters, theirs.

    Args:
        dtype: the weights' type, noted in the configuration; None leaves it as it is.
        whole: describe the model itself although it has adapters, which have been added to its
            weights.
    """
    folder.mkdir(exist_ok=True)
    blueprint.tokenizer.save_pretrained(folder)
    if blueprint.lora and not whole:
        blueprint.lora.describe(folder)
        return
    config = copy.deepcopy(blueprint.config)
    config.use_cache = True  # off for training only
    for name, value in blueprint.own_settings.items():
        setattr(config.get_text_config(), name, value)
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    if dtype is not None:
        for name, value in models.as_dtype(dtype).items():
            setattr(config, name, value)
    config.save_pretrained(folder)
    try:
        blueprint.generation.save_pretrained(folder)
    except (
        ValueError
    ):  # older versions of transformers refuse to write what some models were published with
        write_text(folder / "generation_config.json", blueprint.generation.to_json_string())


def model_card(facts: dict, identity: dict) -> str:
    """README.md of an exported model, with the hub's metadata on top.

    Args:
        facts: results.json's keys, as far as they are known.
        identity: what the run was, see `checkpoint.identify`.
    """
    base, dataset = facts["model"], (facts.get("dataset") or {}).get("name")
    scratch = identity["told"].get("from_scratch") or base == EMBEDDED_MODEL
    hyperparameters = {**identity["soft"], **identity["told"], "from_scratch": scratch}
    adapters = (
        identity["hard"] if "lora_r" in identity["hard"] and not facts.get("merged") else None
    )
    metadata = [
        "---",
        f"library_name: {'peft' if adapters else 'transformers'}",
        "pipeline_tag: text-generation",
    ]
    metadata += [f"base_model: {base}"] if not scratch and not is_local_model(base) else []
    metadata += ["---"]
    results = {
        "Training loss, first step": facts.get("train_loss_first"),
        "Training loss, last step": facts.get("train_loss_last"),
        "Evaluation loss": facts.get("eval_loss"),
        "Perplexity": facts.get("perplexity"),
        "Tokens seen": facts.get("tokens"),
        "Optimizer steps": facts.get("steps"),
        "Tokens per second": facts.get("tokens_per_second"),
    }
    versions = ", ".join(
        f"{name} {number}" for name, number in (facts.get("versions") or {}).items()
    )
    parts = [
        "\n".join(metadata),
        f"# {Path(base).name}, {'trained' if scratch else 'fine-tuned'}"
        + (f" on {dataset}" if dataset else "")
        + (
            f": LoRA adapters, r {adapters['lora_r']}, alpha {adapters['lora_alpha']:g}"
            if adapters
            else ""
        ),
        f"{facts['parameters']:,} parameters; {'random weights of the architecture of' if scratch else 'base model'} `{base}`. "
        f"Trained with `real_model_example.py --strategy {facts['strategy']}` on {facts['world_size']} {_devices(facts)}.",
        "## Results\n\n" + _table(results.items(), "Measured"),
        "## Training\n\n" + _table(hyperparameters.items(), "Hyperparameter"),
    ]
    if facts.get("dataset"):
        streamed = facts["dataset"].get("streaming")
        of = (
            "its files' names, sizes, beginnings and ends, or of its commit,"
            if streamed
            else "the corpus"
        )
        parts.append(f"Data: {dataset}, SHA-256 of {of} `{facts['dataset'].get('sha256')}`.")
    if versions:
        parts.append(f"Versions: {versions}.")
    if facts.get("command"):
        parts.append(f"```bash\n{facts['command']}\n```")
    return "\n\n".join(parts) + "\n"


def _devices(facts: dict) -> str:
    if "hardware" not in facts:
        return "ranks"
    return f"× {facts['hardware']['gpu']}" if facts["hardware"]["gpu"] else "CPU processes"


def _table(rows: Iterable[tuple[str, object]], title: str) -> str:
    lines = [f"| {title} | Value |", "|---|---|"]
    for name, value in rows:
        if isinstance(value, float):
            value = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
        if value is not None:
            lines.append(f"| {name} | {value} |")
    return "\n".join(lines)
