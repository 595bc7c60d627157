"""The rows of the dataset that a sequence comes from.

The token cache has no rows: it is searched only for a replay. An example (a conversation, a pair)
is a row. A text is one stream of documents; a token before each document but the first separates
them, so that counting it gives the number of a document. A text that contains this token itself, a
text file, and a stream, which has no numbers, are searched for words of the sequence. A few words
may be in many rows: then the row that fits best is named, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distributed_training.data import special_tokens
from distributed_training.data.facts import DatasetFacts, Kinds
from distributed_training.data.rows import BadRow, PlacedRows, Row, RowOptions, check_kind
from distributed_training.data.sequences import Sequences
from distributed_training.data.sources import open_source
from distributed_training.data.token_file import TokenFile
from distributed_training.settings.data import DataSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEARCHED = 60  # characters of a document; so many at most, and half of them to overrule a number
BLOCK = 1 << 22  # tokens that are read at once


class Wanted(NamedTuple):
    """A document or an example in a sequence."""

    sequence: int  # its number among those that are searched
    dataset: int  # the number of its dataset
    row: int | None  # the number of its row among the usable ones; None: not known
    words: str  # a part of its text, for a search; "" for examples
    # Of a document of a stream:
    text: str = ""  # what the sequence has of it
    begins: bool = False  # whether its beginning is in the sequence
    ends: bool = False  # whether its end is


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
    ranges = list[tuple[int, int, int, int]]()  # place in `numbers`, dataset, start, end
    for place, number in enumerate(numbers):
        begin = sequences.ends[number - 1] if number else 0
        own = sequences.ranges[begin : sequences.ends[number]].tolist()
        ranges += [(place, dataset, start, end) for dataset, start, end in own]
    names = [name for name, _ in data.dataset] or [data.dataset_name]
    found: dict[Wanted, str] = {}
    wanted = list[Wanted]()
    for dataset in sorted({dataset for _, dataset, _, _ in ranges}):
        own = [each for each in ranges if each[1] == dataset]
        documents = [*_documents(own, sequences.files[dataset], tokenizer)]
        source = open_source(names[dataset], data, RowOptions.of(data, tokenizer), eval_only=False)
        rows, bad = source.splits["train"], facts.get("bad_rows") or ()
        counted, unsure = _with_number(_numbered(rows(None), bad), documents)
        found |= counted
        if unsure:
            found |= _with_words(_numbered(rows(None), bad), unsure)
        wanted += documents
    return _by_sequence(wanted, found, names, len(numbers))


def origins_in_stream(
    texts: list[str], rows: PlacedRows, name: str, separator: str | None
) -> list[list[Origin]]:
    """Return for each text of a sequence of --streaming the rows that contain its documents.

    Args:
        rows: of the stream, those that the run has read.
        name: of the dataset.
        separator: the text of the token between documents, if there is one.
    """
    wanted = list[Wanted]()
    for place, text in enumerate(texts):
        parts = text.split(separator) if separator else [text]
        last = len(parts) - 1
        wanted += [
            Wanted(place, 0, None, _words(part), part.strip(), begins=n > 0, ends=n < last)
            for n, part in enumerate(parts)
            if part.strip()
        ]
    found = _best_rows(_numbered(rows, ()), wanted)
    return _by_sequence(wanted, found, [name], len(texts))


def _by_sequence(
    wanted: list[Wanted], found: dict[Wanted, str], names: list[str], count: int
) -> list[list[Origin]]:
    """Return the origins of each of `count` sequences."""
    origins: list[list[Origin]] = [[] for _ in range(count)]
    for each in wanted:
        origins[each.sequence].append(Origin(names[each.dataset], found.get(each)))
    return origins


def _documents(
    ranges: list[tuple[int, int, int, int]], file: TokenFile, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Wanted]:
    """Yield the documents or examples of some ranges of a dataset, by the ranges' places."""
    index = Path(file.path).with_suffix(".index.bin")
    if index.is_file():
        starts = np.fromfile(index, np.int64).reshape(-1, 4)[:, 0]
        for place, dataset, start, _ in ranges:
            yield Wanted(place, dataset, int(np.searchsorted(starts, start, side="right")) - 1, "")
        return
    first, later = (special_tokens.document_start(tokenizer, n) for n in (True, False))
    separator = later[0] if later else -1  # -1: documents are not separated
    before = _counts_before(file, {start for _, _, start, _ in ranges}, separator)
    for place, dataset, start, end in ranges:
        ids = file.read(start, end)
        number = before[start] - first[:1].count(separator)
        for count, part in enumerate(np.split(ids, np.flatnonzero(ids == separator))):
            if len(part):  # the first part is empty if the range begins with a document
                text = tokenizer.decode(part, skip_special_tokens=True)
                yield Wanted(place, dataset, number + count, _words(text))


def _counts_before(file: TokenFile, starts: set[int], separator: int) -> dict[int, int]:
    """Return how often a token occurs before each of some places of a file."""
    counts, count, position = {}, 0, 0
    for start in sorted(starts):
        while position < start:
            end = min(start, position + BLOCK)
            count += int((file.read(position, end) == separator).sum())
            position = end
        counts[start] = count
    return counts


def _words(text: str) -> str:
    """Return a few words from a text, which are searched for in the rows.

    They are the middle of its longest line: a chat template begins a line for each message. If all
    lines are short, they are the middle of the text.
    """
    text = text.replace("\ufffd", "").strip()
    longest = max(text.split("\n"), key=len).strip()
    text = longest if len(longest) >= SEARCHED // 2 else text
    middle = max(0, len(text) - SEARCHED) // 2
    return text[middle : middle + SEARCHED]


def _numbered(rows: PlacedRows, bad: Collection[str]) -> Iterator[tuple[int, Row]]:
    """Yield the rows that have tokens, with their numbers among these.

    Args:
        bad: lines about the rows that could not be used; each begins with the place of its row.
    """
    kinds, number = Kinds(kind=None, formats=[]), 0
    for _, content in rows:
        row = check_kind(content, kinds)
        if isinstance(row, BadRow) or row.pieces == [""]:
            continue
        if any(line.startswith(f"{row.where}: ") for line in bad):
            continue
        yield number, row
        number += 1


def _with_number(
    rows: Iterator[tuple[int, Row]], wanted: list[Wanted]
) -> tuple[dict[Wanted, str], list[Wanted]]:
    """Return the places of those whose row has their number.

    Returns:
        The places, and those to search for, because their row lacks their words. A few words may
        be anywhere, so these keep the row of their number. So do those whose words are nowhere,
        because the tokenizer has changed the text.
    """
    by_number: dict[int | None, list[Wanted]] = {}
    for each in wanted:
        by_number.setdefault(each.row, []).append(each)
    found: dict[Wanted, str] = {}
    unsure = list[Wanted]()
    for number, row in rows:
        if here := by_number.pop(number, []):
            with_words = [each for each in here if each.words]
            confirmed = _search(row, with_words) if with_words else {}
            unsure += [each for each in with_words if each not in confirmed]
            found |= dict.fromkeys(here, row.where) | confirmed
        if not by_number:
            break
    unsure += [each for left in by_number.values() for each in left]
    return found, [each for each in unsure if not _is_short(each)]


def _with_words(rows: Iterator[tuple[int, Row]], wanted: list[Wanted]) -> dict[Wanted, str]:
    """Return the places of those whose words are in a row; of several the first."""
    found: dict[Wanted, str] = {}
    left = [each for each in wanted if each.words]
    for _, row in rows:
        if not left:
            break
        found |= _search(row, left)
        left = [each for each in left if each not in found]
    return found


def _best_rows(rows: Iterator[tuple[int, Row]], wanted: list[Wanted]) -> dict[Wanted, str]:
    """Return the places of those whose words are in a row: the one that has most of the document.

    Of several such rows it is the first one; of a few words it is none.
    """
    best: dict[Wanted, tuple[int, str]] = {}
    several = set[Wanted]()
    for _, row in rows:
        row = row if row.is_file else replace(row, pieces=tuple(row.pieces))
        for each, place in _search(row, wanted).items():
            fit, (so_far, first) = _fit(row, each), best.get(each, (0, place))
            if fit > so_far:
                best[each] = fit, place
                several.discard(each)
            elif fit == so_far and place != first:
                several.add(each)
    several = {each for each in several if _is_short(each)}
    return {each: place for each, (_, place) in best.items() if each not in several}


def _is_short(wanted: Wanted) -> bool:
    """Return whether the words of a document are so few that other rows may have them, too."""
    return len(wanted.words) < SEARCHED // 2


def _fit(row: Row, wanted: Wanted) -> int:
    """Return how much of a document is in a row: characters of whole lines, beginning and end.

    0 for a few words that are elsewhere in the row, or in a text file, which is not searched again.
    """
    if row.is_file:
        return int(not _is_short(wanted))
    texts = ["".join([*row.pieces, row.prompt, row.completion])]
    whole = "\n".join(texts if row.kind != "chat" else _texts(row)).strip()
    begins = whole.startswith(wanted.text) or not wanted.begins
    ends = whole.endswith(wanted.text) or not wanted.ends
    if _is_short(wanted) and row.kind != "chat" and not (begins and ends):
        return 0
    lines = (line.strip() for line in wanted.text.split("\n"))
    return 1 + begins + ends + sum(len(line) for line in lines if line in whole)


def _search(row: Row, wanted: list[Wanted]) -> dict[Wanted, str]:
    """Return the place of those whose words are in a row: the row, or the line of a file."""
    found, tail, lines = {}, "", 1
    for piece in _texts(row):
        text = tail + piece
        for each in wanted:
            if each not in found and (place := text.find(each.words)) >= 0:
                line = lines + text.count("\n", 0, place)
                found[each] = f"{row.where}, line {line}" if row.is_file else row.where
        tail = text[-SEARCHED:]
        lines += text.count("\n", 0, len(text) - len(tail))
    return found


def _texts(row: Row) -> Iterable[str]:
    """Return the texts of a row: the pieces of a document, the answers of an example first."""
    if row.kind == "text":
        return row.pieces
    contents = [message.get("content") for message in row.messages]
    return [row.completion, row.prompt, *(text for text in contents if isinstance(text, str))]
