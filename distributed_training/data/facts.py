"""What is known about the rows of a split and about a dataset, as JSON."""

import math
from typing import Any, TypedDict


class Kinds(TypedDict):
    """The rows that were read, see `rows.check_kind`."""

    kind: str | None  # as `rows.Row.kind`; None before the first row
    formats: list[str]  # names of their formats


class SplitCounts(Kinds):
    """What is counted while a split is tokenized."""

    tokens: int
    rows: int
    empty: int
    ended: int  # examples with an answer that ends with a trained end token


class TokenizedSplit(SplitCounts):
    """The facts about the files of a split."""

    dtype: str  # of the token ids
    vocabulary: int  # the largest token id + 1
    sha256: str  # of the text
    tokens_sha256: str  # of the tokens, which a chat template may change with the date


class Targets(TypedDict):
    """The tokens with a loss in the sequences of an evaluation."""

    tokens: int
    bytes: int  # of the text that they stand for, in UTF-8


def bits_per_byte(loss: float, targets: Targets | None) -> float | None:
    """Return bits per byte: loss · tokens / (bytes · ln 2); None if the bytes are not known.

    Args:
        loss: in nats per token.
    """
    if not targets or not targets["bytes"]:
        return None
    return loss * targets["tokens"] / (targets["bytes"] * math.log(2))


class SplitFacts(TypedDict, total=False):
    """The facts about a split in results.json; the part of a split that is held out has few."""

    kind: str | None
    formats: list[str]
    rows: int
    tokens: int
    sha256: str  # of the text
    tokens_sha256: str  # of the tokens, which a chat template may change with the date
    truncated: int  # examples that are longer than a sequence
    skipped: int  # empty documents, or examples without a target
    trained_ends: int  # examples with an answer that ends with a trained end token
    blocks: int  # sequences
    padding_share: float  # of the micro-batches of the first epoch
    targets: Targets  # of the evaluated sequences


# The entry of a dataset in results.json: SplitFacts of the training split, "name", "validation"
# (SplitFacts of this split), "bad_rows" (a line about each), and what several datasets or a stream
# add.
DatasetFacts = dict[str, Any]
