"""The content of a checkpoint's manifest.json: the type of each value, and what must agree.

A digest that matches shows that a manifest was not damaged. It does not show who wrote it: any
program can compute the digest.
"""

import math
from collections.abc import Callable
from typing import Any

from support.checkpoints.format import KINDS
from support.files.user_files import shown

Check = Callable[[Any], bool]  # of a value of JSON


def is_count(value: Any) -> bool:
    """Return whether a value is an integer from 0 on, with at most 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return type(value) in (int, float) and -math.inf < value < math.inf


def is_text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def is_switch(value: Any) -> bool:
    """Return whether a value is true or false."""
    return isinstance(value, bool)


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
    """Return a check for dictionaries with these keys; those of `more` and unknown ones may lack.

    Args:
        required: the check of the value of each key that must be present.
        more: the same for keys that may be missing.
    """

    def check(value: Any) -> bool:
        checks = {**required, **more}
        return (
            isinstance(value, dict)
            and required.keys() <= value.keys()
            and all(checks[key](value[key]) for key in checks.keys() & value.keys())
        )

    return check


READER = record({}, **dict.fromkeys(("row", "pass", "first", "part"), is_count))
LANE = record(
    {},
    reader=READER,
    counts=dict_of(is_count),
    **dict.fromkeys(("offset", "chunk", "used"), is_count),
)
COUNTERS = record(
    {},
    best=optional(record({"loss": is_number, "step": is_count, "waited": is_count})),
    training_seconds=is_number,
    **dict.fromkeys(("first_loss", "last_loss"), optional(is_number)),
    **dict.fromkeys(("step", "samples", "tokens"), is_count),
)
IDENTITY = record(
    {},
    hard=record({}, parameters=is_count),
    soft=record({}, model=is_text),
    told=record({}, strategy=is_text, ranks=is_count),
)
PIECE = {"name": is_text, "start": is_count, "numel": is_count, "moments": is_switch}
REQUIRED: dict[str, Check] = {
    "counters": COUNTERS,
    "identity": IDENTITY,
    "adam_step": is_count,
    "shapes": dict_of(list_of(is_count)),
    "pieces": list_of(record({**PIECE, "file": is_text})),
    "files": dict_of(record({"bytes": is_count, "sha256": is_text})),
}
# Older versions did not write these keys.
OPTIONAL: dict[str, Check] = {
    "scaling": dict_of(optional(either(is_switch, is_number))),
    "lr_scheduler": dict_of(lambda value: True),
    "stream": optional(record({"lanes": dict_of(LANE), "bad": list_of(is_text)})),
    "groups": list_of(dict_of(lambda value: True)),
    "optimizer": is_text,
}


def check_manifest(manifest: dict[str, Any]) -> None:
    """Check the type of each value of a manifest, the names of its files, and its pieces.

    Raises:
        KeyError: a key is missing.
        ValueError: the message says what is wrong.
    """
    for key, check in {**REQUIRED, **OPTIONAL}.items():
        if (key in REQUIRED or key in manifest) and not check(manifest[key]):
            raise ValueError(f"the type of {key}")
    for name in {piece["file"] for piece in manifest["pieces"]} | manifest["files"].keys():
        inside = not {"", ".", ".."} & {*name.split("/")} and not {"\\", "\0"} & {*name}
        if name not in manifest["files"] or not inside:
            raise ValueError(f"the name {shown(name)}")
    _check_pieces(manifest["pieces"], manifest["shapes"])


def _check_pieces(pieces: list[dict], shapes: dict[str, list[int]]) -> None:
    """Check that the pieces have every element of every parameter once."""
    ends = dict.fromkeys(shapes, 0)
    for piece in sorted(pieces, key=lambda piece: (piece["name"], piece["start"])):
        if piece["start"] != ends[piece["name"]]:
            raise ValueError(f"the pieces of {shown(piece['name'])}")
        ends[piece["name"]] += piece["numel"]
    for name, shape in shapes.items():
        if ends[name] != math.prod(shape):
            raise ValueError(f"{ends[name]} elements of {shown(name)}")


def tensors_of(manifest: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the tensors that each file of pieces must have: {file: {name: elements}}."""
    found: dict[str, dict[str, int]] = {}
    for piece in manifest["pieces"]:
        for kind in KINDS if piece["moments"] else KINDS[:1]:
            name = f"{piece['name']}@{piece['start']}/{kind}"
            found.setdefault(piece["file"], {})[name] = piece["numel"]
    return found
