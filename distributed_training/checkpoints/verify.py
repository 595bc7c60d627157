"""Open a checkpoint: read its manifest, and verify its files.

A manifest whose digest matches may still be forged, or of another program, so the types of its
values and the tensors in its files are checked as well.
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from distributed_training.checkpoints.format import FORMAT_VERSION, candidates_in
from distributed_training.checkpoints.manifest import check_manifest, tensors_of
from distributed_training.errors import UserError
from distributed_training.files.atomic import digest_of_json, sha256_of
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import reason_of, shown
from distributed_training.ranks.context import DistContext
from distributed_training.train_state import NEW_RUN


def open_checkpoint(path: Path) -> tuple[Path, JsonObject]:
    """Open a checkpoint in a single process, without a process group, and verify every file.

    Args:
        path: see `candidates_in`; of several checkpoints the newest is opened.
    Raises:
        UserError: there is no checkpoint, or it is incomplete or damaged.
    """
    newest = next(iter(candidates_in(path)), None)
    if newest is None:
        exported = f" Its trained model is in {path / 'hf'}." if (path / "hf").is_dir() else ""
        raise UserError(
            f"{path} contains no checkpoint: a run needs --save_every or --save_epochs.{exported}"
        )
    manifest, problem = read_manifest(newest)
    if problem := problem or find_damage(newest, manifest):
        raise UserError(f"{newest}: {problem}.")
    return newest, manifest


def read_manifest(checkpoint: Path) -> tuple[JsonObject, str]:
    """Return (manifest, ""), or ({}, problem) with a clause that says why it cannot be used."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_bytes())
        if manifest.pop("sha256", "") != digest_of_json(manifest):
            raise ValueError("its digest differs")
        if manifest["format_version"] != FORMAT_VERSION:
            version = shown(manifest["format_version"])
            return {}, f"its format is {version}, and this version reads {FORMAT_VERSION}"
        check_manifest(manifest)
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
    except OSError as error:
        return {}, f"its manifest.json cannot be read: {reason_of(error, checkpoint)}"
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        return {}, f"its manifest.json is damaged ({shown(error)})"


def find_damage(checkpoint: Path, manifest: JsonObject, part: int = 0, parts: int = 1) -> str:
    """Return a clause about a damaged one of every `parts`-th file from `part` on, or ""."""
    tensors = tensors_of(manifest)
    for name, entry in list(manifest["files"].items())[part::parts]:
        path = checkpoint / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if sha256_of(path) != entry["sha256"]:
                return f"{name} is damaged (its SHA-256 differs)"
            if wrong := _wrong_tensor(path, tensors.get(name, {})):
                return f"{name} is damaged (the tensor {shown(wrong)})"
        except OSError as error:
            return f"{name} cannot be read: {reason_of(error, checkpoint)}"
        except SafetensorError as error:
            return f"{name} is damaged ({shown(error)})"
    return ""


def _wrong_tensor(path: Path, elements: dict[str, int]) -> str:
    """Return the first tensor that is missing, or has another size or type; "" if there is none."""
    if not elements:
        return ""
    with safe_open(path, framework="numpy") as file:
        there = {*file.keys()}
        for name, count in elements.items():
            if name not in there:
                return name
            tensor = file.get_slice(name)
            if tensor.get_shape() != [count] or tensor.get_dtype() != "F32":
                return name
    return ""


def verify(checkpoint: Path, ctx: DistContext) -> tuple[JsonObject, str]:
    """Read a checkpoint's manifest and verify its files, of which each rank takes a part.

    Returns:
        (manifest, ""), or a clause that says why it cannot be used as the second item.
    """
    read = read_manifest(checkpoint) if ctx.is_main else ({}, "")
    manifest, problem = ctx.broadcast_from_rank0(read)
    problem = problem or find_damage(checkpoint, manifest, ctx.rank, ctx.world_size)
    return manifest, next(filter(None, ctx.all_gather(problem)), "")
