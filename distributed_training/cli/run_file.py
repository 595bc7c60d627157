"""Run files (--config): the flags of the command line, in YAML.

The keys are the names of the flags, also those that other trainers use. The sections `training:`
and `distributed:` only group keys. A value is the text that the file has, as on a command line, and
the type of the flag converts it: YAML 1.1, which PyYAML implements, would make 90 of 1:30.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NoReturn

from distributed_training import process
from distributed_training.cli.flags import AddToFlag, shown_flags
from distributed_training.cli.parser import Parser
from distributed_training.console import printable
from distributed_training.errors import EXIT_COMPLETED, UserError, redact
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import TOO_DEEP, check_depth, read_text, shown
from distributed_training.strategies.strategy import FlagValues

if TYPE_CHECKING:
    import yaml

GROUPING_KEYS = ("training", "distributed")


def read_run_file(path: str, parser: Parser) -> list[str]:
    """Read a run file, and return arguments of the command line such as "--lr=1e-4".

    Raises:
        UserError: the file cannot be read or is not YAML.
    """
    return as_arguments(read_yaml("--config", path), shown(path), parser)


def as_arguments(content: Mapping[str, object], place: str, parser: Parser) -> list[str]:
    """Return the values of a run file as arguments of the command line such as "--lr=1e-4".

    Args:
        content: the values by name of the flag; None leaves a flag out.
        place: where they are from, for messages.
    Raises:
        UserError: a value is nested, or two names set the same flag.
    """
    pairs = [(key, value) for key, value in content.items() if key not in GROUPING_KEYS]
    for section in GROUPING_KEYS:
        values = content.get(section) or {}
        if not isinstance(values, dict):
            raise UserError(f"{place}: {section} is a section: indent its keys below it.")
        pairs += [(str(key), value) for key, value in values.items()]
    actions = {option[2:]: a for option, a in parser._option_string_actions.items()}
    _refuse_repeated(place, [(key, actions[key].dest) for key, _ in pairs if key in actions])
    arguments: list[str] = []
    for key, value in pairs:
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list | set) for item in items):
            raise UserError(f"{place}: {key} cannot have nested values.")
        if isinstance(value, list) and None in items:
            raise UserError(f"{place}: {key} has an empty value: remove it, or write '' for it.")
        values = list(map(_as_text, items)) if isinstance(value, list) else []
        if values and isinstance(actions.get(key), AddToFlag):
            arguments += [f"--{key}={text}" for text in values]
            continue
        if any(text.startswith("-") for text in values):
            raise UserError(f"{place}: {key} cannot be {shown(value)}.")
        if values and key in actions and actions[key].nargs in ("+", "*"):
            arguments += [f"--{key}", *values]
        elif value is not None:
            text = ",".join(values) if isinstance(value, list) else _as_text(value)
            arguments.append(f"--{key}={text}")
    return arguments


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refuse_repeated(place: str, keys: list[tuple[str, str]]) -> None:
    """Refuse two keys that set the same flag, and `config`: a run file names no other one.

    Args:
        keys: each key with the name of its flag.
    """
    names: dict[str, str] = {}
    for key, flag in keys:
        if flag == "config":
            raise UserError(f"{place}: {key} cannot be in a run file: use one file.")
        if flag in names:
            raise UserError(f"{place}: {names[flag]} and {key} set the same flag: keep one.")
        names[flag] = key


def as_yaml(values: FlagValues, sources: Mapping[str, str]) -> str:
    """Return flags as YAML that --config can read.

    A comment after each value names its source: the default, a flag, or a file with its key.

    Args:
        values: of all flags, by name.
        sources: of those that are not defaults.
    """
    import yaml

    lines = []
    for name, value in shown_flags(values).items():
        value = True if name == "resume" and value == "" else value
        text = yaml.safe_dump({name: value}, allow_unicode=True, width=math.inf).rstrip()
        lines.append(f"{text}  # {printable(sources.get(name, 'default'))}\n")
    return "".join(lines)


def read_yaml(flag: str, path: str) -> JsonObject:
    """Return the mapping in a YAML file, in which each scalar is a text or null.

    Raises:
        UserError: the file cannot be read, is not YAML (the message has the line and column), or is
            not a mapping.
    """
    import yaml

    text, place = read_text(flag, path), f"{flag} {shown(path)}"
    try:
        value = yaml.load(text, _loader(place))
        check_depth(value)
    except RecursionError as error:
        raise UserError(f"{place}: {TOO_DEEP}.") from error
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{place} is not YAML: {shown(problem, 300)}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{place}: a run file is a list of `key: value` lines.")
    return {str(key): item for key, item in value.items()}


def _loader(place: str) -> type[yaml.SafeLoader]:
    """Return a loader of YAML that keeps the text of scalars, and refuses a key that occurs twice.

    Args:
        place: the file, for messages.
    """
    import yaml

    class TextLoader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict] = {}

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise UserError(f"{place}: the key {shown(twice[0])} occurs twice.")
            return super().construct_mapping(node, deep)

    tag = "tag:yaml.org,2002:"
    null = re.compile("(?:~|null|Null|NULL|)$")
    TextLoader.add_implicit_resolver(f"{tag}null", null, ["~", "n", "N", ""])
    TextLoader.add_implicit_resolver(f"{tag}merge", re.compile("<<$"), ["<"])
    for kind in ("bool", "int", "float", "timestamp"):  # with a tag, as in !!int 010
        TextLoader.add_constructor(f"{tag}{kind}", TextLoader.construct_scalar)
    return TextLoader


def print_config(flags: FlagValues, sources: dict[str, str]) -> NoReturn:
    """Print the flags as a run file, and exit."""
    print(redact(as_yaml(flags, sources)), end="")
    process.check_output()
    sys.exit(EXIT_COMPLETED)
