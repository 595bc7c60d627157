"""Save and load the tensors of a checkpoint: for each piece of a parameter its weight and moments.

A piece is a range of consecutive elements of a flattened parameter. A file contains its tensors in
fp32 as `<parameter>@<index of the first element>/<kind>`; the kinds are format.KINDS.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from support.checkpoints.format import KINDS, file_entry
from support.errors import TrainingError, UserError
from support.strategies.optimizer_shards import PlainState, ShardedState

# Size limit of one file of tensors, and the host memory that a save needs on top of training.
PIECE_FILE_BYTES = 256 << 20


def sharded_state(model: nn.Module, optimizer, device: torch.device) -> ShardedState:
    """Return the masters of this rank of an unwrapped model, in the layout of the strategy."""
    if not hasattr(optimizer, "optimizer"):
        return PlainState(model, optimizer, device)
    from support.strategies.zero_shards import Zero3State, Zero12State

    is_stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    return (Zero3State if is_stage3 else Zero12State)(model, optimizer, device)


class PieceWriter:
    """Writer of the pieces of one rank, in files of at most PIECE_FILE_BYTES.

    Attributes:
        pieces, files: entries of the manifest; complete after `flush`.
    """

    def __init__(self, folder: Path, rank: int = 0):
        self.folder, self.rank = folder, rank
        self.pieces: list[dict] = []
        self.files: dict[str, dict] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._room = self._capacity = PIECE_FILE_BYTES // (4 * len(KINDS))  # elements in fp32

    def add(self, name: str, start: int, tensors: dict[str, torch.Tensor]) -> None:
        """Add consecutive elements of a parameter, which may be distributed over several files.

        Args:
            start: index of the first element in the flattened parameter.
            tensors: {"weight"} or all of KINDS, of shape [number of elements].
        """
        numel, begin = tensors["weight"].numel(), 0
        while begin < numel:
            end = min(numel, begin + self._room)
            piece = {"name": name, "start": start + begin, "numel": end - begin}
            self.pieces.append({**piece, "moments": len(tensors) > 1, "file": self._file})
            for kind, flat in tensors.items():
                part = flat[begin:end].detach().to("cpu", torch.float32, copy=True)
                self._tensors[f"{name}@{start + begin}/{kind}"] = part
            self._room -= end - begin
            begin = end
            if self._room == 0:
                self.flush()

    @property
    def _file(self) -> str:
        return f"rank-{self.rank:05d}-{len(self.files):03d}.safetensors"

    def flush(self) -> None:
        """Write the tensors that are still in memory."""
        if self._tensors:
            path = self.folder / self._file
            save_file(self._tensors, path)
            self.files[path.name] = file_entry(path)
            self._tensors, self._room = {}, self._capacity


def write_shards(writer: PieceWriter, state: ShardedState, world_size: int) -> None:
    """Write the weights and moments of this rank."""
    for shard in state.shards:
        with state.open(shard) as tensors:
            for piece in [] if state.is_copy else shard.pieces:
                begin, end = 0, piece.numel
                if state.replicated:  # every rank has all elements and writes an equal part of them
                    begin = piece.numel * writer.rank // world_size
                    end = piece.numel * (writer.rank + 1) // world_size
                part = slice(piece.offset + begin, piece.offset + end)
                elements = {kind: flat[part] for kind, flat in tensors.items()}
                writer.add(piece.name, piece.start + begin, elements)
    writer.flush()


class PieceReader:
    """Reader for any range of elements of any parameter in a checkpoint.

    Attributes:
        files: the open files; what was read of a file stays mapped until it is closed.
    """

    def __init__(self, folder: Path, manifest: dict):
        self.folder, self.files = folder, {}
        self._pieces: dict[str, list[dict]] = {}
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
            if kind != "weight" and not piece["moments"]:
                part.zero_()
            else:
                file = piece["file"]
                if file not in self.files:
                    self.files[file] = safe_open(self.folder / file, framework="pt")
                saved = self.files[file].get_slice(f"{name}@{first}/{kind}")
                part.copy_(saved[begin - first : end - first])
        if filled != flat.numel():
            raise TrainingError(
                f"The checkpoint {self.folder} has {filled} of {flat.numel()} elements of {name}."
            )


def check_shapes(checkpoint: Path, manifest: dict, state: ShardedState) -> None:
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


def read_shards(checkpoint: Path, manifest: dict, state: ShardedState) -> None:
    """Load this rank's masters, moments and working copies of the weights from a checkpoint."""
    reader = PieceReader(checkpoint, manifest)
    for shard in state.shards:
        with state.open(shard, write=True) as tensors:
            for piece in shard.pieces:
                for kind, flat in tensors.items():
                    part = flat[piece.offset : piece.offset + piece.numel]
                    reader.read_into(part, piece.name, kind, piece.start)
    state.set_adam_step(manifest["adam_step"])
    state.finish_writing()
