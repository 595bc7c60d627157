"""Read the small YAML and JSON files that a user writes.

A file that cannot be used results in a message of one line that names the file.
"""

from __future__ import annotations

import difflib
import json
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from support.errors import UserError

MOST_CHARACTERS = 1 << 20


def printable(text: str) -> str:
    """Return a text on one line, with escape sequences for characters that are not printable."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


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


def read_text(flag: str, path: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text of a small file.

    Args:
        flag: the flag that names the file, for messages ("--config").
        path: path of the file, or of a pipe from the shell, `<(...)`.
    Raises:
        UserError: the file cannot be read, is not UTF-8, is longer than `most`, or is a device or
            another pipe.
    """
    try:
        kind = Path(path).stat().st_mode
        pipe = stat.S_ISFIFO(kind) and path.startswith(("/dev/fd/", "/proc/self/fd/"))
        # A device or a named pipe may never end.
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or pipe):
            raise UserError(f"{flag} {shown(path)} is not an ordinary file.")
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path, or no UTF-8
        not_text = isinstance(error, UnicodeDecodeError)
        reason = "it is not UTF-8 text" if not_text else getattr(error, "strerror", error)
        raise UserError(f"{flag} {shown(path)} cannot be read: {reason}.") from error
    if len(text) > most:
        raise UserError(
            f"{flag} {shown(path)} is longer than {most:,} characters: is it the right file?"
        )
    return text


class DuplicateKey(ValueError):
    """An error of a JSON object that has a key twice."""


def unique_keys(pairs: list[tuple[str, object]]) -> dict:
    """Return a JSON object with these keys and values; for `object_pairs_hook` of a parser."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise DuplicateKey(f"the key {shown(key)} is given twice")
    return mapping


def parse_json(text: str, path: str, unique: bool = True) -> Any:
    """Parse JSON.

    Args:
        path: path of the file, for messages.
        unique: refuse an object with a duplicate key.
    Raises:
        UserError: a key is duplicate, a number is too long, or the nesting is too deep.
        ValueError: the text is not JSON (json.JSONDecodeError).
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys if unique else dict)
    except DuplicateKey as error:
        raise UserError(f"{shown(path)}: {error} in one object, leave one out.") from error
    except RecursionError as error:
        raise UserError(f"{shown(path)} is nested too deeply.") from error
    except ValueError as error:
        if hasattr(error, "lineno"):
            raise
        raise UserError(f"{shown(path)} has a number with thousands of digits.") from error


def read_json(flag: str, path: str, unique: bool = True, most: int = MOST_CHARACTERS) -> dict:
    """Return the object in a JSON file.

    Args:
        flag, path, most: see `read_text`.
        unique: see `parse_json`.
    Raises:
        UserError: the file cannot be read, or is not a JSON object; the message has the line and
            column of a syntax error.
    """
    try:
        value = parse_json(read_text(flag, path, most), path, unique=unique)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{shown(path)}, line {error.lineno}, column {error.colno}: {error.msg}."
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{shown(path)} must be a JSON object, {{ … }}.")
    return value


def read_yaml(flag: str, path: str) -> dict:
    """Return the mapping in a YAML file.

    Values are text as written, True, False, None, or lists and mappings of these. Numbers and dates
    are not converted, because YAML reads 010 as 8 and 1:30 as 90; the flags parse their values.

    Args:
        flag, path: see `read_text`.
    Raises:
        UserError: the file cannot be read, is not YAML (the message has the line and column), or is
            not a mapping; a key is duplicate or not text.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, words) for tag, words in rules if tag.endswith((":bool", ":null"))]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value]
            for key, _ in node.value:
                text = shown(str(key.value))
                if key.tag != "tag:yaml.org,2002:str":
                    problem = f"the key {text} is not text, as the name of a flag is"
                elif keys.count(key.value) > 1:
                    problem = f"{text} is given twice, leave one out"
                else:
                    continue
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            return super().construct_mapping(node, deep)

    try:
        value = yaml.load(read_text(flag, path), Loader=Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        raise UserError(f"{flag} {shown(path)}{position}: {shown(problem)}.") from error
    except RecursionError as error:
        raise UserError(f"{shown(path)} is nested too deeply.") from error
    if not isinstance(value, dict):
        raise UserError(f"{flag} {shown(path)}: a run file is a list of `key: value` lines.")
    return value
