"""Write safetensors files one tensor at a time (https://huggingface.co/docs/safetensors).

A file has a header in JSON, followed by the bytes of every tensor. The `save_file` of the library
needs all tensors of a file in memory at once. Here they can be written one by one, and other
threads run during a write, for instance the one that signals to the other ranks that this rank is
alive.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards

from support.files.atomic import write_text

FILE_BYTES = "5GB"  # maximum size of one file of weights, as in transformers


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    """Return the name of a type in the header of a file, as the library writes it.

    Raises:
        KeyError: the library has none, or counts elements of this type otherwise than PyTorch.
    """
    if "float4" in str(dtype):  # an element of the tensor is two in the file
        raise KeyError(dtype)
    file = safetensors.torch.save({"empty": torch.empty(0, dtype=dtype, device="cpu")})
    return json.loads(file[8:])["empty"]["dtype"]


def start_file(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Write the header of a file, and extend the file to its final size.

    Args:
        tensors: the tensors by name; only their shapes and types are used.
    Returns:
        The offset in bytes of each tensor in the file.
    Raises:
        TypeError: the library has no name for the type of a tensor.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        try:
            dtype = _name_of(tensor.dtype)
        except KeyError as error:
            problem = f"{name}: a safetensors file cannot contain {tensor.dtype}."
            raise TypeError(problem) from error
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}


def write_at(file, offset: int, tensor: torch.Tensor) -> None:
    """Write the bytes of a tensor to an open file at `offset` (in bytes)."""
    content = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    file.seek(offset)
    file.write(memoryview(content.numpy()))


def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file of tensors that are in memory."""
    offsets = start_file(path, tensors)
    with open(path, "rb+") as file:
        for name, tensor in tensors.items():
            write_at(file, offsets[name], tensor)


class WeightFiles:
    """The weight files of a model: one, or several with an index.

    Args:
        dtype: the type of the weights in the files.
        buffers: further tensors, which `finish` writes in their own types.
        file_bytes: maximum size of one file, such as "5GB".
        stem: file name without the suffix, for instance "model" for model.safetensors.
    """

    def __init__(
        self,
        folder: Path,
        shapes: dict[str, Sequence[int]],
        dtype: torch.dtype,
        buffers: dict[str, torch.Tensor],
        file_bytes: str = FILE_BYTES,
        stem: str = "model",
    ):
        tensors = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
        }
        tensors |= {name: buffer.to("meta") for name, buffer in buffers.items()}
        pattern = stem + "{suffix}.safetensors"
        plan = split_torch_state_dict_into_shards(
            tensors, filename_pattern=pattern, max_shard_size=file_bytes
        )
        self._buffers = buffers
        self._missing: dict[str, tuple[Path, int, torch.dtype]] = {}
        for file, names in plan.filename_to_tensors.items():
            offsets = start_file(folder / file, {name: tensors[name] for name in names})
            for name in names:
                self._missing[name] = folder / file, offsets[name], tensors[name].dtype
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            path = folder / f"{stem}.safetensors.index.json"
            write_text(path, json.dumps(index, indent=2) + "\n")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a weight, converted to the type that it has in the file."""
        path, offset, dtype = self._missing.pop(name)
        with open(path, "rb+") as file:
            write_at(file, offset, tensor.to(dtype))

    def finish(self) -> None:
        """Write the buffers, and check that all weights are written."""
        for name, buffer in self._buffers.items():
            self.write(name, buffer)
        if missing := list(self._missing):
            raise ValueError(f"{len(missing)} weights are missing, {missing[0]} among them.")
