"""The position of a stream in its corpus, as checkpoints contain it: JSON."""

from __future__ import annotations

from typing import TypedDict

from distributed_training.data.facts import Kinds
from distributed_training.data.rows import Position

# The position before a unit: a row, or a piece of a text file.
Place = TypedDict(
    "Place",
    {
        "row": int,  # the number of units before it, in all passes
        "pass": int,  # the number of the pass
        "first": int,  # the value of "row" at the beginning of the pass
        "rows": Position | None,  # the position of its row in the corpus; None for the beginning
        "part": int,  # for a piece of a text file, the number of pieces before it in the file
    },
)


class Counts(TypedDict):
    """Rows of a slot."""

    counted: int  # the rows that the other counts include
    truncated: int
    skipped: int


class Slot(TypedDict):
    """The state of a batch slot."""

    reader: Place  # of the unit at which its chunk of sequences begins
    offset: int  # tokens of this unit in earlier chunks
    chunk: int  # the chunk's number, from 1
    used: int  # sequences of the chunk that were used
    counts: Counts


class Ends(TypedDict):
    """The examples that were read."""

    trained: int  # with an answer that ends with a trained end token within --seq_length
    cut: int  # that have it behind
    examples: int


class StreamState(Kinds):
    """The state of a rank after a step."""

    slots: dict[str, Slot]  # of the rank, by number
    bad: int  # number of bad rows
    rows: int  # number of units that were read
    passes: int
    ends: Ends


class KindOfRows(TypedDict, total=False):
    """What earlier versions did not save; as in `Kinds`."""

    kind: str | None
    formats: list[str]


class Progress(KindOfRows):
    """The state of all ranks, in a checkpoint."""

    lanes: dict[str, Slot]  # by the number of the slot
    bad: list[str]  # lines about bad rows
    version: int


START: Place = {"row": 0, "pass": 0, "first": 0, "rows": None, "part": 0}


def new_slot() -> Slot:
    """Return the state of a slot at the beginning."""
    counts: Counts = {"counted": 0, "truncated": 0, "skipped": 0}
    return {"reader": START, "offset": 0, "chunk": 0, "used": 0, "counts": counts}


def new_stream() -> StreamState:
    """Return the state of a rank before the first step."""
    ends: Ends = {"trained": 0, "cut": 0, "examples": 0}
    return {
        "slots": {},
        "bad": 0,
        "rows": 0,
        "passes": 0,
        "kind": None,
        "formats": [],
        "ends": ends,
    }
