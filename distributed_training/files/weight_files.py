"""The weight files of a model folder, and the tensors that their headers list.

Only pickled files (pytorch_model.bin) need PyTorch.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training.errors import UserError, first_line
from distributed_training.files.user_files import read_user_json, shown

if TYPE_CHECKING:
    import torch

# In the order in which `from_pretrained` looks for them. An index names several files.
NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
HEADS = ("lm_head.weight", "embed_out.weight")  # usual names of the output layer in files
COPY_AGAIN = (
    "copy or download the model again (`hf download NAME --force-download` replaces it in the "
    "hub's cache)"
)
COMPARED_BYTES = 16 << 20  # of a tensor in memory at a time


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a weight file: its type and shape, and where its elements are."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    # Of a safetensors file: the first byte in the file, and the one after the last.
    begin: int = 0
    end: int = 0
    loaded: torch.Tensor | None = None  # of a pickled file, mapped from it if possible


def stays_inside(name: object) -> bool:
    """Return whether a name from an index or a manifest is a path in the folder of that file.

    The file may be a symbolic link to another place, as in the cache of the hub.
    """
    if not isinstance(name, str) or {"\\", "\0"} & {*name}:
        return False
    return not {"", ".", ".."} & {*name.split("/")}


def weight_files(folder: Path, named: str | None = None) -> list[Path]:
    """Return the weight files that `from_pretrained` reads from a model folder.

    Args:
        named: the file or index that config.json names as `transformers_weights`.
    Raises:
        UserError: there are none; or an index is damaged, or names a file that is missing or that
            is not in the folder.
    """
    names = (named,) if named else NAMES
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"{folder} has no weights ({' or '.join(names)}): {COPY_AGAIN}, or use --from_scratch."
        )
    if path.suffix != ".json":
        return [path]
    listed = read_user_json("The index", str(path)).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UserError(f"{path} has no weight_map, so it is not a weight index: {COPY_AGAIN}.")
    for name in listed.values():
        if not stays_inside(name):
            raise UserError(
                f"{path} names the file {shown(name)}, which is not in its folder, so it is not "
                "read: put the file into the folder, and correct the index."
            )
        if not os.path.isfile(folder / name):
            raise UserError(f"{path} names {shown(name)}, which is missing: {COPY_AGAIN}.")
    return [folder / name for name in sorted(set(listed.values()))]


def tensors_in(files: Iterable[Path]) -> dict[str, SavedTensor]:
    """Return {name: tensor} of weight files.

    Raises:
        UserError: a file is damaged, or is a pickle with other objects than tensors.
    """
    tensors: dict[str, SavedTensor] = {}
    for file in files:
        is_safe = file.suffix == ".safetensors"
        tensors |= _in_safetensors(file) if is_safe else _in_pickle(file)
    return tensors


def _in_safetensors(file: Path) -> dict[str, SavedTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):  # checks the header, and the size of the file
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is damaged ({first_line(error, 200)}): {COPY_AGAIN}.") from error
    header.pop("__metadata__", None)
    return {
        name: SavedTensor(
            file,
            entry["dtype"],
            tuple(entry["shape"]),
            *(8 + length + offset for offset in entry["data_offsets"]),
        )
        for name, entry in header.items()
    }


def _in_pickle(file: Path) -> dict[str, SavedTensor]:
    import torch

    advice = "whose code is not executed: use a model with safetensors files"
    contents = load_tensors(file, advice, COPY_AGAIN)
    if not isinstance(contents, dict):
        raise UserError(f"{file} has no weights by name: {COPY_AGAIN}.")
    return {
        name: SavedTensor(file, str(tensor.dtype), tuple(tensor.shape), loaded=tensor)
        for name, tensor in contents.items()
        if isinstance(tensor, torch.Tensor)
    }


def load_tensors(path: Path, objects: str, damaged: str = "", trusted: bool = False):
    """Load a file of PyTorch; its tensors are mapped from the file if its format allows it.

    Args:
        objects: what to do if it contains other objects, after "it contains Python objects, ".
        damaged: what to do if it is damaged.
        trusted: load Python objects as well, which executes the code in them.
    """
    import torch

    try:
        mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are not
        return torch.load(path, map_location="cpu", weights_only=not trusted, mmap=mapped)
    except Exception as error:  # of a dozen classes
        reason = shown(first_line(error, 200).partition(". ")[0], 200)
        advice = f": {damaged}" if damaged else ""
        if "weights_only" in str(error):
            reason, advice = f"it contains Python objects, {objects}", ""
        raise UserError(f"{path} cannot be read: {reason}{advice}.") from error


def same_elements(first: SavedTensor, second: SavedTensor) -> bool:
    """Return whether two tensors have the same type, shape and elements."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if first.loaded is not None and second.loaded is not None:
        return first.loaded.data_ptr() == second.loaded.data_ptr() or bool(
            (first.loaded == second.loaded).all()
        )
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.begin)
        other.seek(second.begin)
        left = first.end - first.begin
        while left > 0:
            size = min(left, COMPARED_BYTES)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True


def has_own_head(tensors: dict[str, SavedTensor], names: Iterable[str]) -> bool:
    """Return whether files have an output layer that differs from the embedding.

    Args:
        names: the possible names of the weight that config.json makes the two share.
    """
    saved = [tensors[name] for name in dict.fromkeys((*names, *HEADS)) if name in tensors]
    return any(not same_elements(saved[0], other) for other in saved[1:])
