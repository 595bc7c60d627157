"""The content of a checkpoint's manifest.json: the type of each value, and what must agree.

A digest that matches shows that a manifest was not damaged. It does not show who wrote it: any
program can compute the digest.
"""

import math

from distributed_training.checkpoints.format import kinds_of
from distributed_training.files.json_types import (
    Check,
    JsonObject,
    anything,
    dict_of,
    either,
    is_count,
    is_number,
    is_switch,
    is_text,
    list_of,
    optional,
    record,
)
from distributed_training.files.user_files import shown
from distributed_training.files.weight_files import stays_inside

READER = record({}, **dict.fromkeys(("row", "pass", "first", "part"), is_count))
LANE = record(
    {},
    reader=READER,
    counts=dict_of(is_count),
    **dict.fromkeys(("offset", "chunk", "used"), is_count),
)
COUNTERS = record(
    {},
    best=optional(
        record({"loss": is_number, "step": is_count, "waited": is_count}, evaluated=is_count)
    ),
    training_seconds=is_number,
    skipped_steps=list_of(is_count),
    rank_sequences=list_of(record({}, from_step=is_count, sequences=list_of(is_count))),
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
    "pieces": list_of(
        record({**PIECE, "file": is_text}, momentum=is_switch, kinds=list_of(is_text))
    ),
    "files": dict_of(record({"bytes": is_count, "sha256": is_text})),
}
# Older versions did not write these keys.
OPTIONAL: dict[str, Check] = {
    "scaling": dict_of(optional(either(is_switch, is_number))),
    "lr_scheduler": dict_of(anything),
    "stream": optional(record({"lanes": dict_of(LANE), "bad": list_of(is_text)})),
    "groups": list_of(dict_of(anything)),
    "optimizer": is_text,
}


def check_manifest(manifest: JsonObject) -> None:
    """Check the type of each value of a manifest, the names of its files, and its pieces.

    Raises:
        KeyError: a key is missing.
        ValueError: the message says what is wrong.
    """
    for key, check in {**REQUIRED, **OPTIONAL}.items():
        if (key in REQUIRED or key in manifest) and not check(manifest[key]):
            raise ValueError(f"the type of {key}")
    for name in {piece["file"] for piece in manifest["pieces"]} | manifest["files"].keys():
        if name not in manifest["files"] or not stays_inside(name):
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


def tensors_of(manifest: JsonObject) -> dict[str, dict[str, int]]:
    """Return the tensors that each file of pieces must have: {file: {name: elements}}."""
    found: dict[str, dict[str, int]] = {}
    for piece in manifest["pieces"]:
        for kind in kinds_of(piece):
            name = f"{piece['name']}@{piece['start']}/{kind}"
            found.setdefault(piece["file"], {})[name] = piece["numel"]
    return found
