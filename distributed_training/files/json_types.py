"""Values of JSON files."""

import sys
from typing import Any

JsonObject = dict[str, Any]  # an object of a JSON file, as json.loads returns it


def lookup(value: object, key: str) -> Any:
    """Return the value at a dotted key of nested objects ("optimizer.params.lr"), or None."""
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def is_count(value: object) -> bool:
    """Return whether a value is an integer from 0 on, with at most 63 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
