"""Load the tensors of a checkpoint: any range of elements of a parameter, from any pieces."""

import math
from pathlib import Path

import torch
from safetensors import safe_open

from distributed_training.checkpoints.format import kinds_of
from distributed_training.errors import TrainingError, UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.strategies.optimizer_shards import ShardedState

# Read from a file before it is opened again: what was read of an open file is mapped, and counts as
# memory of the process. Not for each tensor, because opening a file reads the list of its tensors.
MAPPED_BYTES = 16 << 20


class PieceReader:
    """Reader for any range of elements of any parameter in a checkpoint; close it at the end."""

    def __init__(self, folder: Path, manifest: JsonObject):
        self.folder = folder
        # The open file, its name, and how much of it was read.
        self._file: safe_open | None = None
        self._name, self._mapped = "", 0
        self._pieces: dict[str, list[JsonObject]] = {}
        for piece in manifest["pieces"]:
            self._pieces.setdefault(piece["name"], []).append(piece)

    def read_into(self, flat: torch.Tensor, name: str, kind: str, start: int) -> None:
        """Fill a flat tensor with a parameter's elements from `start` on; missing moments are 0.

        Raises:
            TrainingError: the checkpoint lacks some of the elements.
        """
        filled = 0
        for piece in self._pieces.get(name, ()):  # an empty parameter has no pieces
            first = piece["start"]
            begin, end = max(start, first), min(start + flat.numel(), first + piece["numel"])
            if begin >= end:
                continue
            filled += end - begin
            part = flat[begin - start : end - start]
            if kind not in kinds_of(piece):
                part.zero_()
            else:
                saved = self._open(piece["file"], 4 * part.numel())
                part.copy_(saved.get_slice(f"{name}@{first}/{kind}")[begin - first : end - first])
        if filled != flat.numel():
            raise TrainingError(
                f"The checkpoint {self.folder} has {filled} of {flat.numel()} elements of {name}."
            )

    def _open(self, name: str, size: int) -> safe_open:
        """Return an open file of the checkpoint, of which `size` bytes will be read."""
        if self._file is None or name != self._name or self._mapped + size > MAPPED_BYTES:
            self.close()
            self._file = safe_open(self.folder / name, framework="pt")
            self._name = name
        self._mapped += size
        return self._file

    def close(self) -> None:
        """Close the file that was read last."""
        self._file, self._name, self._mapped = None, "", 0


def check_shapes(checkpoint: Path, manifest: JsonObject, state: ShardedState) -> None:
    """Check that a checkpoint has all parameters of this model, in the same shapes.

    Flat tensors are accepted, because DeepSpeed's stage 3 writes them to universal checkpoints.
    """
    for name, shape in state.shapes.items():
        saved_shape = manifest["shapes"].get(name)
        if saved_shape not in (list(shape), [math.prod(shape)]):
            raise UserError(
                f"--resume {checkpoint}: the shape of {name} is {list(shape)} in this model, and "
                f"{saved_shape or 'missing'} in the checkpoint."
            )


def read_shards(checkpoint: Path, manifest: JsonObject, state: ShardedState) -> None:
    """Load this rank's masters, moments and working copies of the weights from a checkpoint."""
    reader = PieceReader(checkpoint, manifest)
    for shard in state.shards:
        with state.open(shard, write=True) as tensors:
            for piece in shard.pieces:
                for kind, flat in tensors.items():
                    part = flat[piece.offset : piece.offset + piece.numel]
                    reader.read_into(part, piece.name, kind, piece.start)
    reader.close()
    state.set_adam_step(manifest["adam_step"])
    state.finish_writing()
