"""Types of JSON values, and checks of files that a run wrote and anybody may have changed since."""

import sys
from collections.abc import Callable
from typing import Any

JsonObject = dict[str, Any]  # an object of a JSON file, as json.loads returns it
Check = Callable[[object], bool]  # of a value of JSON


def is_count(value: object) -> bool:
    """Return whether a value is an integer from 0 on, with at most 63 bits."""
    return isinstance(value, int) and not is_switch(value) and 0 <= value < 1 << 63


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    if is_switch(value) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def is_text(value: object) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def is_switch(value: object) -> bool:
    """Return whether a value is true or false."""
    return isinstance(value, bool)


def anything(value: object) -> bool:
    """Accept every value."""
    return True


def either(*checks: Check) -> Check:
    """Return a check for values that pass one of several checks."""
    return lambda value: any(check(value) for check in checks)


def optional(check: Check) -> Check:
    """Return a check for null, and for values that pass `check`."""
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    """Return a check for lists of such values."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def dict_of(check: Check) -> Check:
    """Return a check for dictionaries with such values under any keys."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def record(required: dict[str, Check], **more: Check) -> Check:
    """Return a check for dictionaries with some keys; those in `more` may be missing.

    Unknown keys are accepted.

    Args:
        required: the check of the value of each key that must be present.
        more: the same for keys that may be missing.
    """

    def check(value: object) -> bool:
        checks = {**required, **more}
        return (
            isinstance(value, dict)
            and required.keys() <= value.keys()
            and all(checks[key](value[key]) for key in checks.keys() & value.keys())
        )

    return check
