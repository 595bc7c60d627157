"""The files of a folder of data."""

import os
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from distributed_training.errors import UserError
from distributed_training.files.user_files import reason_of


def files_of(path: Path, name: str, include: str | None = None) -> list[Path]:
    """Return a folder's files that are not hidden, not empty and match --include, sorted by path.

    Args:
        path: the folder, or a file, which is returned as the only one. Links to files are followed,
            links to folders are not.
        name: the name that the user gave, for messages.
        include: patterns as in `fnmatch`, separated by commas; None for all files. A pattern with a
            slash is compared with the path, any other with the name of the file.
    Raises:
        UserError: there are no such files, or a part of the folder cannot be read.
    """
    patterns = [pattern.strip() for pattern in include.split(",")] if include else ["*"]
    try:
        if path.is_file():
            return [path]
        if not path.exists():
            raise UserError(f"{name}: no such file or folder.")
        if not path.is_dir():
            raise UserError(f"{name} is a pipe or a device: save the data in a file first.")
        found = [file for file in _walk(path) if file.is_file() and file.stat().st_size]
    except OSError as error:  # for instance a name that is too long, or no permission
        place = error.filename or path
        reason = reason_of(error, place)
        raise UserError(f"{name[:200]}: {place} cannot be read: {reason}.") from error
    if not found:
        raise UserError(f"{name}: the folder has no files, or only empty ones.")

    def matches(file: Path, pattern: str) -> bool:
        inside = file.relative_to(path).as_posix()
        return fnmatchcase(inside if "/" in pattern else file.name, pattern)

    files = [file for file in found if any(matches(file, pattern) for pattern in patterns)]
    if not files:
        raise UserError(
            f"--include {include}: no file in {name} matches; there are {count_types(found)}."
        )
    return sorted(files)


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for parent, subfolders, files in os.walk(folder, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(parent, file) for file in files if not file.startswith("."))


def count_types(files: list[Path]) -> str:
    """Return the number of files of each type as a text: "12 .txt, 1 .json"."""
    counts = Counter(file.suffix.lower() or "without a suffix" for file in files)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common())
