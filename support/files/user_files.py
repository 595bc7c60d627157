"""Read the small YAML and JSON files that a user writes, and show their values in messages.

A file that cannot be used results in a message of one line that names the file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

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
        # Another pipe or a device may never end.
        if (Path(path).is_fifo() and not path.startswith("/dev/fd/")) or Path(
            path
        ).is_char_device():
            raise UserError(f"{flag} {shown(path)} is not an ordinary file.")
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path, or no UTF-8
        not_text = isinstance(error, UnicodeDecodeError)
        reason = "it is not UTF-8 text" if not_text else getattr(error, "strerror", error)
        raise UserError(f"{flag} {shown(path)} cannot be read: {reason}.") from error


class DuplicateKey(ValueError):
    """An error of a JSON object that has a key twice."""


def unique_keys(pairs: list[tuple[str, object]]) -> dict:
    """Return a JSON object with these keys and values; for `object_pairs_hook` of a parser."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in keys if keys.count(key) > 1)
        raise DuplicateKey(f"the key {shown(key)} is given twice")
    return mapping


def read_json(flag: str, path: str) -> dict:
    """Return the object in a JSON file.

    Raises:
        UserError: the file cannot be read, or is not a JSON object; the message has the line and
            column of a syntax error.
    """
    try:
        value = json.loads(read_text(flag, path), object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        place = f"{shown(path)}, line {error.lineno}, column {error.colno}"
        raise UserError(f"{place}: {error.msg}.") from error
    except (ValueError, RecursionError) as error:  # a key that is given twice, or deep nesting
        raise UserError(f"{shown(path)}: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{shown(path)} must be a JSON object, {{ … }}.")
    return value


def read_yaml(flag: str, path: str) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Values are text as written, True, False, None, or lists and mappings of these. Numbers and dates
    are not converted, because YAML reads 010 as 8 and 1:30 as 90; the flags parse their values.

    Raises:
        UserError: the file cannot be read, is not YAML (the message has the line and column), or is
            not a mapping.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, words) for tag, words in rules if tag.endswith((":bool", ":null"))]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        value = yaml.load(read_text(flag, path), Loader=Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise UserError(f"{flag} {shown(path)}{position}: {shown(problem)}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{flag} {shown(path)}: a run file is a list of `key: value` lines.")
    return value
