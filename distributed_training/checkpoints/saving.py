"""Save the tensors of a checkpoint: for each piece of a parameter its weight and moments.

A piece is a range of consecutive elements of a flattened parameter. A file contains its tensors in
fp32 as `<parameter>@<index of the first element>/<kind>`; the kinds are those of format.kinds_of.
The content of a file is copied into host memory first, then it can be written by another thread.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from distributed_training.checkpoints.format import KINDS, kinds_entry
from distributed_training.files.json_types import JsonObject
from distributed_training.strategies.optimizer_shards import ShardedState

# Size limit of one file of tensors, and the host memory that a save without a copy of all states
# needs on top of training.
PIECE_FILE_BYTES = 256 << 20
# Bytes that are hashed and then written, both without Python's lock: with small blocks the thread
# that writes would often ask for it.
BLOCK = 8 << 20


class PieceFile:
    """The content of a file of tensors, in host memory.

    Attributes:
        used: elements of `memory` that are filled.
    """

    def __init__(self, name: str, memory: torch.Tensor):
        """Create it without content, in fp32 `memory` of shape [elements]."""
        self.name, self.memory, self.used = name, memory, 0
        self._ranges: dict[str, tuple[int, int]] = {}  # first element of each tensor, and the end

    def add(self, key: str, flat: torch.Tensor) -> None:
        """Copy a flat tensor; from a GPU to page-locked memory on the current stream."""
        begin, self.used = self.used, self.used + flat.numel()
        self._ranges[key] = (begin, self.used)
        pinned = flat.is_cuda and self.memory.is_pinned()
        self.memory[begin : self.used].copy_(flat.detach(), non_blocking=pinned)

    def write(self, folder: Path, progress: Callable[[], object] = int) -> JsonObject:
        """Write the file in the format of safetensors, flush it to disk, and return its entry.

        The digest is that of the bytes in memory, so the file is not read again. Both release
        Python's lock: other threads compute meanwhile.

        Args:
            progress: is called after each block.
        Returns:
            The entry of the manifest: size in bytes and SHA-256.
        """
        header: JsonObject = {"__metadata__": {"format": "pt"}}
        for key, (begin, end) in self._ranges.items():
            place = {"data_offsets": [4 * begin, 4 * end]}
            header[key] = {"dtype": "F32", "shape": [end - begin], **place}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        content = memoryview(self.memory[: self.used].numpy()).cast("B")
        starts = range(0, len(content), BLOCK)
        digest, path = hashlib.sha256(), folder / self.name
        head = memoryview(len(text).to_bytes(8, "little") + text)
        try:
            with open(path, "wb", buffering=0) as file:
                for block in (head, *(content[i : i + BLOCK] for i in starts)):
                    digest.update(block)
                    while block:  # a disk that is nearly full takes a part of it
                        block = block[file.write(block) :]
                    progress()
                size = file.tell()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        return {"bytes": size, "sha256": digest.hexdigest()}


class PieceWriter:
    """Writer of the pieces of one rank, in files of at most PIECE_FILE_BYTES.

    Attributes:
        pieces: entries of the manifest.
        files: entries of the files that are written; complete after `flush`.
        unwritten: with `memory_of` the files, which `write` writes; complete after `flush`.
    """

    def __init__(
        self, folder: Path, rank: int = 0, memory_of: Callable[[int], torch.Tensor] | None = None
    ):
        """Create a writer.

        Args:
            memory_of: returns the memory of the file with this number, which keeps its content
                until it is written. None: a file is written when it is full, all from one memory.
        """
        self.folder, self.rank = folder, rank
        self.pieces: list[dict] = []
        self.files: dict[str, JsonObject] = {}
        self.unwritten: list[PieceFile] = []
        self._memory_of, self._memory = memory_of, torch.empty(0)
        self._open: PieceFile | None = None
        self._number, self._room = 0, 0  # of files so far; bytes that are left in the open one

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
            file = self._file_with_room(element)
            end = min(numel, begin + self._room // element)
            piece = {"name": name, "start": start + begin, "numel": end - begin}
            self.pieces.append({**piece, **kinds_entry(tensors), "file": file.name})
            for kind, flat in tensors.items():
                file.add(f"{name}@{start + begin}/{kind}", flat[begin:end])
            self._room -= element * (end - begin)
            begin = end

    def _file_with_room(self, bytes_: int) -> PieceFile:
        if self._open is not None and self._room < bytes_:
            self.flush()
        if self._open is None:
            name = f"rank-{self.rank:05d}-{self._number:03d}.safetensors"
            if self._memory_of is not None:
                self._memory = self._memory_of(self._number)
            elif not self._memory.numel():
                self._memory = torch.empty(PIECE_FILE_BYTES // 4)
            self._open, self._room = PieceFile(name, self._memory), PIECE_FILE_BYTES
            self._number += 1
        return self._open

    def flush(self) -> None:
        """Write the file that is not full; with `memory_of` leave it to `write`."""
        if self._open is not None:
            self.unwritten.append(self._open)
            self._open = None
            if self._memory_of is None:
                self.write()

    def write(self, progress: Callable[[], object] = int) -> None:
        """Write the files of `unwritten`.

        Args:
            progress: is called after each block of a file.
        """
        for file in self.unwritten:
            self.files[file.name] = file.write(self.folder, progress)
        self.unwritten.clear()


def write_shards(writer: PieceWriter, state: ShardedState, world_size: int) -> None:
    """Add the weights and moments of this rank, and flush the writer."""
    for shard in state.shards:
        with state.open(shard) as tensors:
            for piece in [] if state.is_copy else shard.pieces:
                begin, end = own_part(state, piece.numel, writer.rank, world_size)
                part = slice(piece.offset + begin, piece.offset + end)
                elements = {kind: flat[part] for kind, flat in tensors.items()}
                writer.add(piece.name, piece.start + begin, elements)
    writer.flush()


def own_part(state: ShardedState, numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first element of a piece that a rank saves, and the one after the last."""
    if state.replicated:  # every rank has all elements and writes an equal part of them
        return numel * rank // world_size, numel * (rank + 1) // world_size
    return 0, numel
