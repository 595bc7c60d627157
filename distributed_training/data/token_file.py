"""Arrays in files of the token cache, which are read during training."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from distributed_training.errors import TrainingError


class TokenFile:
    """A flat array on disk: the tokens of a split, or another array in a folder of the cache.

    The file stays open, so that a run survives the removal of the cache (a scratch that is purged,
    or another run that replaces the folder). Each read compares the size with the one that was
    verified, because a file that was cut would otherwise end earlier or be read as zeros. Content
    that changes at the same size is not detected: runs never write into a file of the cache, a
    changed time proves nothing (users touch files so that a scratch keeps them), and a digest at
    each read would cost more than the read.

    Args:
        path: the file. It is not mapped, because the pages of a mapping would count as memory of
            this process, and a shuffled epoch touches all of them.
        dtype: of the array; negative numbers only in the tokens of examples.
        count: number of items that the file must have.
        end_of_text: the id that ends a document, see `sequences.Part`.
        sizes: the bytes of the text that each token id stands for; None: not known.
    Raises:
        TrainingError: the file cannot be read, or has another size.
    """

    def __init__(
        self,
        path: str,
        dtype: str,
        count: int,
        end_of_text: int | None = None,
        sizes: TokenFile | None = None,
    ) -> None:
        self.path, self.end_of_text, self._sizes = path, end_of_text, sizes
        self.count, self._dtype = count, np.dtype(dtype)
        self._bytes = count * self._dtype.itemsize
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise self._changed(error.strerror or str(error)) from error
        weakref.finalize(self, os.close, self._descriptor)
        self.read(0, 0)

    def read(self, start: int, end: int) -> np.ndarray:
        """Return the items [start, end).

        Raises:
            TrainingError: the file cannot be read, or has another size than at the start.
        """
        first, size = start * self._dtype.itemsize, (end - start) * self._dtype.itemsize
        content = b""
        try:
            found = os.fstat(self._descriptor).st_size
            while found == self._bytes and len(content) < size:
                part = os.pread(self._descriptor, size - len(content), first + len(content))
                content += part
                if not part:  # it was cut after fstat
                    found = first + len(content)
        except OSError as error:
            raise self._changed(error.strerror or str(error)) from error
        if found != self._bytes:
            raise self._changed(f"it has {found:,} bytes and must have {self._bytes:,}")
        return np.frombuffer(content, self._dtype)

    def sizes_by_id(self) -> np.ndarray:
        """Return the bytes of the text that each token id stands for: float64 [ids]."""
        assert self._sizes is not None, "these tokens are never evaluated"
        return self._sizes.read(0, self._sizes.count)

    def _changed(self, problem: str) -> TrainingError:
        return TrainingError(
            f"{self.path} was changed or removed after the run had verified it ({problem}). Remove "
            f"{Path(self.path).parent}, and do not change the cache during a run: the next run "
            "writes the folder again, and --resume continues from a checkpoint."
        )
