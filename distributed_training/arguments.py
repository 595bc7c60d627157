"""Checks of the arguments of public functions: a wrong one is a UserError of one line."""

import os
from numbers import Integral, Real
from typing import cast

from distributed_training.errors import UserError
from distributed_training.files.user_files import shown


def number(name: str, value: object, low: float, high: float, unit: str = "") -> float:
    """Return the value of an argument as a float.

    Args:
        unit: of the value, for the message, such as " GB".
    Raises:
        UserError: it is not a number from `low` to `high`; nan is not.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and low <= cast(float, value) <= high:
        return float(cast(float, value))
    raise UserError(f"{name}={shown(repr(value))} is not a number from {low:g} to {high:g}{unit}.")


def whole(name: str, value: object, low: int, high: int) -> int:
    """Return the value of an argument as an int.

    Raises:
        UserError: it is not a whole number from `low` to `high`.
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if is_whole and low <= cast(int, value) <= high:
        return int(cast(int, value))
    raise UserError(f"{name}={shown(repr(value))} is not a whole number from {low} to {high:,}.")


def path(name: str, value: object) -> str:
    """Return the value of an argument as text, as it is given: "./gpt2" is a folder, "gpt2" a name.

    Raises:
        UserError: it is neither text nor a path.
    """
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise UserError(f"{name}={shown(repr(value))} is neither text nor a path.")
