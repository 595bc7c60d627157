"""The content of a checkpoint's manifest.json: the type of each value, and what must agree.

A digest that matches shows that a manifest was not damaged. It does not show who wrote it: any
program can compute the digest.
"""

import math
from typing import TypedDict

from distributed_training.checkpoints.format import kinds_of
from distributed_training.files.checked_types import Count, Number, wrong_place
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import shown
from distributed_training.files.weight_files import stays_inside

# The position in a stream: of its reader, and of a batch slot. "pass" is a keyword of Python.
Reader = TypedDict(
    "Reader", {"row": Count, "pass": Count, "first": Count, "part": Count}, total=False
)


class Lane(TypedDict, total=False):
    """A batch slot of a stream."""

    reader: Reader
    counts: dict[str, Count]
    offset: Count
    chunk: Count
    used: Count


class Stream(TypedDict):
    """The position of a stream."""

    lanes: dict[str, Lane]
    bad: list[str]


class _Best(TypedDict):
    loss: Number
    step: Count
    waited: Count


class Best(_Best, total=False):
    """The best evaluation."""

    evaluated: Count


class RankSequences(TypedDict, total=False):
    """The sequences of the ranks from a step on."""

    from_step: Count
    sequences: list[Count]


class Counters(TypedDict, total=False):
    """The counters of a run."""

    best: Best | None
    training_seconds: Number
    skipped_steps: list[Count]
    rank_sequences: list[RankSequences]
    first_loss: Number | None
    last_loss: Number | None
    step: Count
    samples: Count
    tokens: Count


class Hard(TypedDict, total=False):
    """What must be equal at a resume."""

    parameters: Count


class Soft(TypedDict, total=False):
    """What must be equal at a resume without --resume_force."""

    model: str


class Told(TypedDict, total=False):
    """What may differ, with a notice."""

    strategy: str
    ranks: Count


class Identity(TypedDict, total=False):
    """The run signature."""

    hard: Hard
    soft: Soft
    told: Told


class _Piece(TypedDict):
    name: str
    start: Count
    numel: Count
    moments: bool
    file: str


class Piece(_Piece, total=False):
    """Elements of a parameter, and the states of the optimizer for them."""

    momentum: bool
    kinds: list[str]


class File(TypedDict):
    """A file of the checkpoint."""

    bytes: Count
    sha256: str


class _Manifest(TypedDict):
    counters: Counters
    identity: Identity
    adam_step: Count
    shapes: dict[str, list[Count]]
    pieces: list[Piece]
    files: dict[str, File]


class Manifest(_Manifest, total=False):
    """The manifest. Older versions did not write all of the keys."""

    scaling: dict[str, bool | Number | None]
    lr_scheduler: dict[str, object]
    stream: Stream | None
    groups: list[dict[str, object]]
    optimizer: str


def check_manifest(manifest: JsonObject) -> None:
    """Check the type of each value of a manifest, the names of its files, and its pieces.

    Raises:
        ValueError: the message says what is wrong.
    """
    if place := wrong_place(manifest, Manifest):
        raise ValueError(f"the type of {shown(place)}")
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
