"""A setting of a section: a field of a dataclass, with its flag, type, default and help."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from distributed_training.settings import flag_types

COMPUTED = object()  # a default that depends on other flags: cli/parse.py computes it


def flag(default: object, kind: Callable[[str], object], text: str, **options: object) -> Any:
    """Return a field with the flag --NAME, NAME being the name of the field.

    Args:
        default: the value without the flag. With COMPUTED the section cannot be created without it.
        kind: converts the text of a value, or raises argparse.ArgumentTypeError; see flag_types.
        text: the help.
        options: others of argparse's `add_argument`: metavar, choices, nargs, const, and the action
            "append" for a flag that may be repeated, whose value is a tuple.
    """
    of_parser = None if default is COMPUTED else default
    metadata = {"default": of_parser, "type": kind, "help": text, "options": options}
    if default is COMPUTED:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def switch(default: bool, text: str) -> Any:
    """Return a field with the flags --NAME and --no_NAME.

    Args:
        text: the help of the one that changes the default.
    """
    return flag(default, flag_types.boolean, text)


class Section(Protocol):
    """A frozen dataclass of flags, and the title of their group in --help."""

    title: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]


def flags_of(section: type[Section]) -> list[dataclasses.Field]:
    """Return the fields of a section that are flags."""
    return [field for field in dataclasses.fields(section) if "help" in field.metadata]
