"""What identifies the frozen weights under adapters, which the checkpoints of a run do not contain.

They are compared before a run resumes, and before adapters are added to the weights of their model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PretrainedConfig

from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.files.weight_files import SavedTensor, tensors_in, weight_files

# All bytes of this many are read (0.1 s); of larger models evenly spaced blocks of each tensor.
MOST_BYTES, BLOCK = 128 << 20, 64 << 10


def identity_of(config: PretrainedConfig, folder: str | None, drawn: str) -> JsonObject:
    """Return the digest of a model's weights, and their commit if they are of the hub.

    Args:
        folder: of the weights; None: they were drawn from the seed.
        drawn: folder of the weights that were drawn.
    """
    if folder is None:
        return {"digest": digest_of_drawn(Path(drawn)), "commit": None}
    path = Path(folder)
    commit = path.name if path.parent.name == "snapshots" else None  # in the hub's cache
    return {"digest": digest_of_files(path, config), "commit": commit}


def digest_of_files(folder: Path, config: PretrainedConfig) -> str:
    """Return a digest of the tensors in a folder, the same in one file and in several."""
    named = getattr(config, "transformers_weights", None)
    tensors = tensors_in(weight_files(folder, named))
    sizes = {name: _bytes_of(tensor) for name, tensor in tensors.items()}
    step = BLOCK * max(1, -(-sum(sizes.values()) // MOST_BYTES))
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        for start in range(0, sizes[name], step):
            digest.update(_read(tensor, start, min(start + BLOCK, sizes[name])))
    return digest.hexdigest()[:16]


def _bytes_of(tensor: SavedTensor) -> int:
    return tensor.end - tensor.begin if tensor.loaded is None else tensor.loaded.nbytes


def _read(tensor: SavedTensor, start: int, end: int) -> bytes:
    """Return the bytes `start` to `end` of a tensor."""
    if tensor.loaded is not None:
        return tensor.loaded.reshape(-1).view(torch.uint8)[start:end].numpy().tobytes()
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin + start)
        return file.read(end - start)


def digest_of_drawn(folder: Path) -> str:
    """Return a digest of the mean and standard deviation of each tensor's first elements, rounded.

    Two types of CPU draw the same weights up to rounding.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        std, mean = torch.std_mean(tensor.reshape(-1)[:BLOCK].float(), correction=0)
        digest.update(f"{name} {tuple(tensor.shape)} {mean:.2e} {std:.2e}".encode())
    return digest.hexdigest()[:16]


def refuse_changed(folder: str, config: PretrainedConfig, digest: str) -> None:
    """Check that the weights in a folder are still those with which adapters were trained.

    Raises:
        UserError: the files have changed since.
    """
    if digest_of_files(Path(folder), config) != digest:
        raise UserError(
            f"The weights in {folder} have changed since the adapters were trained with them: "
            "restore the earlier ones."
        )
