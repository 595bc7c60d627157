"""Where the parts of a model are: of a run, in a folder, or on the Hugging Face hub.

Imports nothing heavy, so that wrong names are reported at once.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from distributed_training.about import command_of
from distributed_training.checkpoints.format import FROZEN, list_checkpoints
from distributed_training.cli import hub
from distributed_training.cli.check_run import MODEL_FILES
from distributed_training.cli.checks import is_local_model
from distributed_training.cli.model_folders import or_of_hub
from distributed_training.errors import MissingRequirement, UserError, redact
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import check_readable, read_user_json, shown
from distributed_training.known_models import EMBEDDED_MODEL
from distributed_training.records.recorded_run import read_folder

ADAPTERS, CONVERT = "adapter_config.json", "scripts/convert_checkpoint.py"
KINDS = {"chat": True, "pair": False, "text": False}  # of rows: whether they are conversations
RANDOM_BASE = (
    "{}: the adapters belong to random weights, which were not exported: train with --merge_lora, "
    "which exports both."
)


@dataclass(frozen=True)
class Source:
    """Where the parts of a model are."""

    name: str  # for messages
    folder: Path  # configuration, tokenizer, weights; with adapters those of the base model
    adapters: Path | None = None  # LoRA adapters, and perhaps a tokenizer
    is_chat: bool | None = None  # whether a run trained on conversations; None: not known
    base_digest: str | None = None  # of the base model with which a run trained the adapters


def find_source(text: str) -> Source:
    """Find what the user has named: the output folder of a run, a folder, or a name on the hub.

    Raises:
        UserError: there is no such model, or it is not complete.
    """
    path = Path(text)
    if not os.path.isdir(path):
        if os.path.exists(path) or is_local_model(text):
            raise UserError(
                f"{shown(text)}: no such folder: name that of a run, of a model, or a hub's name."
            )
        if text == EMBEDDED_MODEL:
            raise UserError(f"{text} has random weights: train it, and name the run's folder.")
        return _in_folder(_on_hub(text), text)
    if (path / "results.json").is_file():
        return _of_run(path)
    source = _in_folder(path, str(path))
    run = path.absolute().parent  # of hf/ in a run
    if path.absolute().name == "hf" and (run / "results.json").is_file():
        return _with_facts(source, read_folder(run).results)
    return source


def _of_run(path: Path) -> Source:
    """Return the exported model of a run."""
    results = read_folder(path).results
    flags, exported = results.get("flags") or {}, (results.get("export") or {}).get("folder")
    folder = path / "hf"
    if isinstance(exported, str):  # --export_hf may name a folder outside of the run's
        folder = Path(exported) if flags.get("export_hf") else path / Path(exported).name
    if not os.path.isdir(folder):
        raise UserError(_why_not_exported(path, flags, results.get("status")))
    source = _in_folder(folder, str(folder))
    if source.adapters and flags.get("from_scratch"):
        raise UserError(RANDOM_BASE.format(folder))
    return _with_facts(source, results)


def _with_facts(source: Source, results: JsonObject) -> Source:
    """Return a source with what results.json says about the run that exported it."""
    kind = str((results.get("dataset") or {}).get("kind"))
    must_match = (results.get("run_signature") or {}).get("hard") or {}
    return replace(source, is_chat=KINDS.get(kind), base_digest=must_match.get(FROZEN))


def _why_not_exported(path: Path, flags: JsonObject, status: str | None) -> str:
    """Return the message about a run without an exported model."""
    if flags.get("eval_only"):
        return f"{path} has evaluated a model and exports none: name the model itself."
    reason = "--no_export" if flags.get("no_export") else f"its status is {status}"
    advice = "run it again without --no_export, or name another run."
    if list_checkpoints(path / "checkpoints"):
        run = shlex.quote(str(path))
        advice = (
            f"`{command_of(CONVERT)} {run} --to hf FOLDER` exports its newest checkpoint; then "
            "name FOLDER."
        )
    return f"{path} has no exported model ({reason}): {advice}"


def _in_folder(folder: Path, name: str) -> Source:
    """Return the model or the adapters in a folder; `name` is for messages."""
    check_readable("The file", str(folder), [*MODEL_FILES, "adapter_*"])
    if (folder / ADAPTERS).is_file():
        return _with_base(folder, name)
    if (folder / "manifest.json").is_file():
        place = shlex.quote(str(folder))
        raise UserError(
            f"{name} is a checkpoint: `{command_of(CONVERT)} {place} --to hf FOLDER` exports its "
            "model; then name FOLDER."
        )
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{name} has no model (no config.json or {ADAPTERS}): name the output folder of a run, "
            f"or of a model{or_of_hub(name)}."
        )
    _check_weights(folder, name, ("*.safetensors", "pytorch_model*.bin"))
    return Source(name, folder)


def _with_base(folder: Path, name: str) -> Source:
    """Return the adapters in a folder, with the base model that their configuration names."""
    if importlib.util.find_spec("peft") is None:
        raise MissingRequirement(f"{name} has adapters, which need peft: pip install peft.")
    _check_weights(folder, name, ("adapter_model*",))
    base = read_user_json("The file", str(folder / ADAPTERS)).get("base_model_name_or_path")
    if base == EMBEDDED_MODEL:
        raise UserError(RANDOM_BASE.format(name))
    if not isinstance(base, str) or (is_local_model(base) and not os.path.isdir(base)):
        raise UserError(
            f"{name}: the base model of its adapters, {shown(base)}, is missing: put it there, or "
            f"correct base_model_name_or_path in {ADAPTERS}."
        )
    found = _in_folder(Path(base) if os.path.isdir(base) else _on_hub(base), base)
    if found.adapters:
        raise UserError(f"{name}: the base model of its adapters, {base}, has adapters as well.")
    return replace(found, name=name, adapters=folder)


def _check_weights(folder: Path, name: str, patterns: tuple[str, ...]) -> None:
    if not any(file for pattern in patterns for file in folder.glob(pattern)):
        raise UserError(
            f"{name} has no weights ({' or '.join(patterns)}), so it is not complete: copy or "
            "export it again."
        )


def _on_hub(name: str) -> Path:
    """Return the local snapshot of a model on the hub; it is downloaded if it is not in the cache.

    Raises:
        UserError: there is no such model, or it is not in the cache and the hub does not answer.
    """
    offline, reason = hub.is_set_offline(), "HF_HUB_OFFLINE is set"
    if not offline and not hub.answers(hub.endpoint()):
        offline, reason = True, f"the hub ({redact(hub.endpoint())}) cannot be reached"
    from distributed_training.model.download import download  # imports the client of the hub

    try:
        return Path(download(name, None, True, offline, name))
    except UserError as error:
        if not offline:
            raise
        raise UserError(
            f"{shown(name)}: there is no such folder, {reason}, and the hub's cache does not have "
            "it: name a folder, or download it where there is a network (`hf download NAME`)."
        ) from error
