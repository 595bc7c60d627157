"""Files that a user names: small YAML and JSON files, and the files of a folder.

A file that cannot be used results in a message of one line that names the file.
"""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from support.errors import UserError


def printable(text: str) -> str:
    """Return a text on one line, with escape sequences for characters that are not printable."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shown(value: object, most: int = 100) -> str:
    """Return a value of a user or of a file for a message: on one line, shortened in its middle.

    Args:
        most: length in characters beyond which it is shortened.
    """
    text = printable(str(value))
    if not text.strip():
        return f"'{text}'"
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ": did you mean X?" with the most similar known word; "" if none is similar."""
    # With difflib's default of 0.6, --hostfile would be similar to --profile.
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return f": did you mean {matches[0]}?" if matches else ""


def read_text(flag: str, path: str) -> str:
    """Return the text of a file, or of a pipe from the shell, `<(...)`.

    Args:
        flag: the flag that names the file, for messages ("--config").
    Raises:
        UserError: the file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        not_text = isinstance(error, UnicodeDecodeError)
        reason = "it is not UTF-8 text" if not_text else getattr(error, "strerror", error)
        raise UserError(f"{flag} {shown(path)} cannot be read: {reason}.") from error


def read_json(flag: str, path: str) -> dict:
    """Return the object in a JSON file.

    Raises:
        UserError: the file cannot be read, or is not a JSON object; the message has the line and
            column of a syntax error.
    """
    try:
        value = json.loads(read_text(flag, path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{flag} {shown(path)} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{shown(path)} must be a JSON object, {{ … }}.")
    return value


def read_yaml(flag: str, path: str) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        UserError: the file cannot be read, is not YAML (the message has the line and column), or is
            not a mapping.
    """
    import yaml

    try:
        value = yaml.safe_load(read_text(flag, path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # 2026-02-30 is a ValueError
        problem = " ".join(str(error).split())
        raise UserError(f"{flag} {shown(path)} is not YAML: {shown(problem, 300)}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{flag} {shown(path)}: a run file is a list of `key: value` lines.")
    return {str(key): item for key, item in value.items()}


# ------------------------------------------------------------------------------- files of a folder


def create_folder(flag: str, folder: Path) -> None:
    """Create a folder that a flag names, if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {folder} cannot be created: {error.strerror}.") from error


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
        raise UserError(f"{name[:200]}: {place} cannot be read: {error.strerror}.") from error
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
