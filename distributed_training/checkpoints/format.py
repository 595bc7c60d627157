"""The format of a checkpoint: its names on disk, and its manifest.json.

The manifest has a digest of itself and of each file that it lists.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path

from distributed_training.files.atomic import digest_of_json, sha256_of, sync, write_text
from distributed_training.files.json_types import JsonObject

FORMAT_VERSION = 1
STEP_NAME = re.compile(r"step-([0-9]{8})")  # not \d, which also matches digits of other scripts
KINDS = ("weight", "exp_avg", "exp_avg_sq")  # of AdamW
MOMENTUM = "momentum_buffer"  # the kind that a matrix of Muon has instead of the last two
# Entries of the run signature; the second one is of the hub.
FROZEN, COMMIT = "frozen weights digest", "commit of the frozen weights"
EVALUATED = "evaluated sequences"  # an entry of the run signature: their number
BUFFERS = "model/buffers.safetensors"
WHOLE_STATES = "optimizer.safetensors"  # have no element for each weight: Adafactor's


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def marked(folder: Path, mark: str) -> str:
    """Return the checkpoint's name in the file `mark`, or "" if it is missing or invalid."""
    path = folder / mark
    name = path.read_text(errors="replace").strip() if path.is_file() else ""
    return name if STEP_NAME.fullmatch(name) else ""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder by name, newest first, without checking them."""
    if not folder.is_dir():
        return []
    # Unlike glob, iterdir raises an error if the folder cannot be read.
    return sorted(
        (path for path in folder.iterdir() if STEP_NAME.fullmatch(path.name)), reverse=True
    )


def candidates_in(path: Path) -> list[Path]:
    """Return the checkpoints, newest first, of a run's folder, its `checkpoints`, or of one."""
    if STEP_NAME.fullmatch(path.name) or (path / "manifest.json").exists():
        return [path]
    return list_checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)


def kinds_of(piece: JsonObject) -> tuple[str, ...]:
    """Return the kinds of tensors that a piece of the manifest has."""
    if "kinds" in piece:
        return (KINDS[0], *piece["kinds"])
    if piece["moments"]:
        return KINDS
    return (KINDS[0], MOMENTUM) if piece.get("momentum") else KINDS[:1]


def kinds_entry(kinds: Collection[str]) -> JsonObject:
    """Return the entries of a piece about its kinds, those of `kinds_of`.

    The states of AdamW and Muon have the entries that earlier versions read.
    """
    states = [kind for kind in kinds if kind != KINDS[0]]
    known = {"moments": states == [*KINDS[1:]]}
    if states in ([], [*KINDS[1:]]):
        return known
    return known | ({"momentum": True} if states == [MOMENTUM] else {"kinds": states})


def write_manifest(folder: Path, manifest: JsonObject) -> None:
    """Add format version and digest, and write manifest.json, which completes a checkpoint."""
    # The digest is of the manifest as it will be read: JSON turns tuples into lists, for example.
    manifest = json.loads(json.dumps({"format_version": FORMAT_VERSION, **manifest}))
    text = json.dumps({**manifest, "sha256": digest_of_json(manifest)})
    write_text(folder / "manifest.json", text)


def file_entry(path: Path) -> JsonObject:
    """Flush a file to disk and return its entry in the manifest: size in bytes and SHA-256."""
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
