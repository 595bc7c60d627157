"""Save the tensors of a checkpoint: for each piece of a parameter its weight and moments.

A piece is a range of consecutive elements of a flattened parameter. A file contains its tensors in
fp32 as `<parameter>@<index of the first element>/<kind>`; the kinds are those of format.kinds_of.
"""

from pathlib import Path

import torch

from distributed_training.checkpoints.format import KINDS, file_entry, kinds_entry
from distributed_training.files.safetensors_writer import save_file
from distributed_training.strategies.optimizer_shards import ShardedState

# Size limit of one file of tensors, and the host memory that a save needs on top of training.
PIECE_FILE_BYTES = 256 << 20


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
        self._room = PIECE_FILE_BYTES  # bytes that are left in the file

    def add(self, name: str, start: int, tensors: dict[str, torch.Tensor]) -> None:
        """Add consecutive elements of a parameter, which may be distributed over several files.

        Args:
            start: index of the first element in the flattened parameter.
            tensors: by kind (see format.kinds_of), of shape [number of elements].
        """
        numel, begin = tensors["weight"].numel(), 0
        # In fp32. Elements without moments have room for them, as in files of earlier versions.
        element = 4 * max(len(tensors), len(KINDS))
        while begin < numel:
            if self._room < element:
                self.flush()
            end = min(numel, begin + self._room // element)
            piece = {"name": name, "start": start + begin, "numel": end - begin}
            self.pieces.append({**piece, **kinds_entry(tensors), "file": self._file})
            for kind, flat in tensors.items():
                part = flat[begin:end].detach().to("cpu", torch.float32, copy=True)
                self._tensors[f"{name}@{start + begin}/{kind}"] = part
            self._room -= element * (end - begin)
            begin = end

    @property
    def _file(self) -> str:
        return f"rank-{self.rank:05d}-{len(self.files):03d}.safetensors"

    def flush(self) -> None:
        """Write the tensors that are still in memory."""
        if self._tensors:
            path = self.folder / self._file
            save_file(self._tensors, path)
            self.files[path.name] = file_entry(path)
            self._tensors, self._room = {}, PIECE_FILE_BYTES


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
