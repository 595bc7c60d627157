"""Files that are whole at any moment: written beside their name, flushed to disk, and then renamed; and their digests."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, and give it the name only when it is whole and on disk.

    Raises:
        OSError: the disk is full, or not writable; `path` is as it was.
    """
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(beside)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder with everything in it to disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def only_finite(value):
    """JSON has no word for infinity or not-a-number: null stands for them."""
    if isinstance(value, dict):
        return {key: only_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [only_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
