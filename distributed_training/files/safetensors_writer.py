"""Safetensors files of a model's weights, written in shards of limited size."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards

from distributed_training.files.atomic import usual_permissions, write_text

FILE_BYTES = "1GB"  # maximum size of one file of weights, which is in memory while it is written


def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file of tensors that are in memory, each with its own copy of the data."""
    contents = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with usual_permissions(path):
        safetensors.torch.save_file(contents, path, metadata={"format": "pt"})


class WeightFiles:
    """The weight files of a model: one, or several with an index.

    Args:
        dtype: the type of the weights in the files.
        buffers: further tensors, which `finish` writes in their own types.
        file_bytes: maximum size of one file, such as "1GB".
        stem: file name without the suffix, for instance "model" for model.safetensors.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        buffers: dict[str, torch.Tensor],
        file_bytes: str = FILE_BYTES,
        stem: str = "model",
    ):
        sizes = {name: torch.empty(s, dtype=dtype, device="meta") for name, s in shapes.items()}
        sizes |= {name: buffer.to("meta") for name, buffer in buffers.items()}
        pattern = stem + "{suffix}.safetensors"
        plan = split_torch_state_dict_into_shards(
            sizes, filename_pattern=pattern, max_shard_size=file_bytes
        )
        self._folder, self._dtype, self._buffers = folder, dtype, buffers
        self._file_of = plan.tensor_to_filename
        self._missing = {file: set(names) for file, names in plan.filename_to_tensors.items()}
        self._tensors: dict[str, dict[str, torch.Tensor]] = {file: {} for file in self._missing}
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            path = folder / f"{stem}.safetensors.index.json"
            write_text(path, json.dumps(index, indent=2) + "\n")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Add a weight, converted to the type of the files; a complete file is written."""
        self._add(name, tensor.detach().to("cpu", self._dtype, copy=True))

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        file = self._file_of[name]
        self._tensors[file][name] = tensor
        self._missing[file].remove(name)
        if not self._missing[file]:
            save_file(self._tensors.pop(file), self._folder / file)

    def finish(self) -> None:
        """Write the buffers, after all weights."""
        for name, buffer in self._buffers.items():
            self._add(name, buffer.to("cpu"))
