"""Writing safetensors (https://huggingface.co/docs/safetensors): a header in JSON, then every
tensor's bytes.

The library's own `save_file` wants all tensors of a file in memory at once. Here they may come one
by one, and while one is written other threads go on, such as the one that tells the other ranks
that this one is alive.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from support.files.atomic import write_text

FILE_BYTES = "5GB"  # of one weights file at most, as transformers has it
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
    """Write a file's header, and leave room for the tensors, which are only looked at.

    Returns:
        Where in the file each tensor's bytes belong.
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
    """Put a tensor's bytes into an open file."""
    file.seek(offset)
    file.write(
        memoryview(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy())
    )


def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file of tensors that are in memory.

    Raises:
        OSError: the disk is full, or not writable.
    """
    offsets = start_file(path, tensors)
    with open(path, "rb+") as file:
        for name, tensor in tensors.items():
            write_at(file, offsets[name], tensor)


class WeightFiles:
    """A model's weights in as many files as they need, with an index if there are several.

    Args:
        folder: an existing, empty folder.
        tensors: tensors of the right shapes and types by name; only looked at, so that they may be
            on the meta device.
        file_bytes: the most that one file holds, such as "5GB".
        stem: of the file's name, if one is enough.
    Raises:
        ValueError: `file_bytes` is no such text.
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
        """Put a tensor into its place; it is converted to the type that was announced."""
        path, offset = self._places[name]
        with open(path, "rb+") as file:
            write_at(file, offset, tensor.to(self._missing.pop(name)))

    def check_complete(self) -> None:
        """Raises ValueError if a tensor that was announced has not come."""
        if self._missing:
            raise ValueError(
                f"{len(self._missing)} weights are missing, {next(iter(self._missing))} among them."
            )
