"""Export the trained model as a folder that `AutoModelForCausalLM.from_pretrained` loads.

    config.json, generation_config.json, tokenizer files    by `write_description`
    model.safetensors                                       or several files and an index
    README.md                                               the model card

An export needs memory for one file of weights on rank 0, and none on the other ranks.
"""

from __future__ import annotations

import shlex
import time
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

import torch

from distributed_training import console
from distributed_training.about import command_of
from distributed_training.data.facts import bits_per_byte
from distributed_training.errors import FirstError, TrainingError, redact
from distributed_training.files import atomic
from distributed_training.files.safetensors_writer import FILE_BYTES, WeightFiles
from distributed_training.memory.system import host_bytes
from distributed_training.model.description import write_description
from distributed_training.model.trained_model import TrainedModel
from distributed_training.model.weights import persistent_buffers
from distributed_training.settings.output import OutputSettings
from distributed_training.units import perplexity_of


class Target(NamedTuple):
    """Destination folder of an export."""

    folder: Path
    replace: bool  # what the folder contains may be replaced; else a new name is used
    repository: str | None = None  # on the hub, to which rank 0 pushes the folder


def target_of(
    output: OutputSettings, merge_lora: bool, output_dir: Path, earlier: dict | None
) -> Target:
    """Return the destination: --export_hf, or `hf` in the run's folder.

    Args:
        earlier: results.json of the run that --resume continues.
    """
    # Imported before the training: a changed installation must not fail the export after it.
    from distributed_training.model import card  # noqa: F401

    if merge_lora:
        from distributed_training.model import merging  # noqa: F401
    exported = (earlier or {}).get("export") or {}
    own = not output.export_hf or exported.get("folder") == redact(output.export_hf)
    return Target(Path(output.export_hf or output_dir / "hf"), output.overwrite or own)


def export_model(
    trained: TrainedModel, target: Target, facts: dict, merges: bool, dtype: torch.dtype
) -> dict:
    """Export the trained model. Every rank calls this function.

    Args:
        facts: the results so far, by keys of results.json.
        merges: whether adapters are added to the weights (--merge_lora).
        dtype: of the exported weights.
    Returns:
        The `export` entry of results.json.
    Raises:
        TrainingError: the export failed; the message names the checkpoint with the weights.
    """
    facts = {**facts, "merged": merges}
    if trained.is_best:
        loss = facts["best_eval_loss"]
        targets = facts["dataset"]["validation"].get("targets")
        facts |= {"eval_loss": loss, "perplexity": perplexity_of(loss)}
        facts |= {"bits_per_byte": bits_per_byte(loss, targets)}
        facts |= {"steps": facts["best_step"], "train_loss_last": None, "tokens": None}
    start = time.monotonic()
    from distributed_training.model import card

    text = card.model_card(facts, trained.identity)
    failed, folder = _write_folder(trained, target, text, merges, dtype)
    if failed:
        if checkpoint := trained.keep_weights():
            program = command_of("scripts/convert_checkpoint.py")
            place = shlex.quote(str(checkpoint))
            advice = (
                f"The trained weights are in {checkpoint}: `{program} {place} --to hf FOLDER` "
                "exports them; so does the same run with --resume."
            )
        else:  # often because the same disk is full
            elsewhere = Path(gettempdir()) / f"distributed_training_export_{int(time.time())}"
            elsewhere = trained.ctx.broadcast_from_rank0(elsewhere)
            lost, folder = _write_folder(trained, Target(elsewhere, False), text, merges, dtype)
            advice = f"The trained weights are lost: {lost}" if lost else f"They are in {folder}."
        raise TrainingError(f"The export to {target.folder} failed: {failed} {advice}")
    return {
        "folder": str(folder),
        "seconds": time.monotonic() - start,
        "host_peak_bytes": trained.ctx.all_gather(host_bytes()[1]),
    }


def _write_folder(
    trained: TrainedModel, target: Target, card: str, merges: bool, dtype: torch.dtype
) -> tuple[str, Path]:
    """Write the folder of a trained model.

    Returns:
        Why it could not be written, or ""; and its folder: the target, or a new one next to it if
        another run has written to the target.
    """
    ctx, spec = trained.ctx, trained.spec
    errors, final = FirstError(), target.folder
    temporary = errors.attempt(atomic.start_folder, target.folder) if ctx.is_main else None
    folder = temporary.path / "new" if temporary else None
    if temporary and folder:
        errors.attempt(write_description, spec, folder, trained.kind, dtype, merges)
    if spec.lora and merges:
        from distributed_training.model.merging import load_frozen, write_merged

        load = partial(load_frozen, spec, ctx)
        write_merged(load, trained.weights, folder, dtype, errors)
    else:
        _write_trained(trained, folder, dtype, errors)
    if temporary and folder:
        errors.attempt(atomic.write_text, folder / "README.md", card)
        final = errors.attempt(atomic.finish_folder, temporary, target.folder, target.replace)
        temporary.remove()
    failed, final = ctx.broadcast_from_rank0((str(errors), final))
    if failed:
        return failed, target.folder
    if final != target.folder:
        console.warn(f"{target.folder} exists, and is kept: --overwrite replaces it.")
    console.print0(f"🤗 {final}")
    return "", final


def _write_trained(
    trained: TrainedModel, folder: Path | None, dtype: torch.dtype, errors: FirstError
) -> None:
    """Write the trained weights, of the model or its adapters, on the rank that has a `folder`."""
    names, buffers, stem = {name: name for name in trained.weights.shapes}, {}, "model"
    if trained.spec.lora:
        from distributed_training.model.lora import peft_name

        names, stem = {name: peft_name(name) for name in names}, "adapter_model"
    else:
        buffers = persistent_buffers(trained.module)
    shapes = {names[name]: shape for name, shape in trained.weights.shapes.items()}
    files = None
    if folder:
        files = errors.attempt(WeightFiles, folder, shapes, dtype, buffers, FILE_BYTES, stem)
    for name, weight in trained.weights.whole_weights():
        if files:
            errors.attempt(files.write, names[name], weight)
    if files:
        errors.attempt(files.finish)
