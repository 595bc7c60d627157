"""Which files of a folder are read: all that are not hidden or empty, or those that --include
names.
"""

from __future__ import annotations

import os
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from support.errors import UserError

SHOWN = 3  # files that a notice names


def files_of(path: Path, name: str, include: str | None = None) -> list[Path]:
    """A file; or all of a folder's that are not hidden, not empty and match --include, in order.

    Args:
        path: the file or folder. Links to files are followed, links to folders are not.
        name: what the user called it.
        include: patterns of names with commas between, None for all; see `is_included`.
    Raises:
        UserError: there are none, or a part of the folder cannot be read.
    """
    try:
        if path.is_file():
            return [path]
        if not path.exists():
            raise UserError(f"{name}: no such file or folder.")
    except OSError as error:  # a name that is too long, a folder that is closed to this user
        raise UserError(f"{name[:200]} cannot be read: {error.strerror}.") from error
    if not path.is_dir():
        raise UserError(f"{name} is a pipe or a device: save the data in a file first.")
    there = [file for file in _walk(path, name) if _has_data(file)]
    if not there:
        raise UserError(f"{name}: the folder holds no files, or empty ones only.")
    files = sorted(
        file for file in there if include is None or is_included(file.relative_to(path), include)
    )
    if not files:
        raise UserError(
            f"--include {include}: no file in {name} has such a name; there are {count_types(there)}."
        )
    return files


def _walk(folder: Path, name: str):
    def refuse(error: OSError) -> None:
        raise UserError(f"{name}: {error.filename} cannot be read: {error.strerror}.") from error

    for where, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [one for one in folders if not one.startswith(".")]
        yield from (Path(where, file) for file in files if not file.startswith("."))


def _has_data(file: Path) -> bool:
    """Whether it is a file, no pipe or device or broken link, and not empty."""
    try:
        return file.is_file() and file.stat().st_size > 0
    except FileNotFoundError:  # removed since the folder was listed
        return False


def is_included(file: Path, include: str) -> bool:
    """Whether one of the patterns fits: a pattern with a slash fits the path in the folder, any
    other the file's name.
    """
    patterns = [pattern.strip() for pattern in include.split(",")]
    return any(
        fnmatchcase(file.as_posix() if "/" in pattern else file.name, pattern)
        for pattern in patterns
    )


def count_types(files: list[Path]) -> str:
    """How many files there are of each type: "12 .txt, 1 .json"."""
    counts = Counter(file.suffix.lower() or "without a suffix" for file in files)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common())


def advise_include(files: list[Path]) -> str:
    """What helps if one type of files in a folder is not meant; empty if there is only one type."""
    types = Counter(file.suffix for file in files).most_common()
    usual = next((suffix for suffix, _ in types if suffix), "")
    return f" Files of one type only: --include '*{usual}'." if len(types) > 1 else ""


def describe_twins(twins: dict[Path, Path], what: str) -> list[str]:
    """Lines about files that are left out because an earlier one has the same.

    Args:
        twins: each file that is left out, and the earlier one.
        what: they have in common: "content" or "text".
    """
    lines = [
        f"{twin} has the same {what} as {first}: used once."
        for twin, first in list(twins.items())[:SHOWN]
    ]
    if len(twins) > SHOWN:
        lines.append(
            f"{len(twins) - SHOWN:,} more files have the same {what} as others: each is used once."
        )
    return lines
