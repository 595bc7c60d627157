"""The format of a checkpoint: its names on disk, its manifest.json, and the check of its files.

The manifest has a digest of itself and of each file that it lists. One whose digest matches is used
without further checks, except that the name of a file may not leave the checkpoint's folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.errors import UserError
from support.files.atomic import digest_of_json, sha256_of, sync, write_text
from support.files.user_files import shown
from support.train_state import NEW_RUN

FORMAT_VERSION = 1
STEP_NAME = re.compile(r"step-([0-9]{8})")  # not \d, which also matches digits of other scripts
KINDS = ("weight", "exp_avg", "exp_avg_sq")
BUFFERS = "model/buffers.safetensors"
ADAFACTOR_STATES = "optimizer.safetensors"  # they have no element for each weight


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
    return sorted(
        (path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name)), reverse=True
    )


def candidates_in(path: Path) -> list[Path]:
    """Return the checkpoints, newest first, of a run's folder, its `checkpoints`, or of one."""
    if STEP_NAME.fullmatch(path.name) or (path / "manifest.json").exists():
        return [path]
    return list_checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)


def open_checkpoint(path: Path) -> tuple[Path, dict]:
    """Open a checkpoint in a single process, without a process group, and verify every file.

    Args:
        path: see `candidates_in`; of several checkpoints the newest is opened.
    Raises:
        UserError: there is no checkpoint, or it is incomplete or damaged.
    """
    newest = next(iter(candidates_in(path)), None)
    if newest is None:
        raise UserError(
            f"{path} contains no checkpoint: a run needs --save_every or --save_epochs."
        )
    manifest, problem = read_manifest(newest)
    if problem := problem or find_damage(newest, manifest):
        raise UserError(f"{newest}: {problem}.")
    return newest, manifest


def write_manifest(folder: Path, manifest: dict) -> None:
    """Add format version and digest, and write manifest.json, which completes a checkpoint."""
    # The digest is of the manifest as it will be read: JSON turns tuples into lists, for example.
    manifest = json.loads(json.dumps({"format_version": FORMAT_VERSION, **manifest}))
    text = json.dumps({**manifest, "sha256": digest_of_json(manifest)})
    write_text(folder / "manifest.json", text)


def file_entry(path: Path) -> dict:
    """Flush a file to disk and return its entry in the manifest: size in bytes and SHA-256."""
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def read_manifest(checkpoint: Path) -> tuple[dict, str]:
    """Return (manifest, ""), or ({}, problem) with a clause that says why it cannot be used."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_bytes())
        if manifest.pop("sha256", "") != digest_of_json(manifest):
            raise ValueError("its digest differs")
        if manifest["format_version"] != FORMAT_VERSION:
            version = shown(manifest["format_version"])
            return {}, f"its format is {version}, and this version reads {FORMAT_VERSION}"
        for name in {piece["file"] for piece in manifest["pieces"]} | manifest["files"].keys():
            inside = not {"", ".", ".."} & {*name.split("/")} and "\\" not in name
            if name not in manifest["files"] or not inside:
                raise ValueError(f"the name {shown(name)}")
        # The defaults are for keys that older versions did not write.
        return {
            "scaling": {},
            "groups": [],
            "stream": None,
            # An imported checkpoint may have no states; then it fits any optimizer.
            "optimizer": "adamw" if manifest["adam_step"] else "",
            **manifest,
            "counters": {**NEW_RUN, **manifest["counters"]},
            "identity": {"hard": {}, "soft": {}, "told": {}, **manifest["identity"]},
        }, ""
    except FileNotFoundError:
        return {}, "it has no manifest.json, so it was never completed"
    except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        return {}, f"its manifest.json is damaged ({shown(error)})"


def find_damage(checkpoint: Path, manifest: dict, part: int = 0, parts: int = 1) -> str:
    """Return a clause about a damaged one of every `parts`-th file from `part` on, or ""."""
    for name, entry in list(manifest["files"].items())[part::parts]:
        try:
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            if sha256_of(checkpoint / name) != entry.get("sha256"):
                return f"{name} is damaged (its SHA-256 differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""
