"""Read the small YAML and JSON files that a user writes.

A file that cannot be used gives one line that names it, whatever is wrong with it: size, nesting,
numbers, keys given twice.
"""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path

from support.errors import UserError
from support.files.atomic import DEEPEST_JSON, depth

MOST_CHARACTERS = 1 << 20
MOST_NODES = 20_000  # of a YAML file, each use of an alias counted


def printable(text: str) -> str:
    """A text on one line, with escapes for what a terminal would not show."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def shown(value, most: int = 100) -> str:
    """A value of a user or of a file as a message quotes it: on one line, and shortened in its
    middle.
    """
    text = printable(str(value))
    if not text.strip():
        return f"'{text}'"
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


def read_text(flag: str, path: str, most: int = MOST_CHARACTERS) -> str:
    """The text of a small file.

    Args:
        flag: names the file in messages ("--config").
        path: of the file; also a pipe of the shell, `<(...)`.
        most: characters that are accepted.
    Raises:
        UserError: it cannot be read, is not UTF-8, is longer than `most`, or is a device.
    """
    place = Path(path).expanduser()
    try:
        kind = place.stat().st_mode
        pipe = stat.S_ISFIFO(kind) and str(place).startswith(("/dev/fd/", "/proc/self/fd/"))
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or pipe):  # others may never end
            raise UserError(f"{flag} {shown(path)} is not an ordinary file.")
        with open(place, encoding="utf-8-sig") as file:
            text = file.read(most + 1)
    except OSError as error:
        raise UserError(f"{flag} {shown(path)} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {shown(path)} cannot be read: it is not UTF-8 text.") from error
    except ValueError as error:  # a NUL character in the path
        raise UserError(f"{flag} {shown(path)} cannot be read: {error}.") from error
    if len(text) > most:
        raise UserError(
            f"{flag} {shown(path)} is longer than {most:,} characters: is it the right file?"
        )
    return text


# --------------------------------------------------------------------------------------------- JSON


def parse_json(text: str, path: str, loads=json.loads, unique: bool = True):
    """Parse JSON.

    Args:
        text: the file's content.
        path: of the file, for messages.
        loads: json.loads, or another parser with its arguments (hjson's).
        unique: refuse an object that gives a key twice.
    Raises:
        UserError: a key is given twice, a number or the nesting is too large.
        ValueError: it is not JSON (json.JSONDecodeError, hjson.HjsonDecodeError).
    """

    def as_dict(pairs: list) -> dict:
        found = dict(pairs)
        if unique and len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise UserError(
                f"{shown(path)} gives the key {shown(twice)} twice in one object: leave one out."
            )
        return found

    try:
        value = loads(text, object_pairs_hook=as_dict)
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
    """The object in a JSON file.

    Raises:
        UserError: it cannot be read, is not JSON (with line and column), or is no object.
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
    """The mapping in a YAML file, its values as written: text, True and False, None, or lists and
    mappings of these.

    YAML's own reading of numbers and dates is left out (it takes 010 for 8 and 1:30 for 90): the
    flags parse their values.

    Raises:
        UserError: it cannot be read, is not YAML (with line and column), or is no mapping; a key is
            given twice or is not text.
    """
    import yaml

    text = read_text(flag, path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        if problem.startswith("but "):
            problem = f"{error.context}, {problem}"
        raise UserError(f"{flag} {shown(path)}{where}: {shown(problem)}.") from error
    except RecursionError as error:
        raise _too_deep(path) from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{flag} {shown(path)}: a run file is a list of `key: value` lines.")
    return _YamlReader(path).value_of(root, 0)


class _YamlReader:
    """Turns YAML's nodes into values, and counts them: aliases can make a short file as large as
    they like.
    """

    def __init__(self, path: str):
        self.path, self.nodes = path, 0

    def value_of(self, node, level: int):
        self.nodes += 1 + len(node.value) // 50 if isinstance(node.value, str) else 1
        if level > DEEPEST_JSON:
            raise _too_deep(self.path)
        if self.nodes > MOST_NODES:
            raise UserError(
                f"{shown(self.path)}: its aliases (*name) expand to more than {MOST_NODES:,} values."
            )
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
        found = {}
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise self._refuse(
                    key, f"the key {shown(str(key.value))} is not text, as the name of a flag is"
                )
            if key.value in found:
                raise self._refuse(key, f"{shown(key.value)} is given twice, leave one out")
            found[key.value] = self.value_of(value, level + 1)
        return found

    def _refuse(self, node, problem: str) -> UserError:
        mark = node.start_mark
        return UserError(
            f"{shown(self.path)}, line {mark.line + 1}, column {mark.column + 1}: {problem}."
        )
