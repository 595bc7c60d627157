"""Read the small YAML and JSON files that a user writes.

A file that cannot be used results in a message of one line that names the file, for any problem:
its size, its nesting, its numbers, duplicate keys.
"""

from __future__ import annotations

import difflib
import json
import reprlib
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from support.errors import UserError
from support.files.atomic import DEEPEST_JSON, depth

MOST_CHARACTERS = 1 << 20
MOST_NODES = 20_000  # values in a YAML file, where each use of an alias counts


def printable(text: str) -> str:
    """Return a text on one line, with escape sequences for characters that are not printable."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def shown(value, most: int = 100) -> str:
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
    place = Path(path)
    try:
        kind = place.stat().st_mode
        pipe = stat.S_ISFIFO(kind) and str(place).startswith(("/dev/fd/", "/proc/self/fd/"))
        # A device or a named pipe may never end.
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or pipe):
            raise UserError(f"{flag} {shown(path)} is not an ordinary file.")
        with open(place, encoding="utf-8-sig") as file:
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


# --------------------------------------------------------------------------------------------- JSON


class DuplicateKey(ValueError):
    """An error of a JSON object that has a key twice."""

    def __init__(self, key: str):
        super().__init__(f"the key {reprlib.repr(key)} is given twice")
        self.key = key


def unique_keys(pairs: list[tuple[str, object]]) -> dict:
    """Return a JSON object with these keys and values; for `object_pairs_hook` of a parser."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise DuplicateKey(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return mapping


def parse_json(text: str, path: str, loads=json.loads, unique: bool = True):
    """Parse JSON.

    Args:
        path: path of the file, for messages.
        loads: json.loads, or another parser with the same arguments (hjson.loads).
        unique: refuse an object with a duplicate key.
    Raises:
        UserError: a key is duplicate, a number is too long, or the nesting is too deep.
        ValueError: the text is not JSON (json.JSONDecodeError, hjson.HjsonDecodeError).
    """
    try:
        value = loads(text, object_pairs_hook=unique_keys if unique else dict)
    except DuplicateKey as error:
        raise UserError(
            f"{shown(path)} gives the key {shown(error.key)} twice in one object: leave one out."
        ) from error
    except RecursionError as error:
        raise _too_deep(path) from error
    except ValueError as error:
        if hasattr(error, "lineno"):
            raise
        raise UserError(f"{shown(path)} has a number with thousands of digits.") from error
    if depth(value) > DEEPEST_JSON:
        raise _too_deep(path)
    return value


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


def _too_deep(path: str) -> UserError:
    return UserError(f"{shown(path)} is nested in more than {DEEPEST_JSON} levels.")


# --------------------------------------------------------------------------------------------- YAML


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

    text = read_text(flag, path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        if problem.startswith("but "):
            problem = f"{error.context}, {problem}"
        raise UserError(f"{flag} {shown(path)}{position}: {shown(problem)}.") from error
    except RecursionError as error:
        raise _too_deep(path) from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{flag} {shown(path)}: a run file is a list of `key: value` lines.")
    return _YamlReader(path).value_of(root, 0)


class _YamlReader:
    """A converter of YAML nodes to values, which counts them.

    With aliases, a short file can expand to any number of values.
    """

    def __init__(self, path: str):
        self.path, self.nodes = path, 0

    def value_of(self, node, level: int):
        self.nodes += 1 + len(node.value) // 50 if isinstance(node.value, str) else 1
        if level > DEEPEST_JSON:
            raise _too_deep(self.path)
        if self.nodes > MOST_NODES:
            expanded = f"its aliases (*name) expand to more than {MOST_NODES:,} values"
            raise UserError(f"{shown(self.path)}: {expanded}.")
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind == "seq":
            return [self.value_of(item, level + 1) for item in node.value]
        if kind == "map":
            return self._mapping(node, level)
        if kind == "null":
            return None
        if kind == "bool":
            return node.value.lower() in ("true", "yes", "on")
        if kind in ("str", "int", "float", "timestamp", "value"):
            return node.value
        raise self._refuse(node, f"the tag {shown(node.tag)} has no meaning here")

    def _mapping(self, node, level: int) -> dict:
        mapping = {}
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                problem = f"the key {shown(str(key.value))} is not text, as the name of a flag is"
                raise self._refuse(key, problem)
            if key.value in mapping:
                raise self._refuse(key, f"{shown(key.value)} is given twice, leave one out")
            mapping[key.value] = self.value_of(value, level + 1)
        return mapping

    def _refuse(self, node, problem: str) -> UserError:
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        return UserError(f"{shown(self.path)}, line {line}, column {column}: {problem}.")
