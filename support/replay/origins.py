"""The rows of the dataset that a sequence comes from.

The token cache has no rows: it is searched only for a replay. An example (a conversation, a pair)
is a row. A text is one stream of documents; a token before each document but the first separates
them, so that counting it gives the number of a document. A text that contains this token itself, a
text file, and a stream, which has no numbers, are searched for the words of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from support.data import special_tokens
from support.data.facts import DatasetFacts, Kinds
from support.data.rows import BadRow, PlacedRows, Row, RowOptions, check_kind
from support.data.sequences import Sequences
from support.data.sources import open_source
from support.settings.data import DataSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEARCHED = 60  # characters of a document


class Wanted(NamedTuple):
    """A document or an example in a sequence."""

    sequence: int  # its number among those that are searched
    dataset: int  # the number of its dataset
    row: int | None  # the number of its row among the usable ones; None: not known
    words: str  # a part of its text, for a search; "" for examples


class Origin(NamedTuple):
    """Where a document or an example is from."""

    dataset: str
    row: str | None  # its file and line, or its number in a table; None: not found


def origins_of(
    numbers: list[int],
    sequences: Sequences,
    data: DataSettings,
    facts: DatasetFacts,
    tokenizer: PreTrainedTokenizerBase,
) -> list[list[Origin]]:
    """Return the rows of each sequence, in their order.

    Args:
        numbers: of the sequences.
        facts: the dataset's entry in results.json.
    """
    wanted = [
        each
        for place, number in enumerate(numbers)
        for each in _documents(place, number, sequences, tokenizer)
    ]
    return _find(wanted, len(numbers), data, facts, tokenizer)


def origins_in_stream(
    texts: list[str], data: DataSettings, facts: DatasetFacts, tokenizer: PreTrainedTokenizerBase
) -> list[list[Origin]]:
    """Return for each text of a sequence of --streaming the row that contains it."""
    wanted = [Wanted(place, 0, None, _words(text)) for place, text in enumerate(texts)]
    return _find(wanted, len(texts), data, facts, tokenizer)


def _documents(
    place: int, number: int, sequences: Sequences, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Wanted]:
    """Yield the documents or examples of a sequence."""
    begin = sequences.ends[number - 1] if number else 0
    for dataset, start, end in sequences.ranges[begin : sequences.ends[number]].tolist():
        file = sequences.files[dataset]
        index = Path(file.path).with_suffix(".index.bin")
        if index.is_file():
            starts = np.fromfile(index, np.int64).reshape(-1, 4)[:, 0]
            row = int(np.searchsorted(starts, start, side="right")) - 1
            yield Wanted(place, dataset, row, "")
            continue
        first, later = (special_tokens.document_start(tokenizer, n) for n in (True, False))
        separator = later[0] if later else -1  # -1: documents are not separated
        before = int((file.read(0, start) == separator).sum()) - first[:1].count(separator)
        ids = file.read(start, end)
        is_start = ids == separator
        for count, part in enumerate(np.split(ids, np.flatnonzero(is_start))):
            if len(part):  # the first part is empty if the range begins with a document
                text = tokenizer.decode(part, skip_special_tokens=True)
                yield Wanted(place, dataset, before + count, _words(text))


def _words(text: str) -> str:
    """Return a few words from the middle of a text, which are searched for in the rows."""
    text = text.replace("\ufffd", "").strip()
    middle = max(0, len(text) - SEARCHED) // 2
    return text[middle : middle + SEARCHED]


def _find(
    wanted: list[Wanted],
    count: int,
    data: DataSettings,
    facts: DatasetFacts,
    tokenizer: PreTrainedTokenizerBase,
) -> list[list[Origin]]:
    """Return the origins of `wanted` by sequence.

    Each dataset is read once; a second time if some rows do not have the words of their documents.
    """
    found: dict[Wanted, str] = {}
    names = [name for name, _ in data.dataset] or [data.dataset_name]
    for dataset in {each.dataset for each in wanted}:
        source = open_source(names[dataset], data, RowOptions.of(data, tokenizer), eval_only=False)
        refused = {line.partition(": ")[0] for line in facts.get("bad_rows") or ()}
        own = [each for each in wanted if each.dataset == dataset]
        rows = source.splits["train"]
        counted, unsure = _with_number(_numbered(rows(None), refused), own)
        found |= counted
        if unsure:
            found |= _with_words(_numbered(rows(None), refused), unsure)
    origins: list[list[Origin]] = [[] for _ in range(count)]
    for each in wanted:
        origins[each.sequence].append(Origin(names[each.dataset], found.get(each)))
    return origins


def _numbered(rows: PlacedRows, refused: set[str]) -> Iterator[tuple[int, Row]]:
    """Yield the rows that have tokens, with their numbers among these.

    Args:
        refused: the places of rows that could not be used.
    """
    kinds, number = Kinds(kind=None, formats=[]), 0
    for _, content in rows:
        row = check_kind(content, kinds)
        if isinstance(row, BadRow) or row.where in refused or row.pieces == [""]:
            continue
        yield number, row
        number += 1


def _with_number(
    rows: Iterator[tuple[int, Row]], wanted: list[Wanted]
) -> tuple[dict[Wanted, str], list[Wanted]]:
    """Return the places of those whose row has their number.

    Returns:
        The places, and those to search for: without a number, or the row lacks their words. A
        tokenizer that changes texts has other words; then the number is right.
    """
    by_number: dict[int, list[Wanted]] = {}
    unsure = [each for each in wanted if each.row is None]
    for each in wanted:
        if each.row is not None:
            by_number.setdefault(each.row, []).append(each)
    found: dict[Wanted, str] = {}
    for number, row in rows:
        if not by_number:
            break
        if here := by_number.pop(number, []):
            with_words = [each for each in here if each.words]
            confirmed = _search(row, with_words) if with_words else {}
            unsure += [each for each in with_words if each not in confirmed]
            found |= dict.fromkeys(here, row.where) | confirmed
    return found, unsure + [each for left in by_number.values() for each in left]


def _with_words(rows: Iterator[tuple[int, Row]], wanted: list[Wanted]) -> dict[Wanted, str]:
    """Return the places of those whose words are in a text; of several the first."""
    found: dict[Wanted, str] = {}
    for _, row in rows:
        if row.kind == "text":
            found = _search(row, [each for each in wanted if each not in found]) | found
    return found


def _search(row: Row, wanted: list[Wanted]) -> dict[Wanted, str]:
    """Return the place of those whose words are in a document: its row, or the line of a file."""
    found, tail, lines = {}, "", 1
    for piece in row.pieces:
        text = tail + piece
        for each in wanted:
            if each not in found and each.words and (place := text.find(each.words)) >= 0:
                line = lines + text.count("\n", 0, place)
                found[each] = f"{row.where}, line {line}" if row.is_file else row.where
        tail = text[-SEARCHED:]
        lines += text.count("\n", 0, len(text) - len(tail))
    return found
