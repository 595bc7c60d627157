"""Write safetensors files one tensor at a time (https://huggingface.co/docs/safetensors).

A file has a header in JSON, followed by the bytes of every tensor. The `save_file` of the library
needs all tensors of a file in memory at once. Here they can be written one by one, and other
threads run during a write, for instance the one that signals to the other ranks that this rank is
alive.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from support.files.atomic import write_text

FILE_BYTES = "5GB"  # maximum size of one file of weights, as in transformers
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def start_file(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Write the header of a file, and extend the file to its final size.

    Args:
        path: the file.
        tensors: the tensors by name; only their shapes and types are used.
    Returns:
        The offset in bytes of each tensor in the file.
    Raises:
        KeyError: the type of a tensor is not in NAMES.
        OSError: the file cannot be written.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}


def write_at(file, offset: int, tensor: torch.Tensor) -> None:
    """Write the bytes of a tensor to an open file at `offset` (in bytes)."""
    file.seek(offset)
    file.write(
        memoryview(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy())
    )


def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file of tensors that are in memory.

    Raises:
        KeyError: the type of a tensor is not in NAMES.
        OSError: the disk is full or not writable.
    """
    offsets = start_file(path, tensors)
    with open(path, "rb+") as file:
        for name, tensor in tensors.items():
            write_at(file, offsets[name], tensor)


class WeightFiles:
    """The weight files of a model: one, or several with an index.

    Args:
        folder: an existing, empty folder.
        tensors: tensors by name, of which only the shapes and types are used; they can be on the
            meta device.
        file_bytes: maximum size of one file, such as "5GB".
        stem: file name without the suffix, for instance "model" for model.safetensors.
    Raises:
        ValueError: `file_bytes` is not a size.
        KeyError: the type of a tensor is not in NAMES.
        OSError: the disk is full or not writable.
    """

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, torch.Tensor],
        file_bytes: str = FILE_BYTES,
        stem: str = "model",
    ):
        pattern = stem + "{suffix}.safetensors"
        plan = split_torch_state_dict_into_shards(
            tensors, filename_pattern=pattern, max_shard_size=file_bytes
        )
        self._places: dict[str, tuple[Path, int]] = {}
        self._missing: dict[str, torch.dtype] = {}
        for file, names in plan.filename_to_tensors.items():
            offsets = start_file(folder / file, {name: tensors[name] for name in names})
            for name in names:
                self._places[name], self._missing[name] = (
                    (folder / file, offsets[name]),
                    tensors[name].dtype,
                )
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            write_text(
                folder / f"{stem}.safetensors.index.json", json.dumps(index, indent=2) + "\n"
            )

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, converted to the type that it has in `tensors`.

        Raises:
            KeyError: there is no tensor of this name, or it is written already.
            OSError: the disk is full or not writable.
        """
        path, offset = self._places[name]
        with open(path, "rb+") as file:
            write_at(file, offset, tensor.to(self._missing.pop(name)))

    def check_complete(self) -> None:
        """Check that all tensors are written.

        Raises:
            ValueError: a tensor is missing.
        """
        if self._missing:
            raise ValueError(
                f"{len(self._missing)} weights are missing, {next(iter(self._missing))} among them."
            )
