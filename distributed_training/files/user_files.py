"""Files that a user names: text and JSON.

A file that cannot be used results in a message of one line that names the file.
"""

import difflib
import json
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distributed_training.console import printable
from distributed_training.errors import UserError, first_line

MOST_NESTED = 100  # levels of a JSON or YAML value
TOO_DEEP = f"it is nested in more than {MOST_NESTED} levels"


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


def reason_of(error: Exception, path: str | Path) -> str:
    """Return why a file cannot be used; without the permission, also what its owner can do.

    Args:
        path: the file, or the folder that contains it and others with the same permissions.
    """
    if isinstance(error, PermissionError):
        command = f"chmod -R a+rX {shlex.quote(str(path))}"
        return f"permission denied: its owner can allow it with `{command}`"
    return getattr(error, "strerror", None) or first_line(error, 200)


def check_readable(flag: str, folder: str, patterns: Iterable[str]) -> None:
    """Check that this process may read the files of a folder that a flag names.

    Args:
        patterns: of the names of the files that are read.
    Raises:
        UserError: it may not read one. Libraries report such a file as missing.
    """
    for path in sorted(path for pattern in patterns for path in Path(folder).glob(pattern)):
        if path.is_file() and not os.access(path, os.R_OK):
            reason = reason_of(PermissionError(), folder)
            raise UserError(f"{flag} {shown(path)} cannot be read: {reason}.")


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
        reason = "it is not UTF-8 text" if not_text else reason_of(error, path)
        raise UserError(f"{flag} {shown(path)} cannot be read: {reason}.") from error


def check_depth(value: object) -> None:
    """Raise a ValueError if a JSON or YAML value is nested so deeply that recursion would fail."""
    level = [value]
    for _ in range(MOST_NESTED):
        inner = [
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)
        ]
        level = [item for items in inner for item in items]
    if level:
        raise ValueError(TOO_DEEP)


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these keys and values; raise a ValueError if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return found


def read_user_json(flag: str, path: str, unique_keys: bool = False) -> dict:
    """Return the object in a JSON file.

    Args:
        unique_keys: refuse an object that has a key twice.
    Raises:
        UserError: the file cannot be read, or is not a JSON object, or is nested too deeply; the
            message has the line and column of a syntax error.
    """
    text = read_text(flag, path)
    try:
        value = json.loads(text, object_pairs_hook=unique_object if unique_keys else None)
        check_depth(value)
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} {shown(path)} is not JSON: {error}.") from error
    except RecursionError as error:
        raise UserError(f"{flag} {shown(path)}: {TOO_DEEP}.") from error
    except ValueError as error:
        raise UserError(f"{flag} {shown(path)}: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{shown(path)} must be a JSON object, {{ … }}.")
    return value


def create_folder(flag: str, folder: Path) -> None:
    """Create a folder that a flag names, if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {folder} cannot be created: {error.strerror}.") from error
