"""Checks of files that a run wrote and anybody may have changed since.

The type of a file is a TypedDict, which mypy reads, and with which msgspec compares the content.
Keys that the type does not have are accepted: later versions may add some.
"""

import re
import sys
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# Neither NaN nor infinite.
Number = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Simple = bool | Number | str
PLACE = re.compile(r" - at `\$\.?(.*)`$")
MISSING = re.compile(r"required field `(.*?)`")


def wrong_place(value: object, expected: type) -> str:
    """Return the place of a value of another type, such as "memory.peak_bytes[...]".

    It is the first one that msgspec finds; "" if there is none, and "its type" for the whole value.
    """
    try:
        msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        place, missing = PLACE.search(str(error)), MISSING.search(str(error))
        found = [match[1] for match in (place, missing) if match]
        return ".".join(found) or "its type"
    return ""


def has_type(value: object, expected: type) -> bool:
    """Return whether a value has a type."""
    return not wrong_place(value, expected)
