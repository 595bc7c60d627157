"""The format of a checkpoint: its names on disk, its manifest.json, and the check of its files.

A checkpoint is untrusted input: it may come from a folder that others write to, from a download or
from a faulty disk. The digests show that the files are those that the manifest lists, but not that
the author of the manifest can be trusted. Therefore every number is checked against a range, every
name must stay inside the checkpoint's folder, and every tensor must be in a file that is listed
with its digest.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from pathlib import Path

from safetensors import SafetensorError, safe_open

from support.errors import UserError
from support.files.atomic import (
    digest_of,
    digest_of_json,
    open_regular,
    read_json,
    sha256_of,
    sync,
    write_text,
)
from support.files.user_files import shown
from support.train_state import NEW_RUN

FORMAT_VERSION = 1
STEP_NAME = re.compile(r"step-([0-9]{8})")  # not \d, which also matches digits of other scripts
MOST_STEPS = 10**8 - 1  # the name of a checkpoint has eight digits
# Largest count of sequences, tokens, bytes or elements: integers up to 2^53 are exact in JSON.
MOST_COUNTED = 2**53
LARGEST_BYTES = 256 << 20  # size limit of manifest.json; a million pieces take about half of it
KINDS = ("weight", "exp_avg", "exp_avg_sq")
ELEMENT_BYTES = 4  # all tensors of a checkpoint are fp32
BUFFERS = "model/buffers.safetensors"
WHOLE_STATES = "optimizer.safetensors"  # Adafactor's, which have no element for each weight
MARKS = ("latest", "best")  # files that contain the name of a checkpoint
DAMAGED = "its manifest.json is damaged"


# ---------------------------------------------------------------------------------- names on disk


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


# ----------------------------------------------------------------------------------- the manifest


def open_checkpoint(path: Path) -> tuple[Path, dict]:
    """Open a checkpoint in a single process, without a process group, and verify every file.

    Args:
        path: see `candidates_in`; of several checkpoints the newest is opened.
    Returns:
        The checkpoint's folder and manifest.
    Raises:
        UserError: the folder is no checkpoint, or the checkpoint is incomplete or damaged.
    """
    path = next(iter(candidates_in(path) or ()), path)
    manifest, problem = read_manifest(path)
    if problem := problem or find_damage(path, manifest):
        raise UserError(f"{path}: {problem}.")
    return path, manifest


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


def file_entry(path: Path) -> dict:
    """Flush a file to disk and return its entry in the manifest: size in bytes and SHA-256."""
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def read_manifest(checkpoint: Path) -> tuple[dict, str]:
    """Read and validate a checkpoint's manifest.

    Returns:
        (manifest, ""), with defaults for keys that older versions did not write; or ({}, problem)
        with a clause that says why the manifest cannot be used.
    """
    try:
        manifest = read_json(checkpoint / "manifest.json", LARGEST_BYTES)
        recorded_digest = manifest.pop("sha256", "") if isinstance(manifest, dict) else ""
        if recorded_digest != digest_of_json(manifest):
            return {}, DAMAGED
        version = manifest.get("format_version")
        if version != FORMAT_VERSION:
            return {}, f"its format is {shown(version)}, and this version reads {FORMAT_VERSION}"
        manifest = with_defaults(manifest)
        validate(manifest)
    except FileNotFoundError:
        return {}, "it has no manifest.json, so it was never completed"
    except OSError as error:
        return {}, f"its manifest.json cannot be read ({error.strerror})"
    except (ValueError, TypeError) as error:
        return {}, f"{DAMAGED} ({shown(error)})"
    return manifest, ""


def with_defaults(manifest: dict) -> dict:
    """Return the manifest with defaults for the keys that older versions did not write.

    Raises:
        TypeError: `counters` or `identity` is not a JSON object.
    """
    return {
        "scaling": {},
        "groups": [],
        "lr_scheduler": {},
        "stream": None,
        # An imported checkpoint may have no states; then it fits any optimizer.
        "optimizer": "adamw" if manifest.get("adam_step") else "",
        **manifest,
        "counters": {
            **NEW_RUN,
            "step": None,
            "samples": None,
            "tokens": None,
            **manifest.get("counters", {}),
        },
        "identity": {"hard": {}, "soft": {}, "told": {}, **manifest.get("identity", {})},
    }


def validate(manifest: dict) -> None:
    """Check the content of a manifest, without reading the files that it lists.

    Args:
        manifest: as `with_defaults` returns it.
    Raises:
        ValueError: an entry is missing or invalid; the message names the first one.
    """
    _check_counters(manifest["counters"])
    _need(_count(manifest.get("adam_step"), 10**12), "adam_step")
    _need(isinstance(manifest["optimizer"], str), "optimizer")
    for part, entries in manifest["identity"].items():
        _need(isinstance(entries, dict), f"identity.{part}")
        for value in entries.values():
            _need(isinstance(value, str | int | float | None), f"identity.{part}")
    scaling = manifest["scaling"]
    _need(isinstance(scaling, dict) and all(map(_number, scaling.values())), "scaling")
    _need(all(0 < scaling.get(name, 1) < 2**64 for name in ("scale", "cur_scale")), "scaling")
    _check_groups(manifest["groups"], is_adam=manifest["optimizer"] in ("", "adamw"))
    _need(isinstance(manifest["lr_scheduler"], dict), "lr_scheduler")
    _need(isinstance(manifest["stream"], dict | None), "stream")
    _need(isinstance(manifest.get("files"), dict), "files")
    for name, entry in manifest["files"].items():
        _need(is_inner_path(name), f"files: the name {shown(name)}")
        _need(isinstance(entry, dict) and _count(entry.get("bytes")), f"files.{name}.bytes")
        _need(isinstance(entry.get("sha256"), str), f"files.{name}.sha256")
    _need(isinstance(manifest.get("shapes"), dict), "shapes")
    for name, shape in manifest["shapes"].items():
        _need(is_inner_path(name), f"shapes: the name {shown(name)}")
        _need(isinstance(shape, list) and len(shape) <= 16, f"shapes.{name}")
        _need(all(map(_count, shape)), f"shapes.{name}")
    _check_pieces(manifest)


def _need(holds: bool, part: str) -> None:
    if not holds:
        raise ValueError(f"{part} is missing or wrong")


def _count(value, most: int = MOST_COUNTED) -> bool:
    return type(value) is int and 0 <= value <= most  # not isinstance: a bool is also an int


def _number(value) -> bool:
    if type(value) is int:  # math.isfinite raises OverflowError for ints beyond a float's range
        return abs(value) <= MOST_COUNTED
    return type(value) is float and math.isfinite(value)


def _check_counters(counters: dict) -> None:
    _need(_count(counters["step"], MOST_STEPS), "counters.step")
    _need(_count(counters["samples"]), "counters.samples")
    _need(counters["tokens"] is None or _count(counters["tokens"]), "counters.tokens")
    _need(
        _number(counters["training_seconds"]) and counters["training_seconds"] >= 0,
        "counters.training_seconds",
    )
    for name in ("first_loss", "last_loss"):
        _need(counters[name] is None or _number(counters[name]), f"counters.{name}")
    best = counters["best"]
    if best is not None:
        _need(isinstance(best, dict) and _number(best.get("loss")), "counters.best")
        _need(_count(best.get("step"), MOST_STEPS), "counters.best")
        _need(_count(best.get("waited")), "counters.best")


def _check_groups(groups, is_adam: bool) -> None:
    _need(isinstance(groups, list), "groups")
    for group in groups:
        _need(isinstance(group, dict), "groups")
        keys = ("lr", "eps", "weight_decay") if is_adam else ("lr", "weight_decay")
        _need(all(_number(group.get(key)) for key in keys), "groups")
        if is_adam:
            betas = group.get("betas")
            _need(isinstance(betas, list) and len(betas) == 2, "groups")
            _need(all(_number(beta) and 0 <= beta < 1 for beta in betas), "groups")


def _check_pieces(manifest: dict) -> None:
    """Check that pieces are in listed files and cover each element of each parameter once."""
    _need(isinstance(manifest.get("pieces"), list), "pieces")
    by_name: dict[str, list] = {name: [] for name in manifest["shapes"]}
    bytes_in = dict.fromkeys(manifest["files"], 0)
    for piece in manifest["pieces"]:
        _need(isinstance(piece, dict) and type(piece.get("moments")) is bool, "pieces")
        _need(_count(piece.get("start")) and _count(piece.get("numel")), "pieces")
        name, file = piece.get("name"), piece.get("file")
        _need(isinstance(name, str) and isinstance(file, str), "pieces")
        _need(name in by_name, f"pieces: the parameter {shown(name)}")
        listed = file in bytes_in and file.endswith(".safetensors")
        _need(listed, f"pieces: the file of {name}")
        bytes_in[file] += piece["numel"] * ELEMENT_BYTES * (len(KINDS) if piece["moments"] else 1)
        by_name[name].append((piece["start"], piece["numel"]))
    for file, size in bytes_in.items():
        _need(size <= manifest["files"][file]["bytes"], f"files.{file}.bytes")
    for name, ranges in by_name.items():
        end = 0
        for start, numel in sorted(ranges):
            _need(start == end, f"pieces: {name} from element {end} on")
            end += numel
        _need(end == math.prod(manifest["shapes"][name]), f"pieces: {name} from element {end} on")


def is_inner_path(name: str) -> bool:
    """Return whether an untrusted relative path stays inside the folder that it is joined to."""
    has_forbidden_parts = {"", ".", ".."} & set(name.split("/"))
    return len(name) <= 1000 and name.isprintable() and "\\" not in name and not has_forbidden_parts


# ---------------------------------------------------------------------------------------- the files


def find_damage(checkpoint: Path, manifest: dict, part: int = 0, parts: int = 1) -> str:
    """Verify the size, the digest and the tensors of the files that a valid manifest lists.

    Args:
        part, parts: verify only every `parts`-th file, from number `part` on, so that the ranks can
            share the work.
    Returns:
        A clause about the first damaged file, or "".
    """
    names = list(manifest["files"])[part::parts]
    expected: dict[str, dict[str, int]] = {name: {} for name in names}
    for piece in manifest["pieces"]:
        if piece["file"] in expected:
            for kind in KINDS if piece["moments"] else KINDS[:1]:
                key = f"{piece['name']}@{piece['start']}/{kind}"
                expected[piece["file"]][key] = piece["numel"]
    for name, tensors in expected.items():
        if problem := _find_damage_of(checkpoint, name, manifest["files"][name], tensors):
            return problem
    return ""


def _find_damage_of(checkpoint: Path, name: str, entry: dict, tensors: dict[str, int]) -> str:
    try:
        with open_listed(checkpoint, name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes instead of {entry['bytes']}"
            if digest_of(file) != entry["sha256"]:
                return f"{name} is damaged (its SHA-256 differs)"
        if name.endswith(".safetensors"):
            return _find_wrong_tensor(checkpoint / name, tensors)
        return ""
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except SafetensorError as error:
        return f"{name} is damaged ({shown(error)})"


def open_listed(checkpoint: Path, name: str):
    """Open a file that a checkpoint's manifest lists, for reading in binary mode.

    Raises:
        OSError: the file cannot be opened or is no regular file, or one of its parent folders
            inside the checkpoint is no folder. Symbolic links are refused.
    """
    for parent in list(Path(name).parents)[:-1]:
        if not stat.S_ISDIR(os.lstat(checkpoint / parent).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{parent} is not a folder, or a symbolic link")
    return open_regular(checkpoint / name)


def _find_wrong_tensor(path: Path, tensors: dict[str, int]) -> str:
    with safe_open(path, framework="pt") as file:
        stored_keys = set(file.keys())
        for key, numel in tensors.items():
            if key not in stored_keys:
                return f"{path.name} does not contain {shown(key)}"
            stored = file.get_slice(key)
            shape, dtype = stored.get_shape(), stored.get_dtype()
            if shape != [numel] or dtype != "F32":
                return f"{shown(key)} in {path.name} is {dtype} {shape} instead of F32 [{numel}]"
    return ""
