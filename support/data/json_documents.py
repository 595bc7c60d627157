"""Tokenize a document of any length in chunks, with exactly the ids of the whole document.

Consecutive chunks overlap. A seam is a position in the overlap at which their tokens agree: the
left chunk's tokens are used before it, the right chunk's tokens after it.

Why the result equals the ids of the whole document: a fast tokenizer finds added tokens, normalizes
the text, splits it into pre-tokens, and encodes each pre-token on its own. The first three scan
from left to right: their result for the text after a boundary does not depend on the text before
it. They look ahead, but not far: a match of a pre-tokenizer's pattern, a run of whitespace or a
sequence of combining marks can have any length, but it covers only a few changes between kinds of
characters (letters, digits, whitespace, others). A seam must therefore satisfy three conditions:

- Both chunks have the same tokens (ids, characters, beginnings of pre-tokens) on a stretch of
  text around it.
- The stretch has at least `KIND_CHANGES` changes between kinds of characters on each side of the
  seam, and on each side at least the length of the longest added token. By induction the tokens of
  the left chunk are correct up to the seam, and the right chunk continues from the same boundary.
- A pre-token begins at the seam. Tokenizers that do not split a document into words (Llama 2,
  Gemma) have no such position. If their model is BPE, any boundary between two tokens of the
  stretch is valid: a sequence of tokens is the BPE encoding of its text if and only if every two
  adjacent tokens are the encoding of their text, because merges within a token do not depend on
  neighboring tokens, and the first merge across a boundary occurs regardless of the text around the
  two tokens that it joins. Every two tokens that are adjacent in the result are adjacent in one of
  the chunks.

Two chunks without such a seam are tokenized again as one chunk, so chunks grow until a seam exists.
In the worst case (a document of one kind of characters) the chunk is the whole document. Two kinds
of tokenizers always get the whole document: a slow tokenizer does not give the characters of a
token, and a pattern such as "[^"]*" looks ahead to any distance. In all other cases memory is
bounded by `BATCH_CHARACTERS`.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from support.errors import UserError

CHUNK_CHARACTERS = 1 << 16
OVERLAP_CHARACTERS = 1 << 10
BATCH_CHARACTERS = 1 << 20  # tokenized by one call, which uses all cores
KIND_CHANGES = 8
# The parts of a pattern that match any length of text of all kinds, and whose match may end far
# away: .* [^"]* [\s\S]+
FAR = re.compile(
    r"(?:(?<!\\)\.|\[\^(?:[^\]\\]|\\[^sS])*\]|\[(?:\\s\\S|\\S\\s|\\w\\W|\\W\\w)\])(?:[*+]|\{\d*,\})"
)


class Token(NamedTuple):
    """A token: its id, its range of characters in the document, and if it begins a pre-token."""

    id: int
    start: int
    end: int
    begins: bool


class Seam(NamedTuple):
    """A position at which the tokens of two chunks agree.

    Attributes:
        left, right: index of the token after the seam, in the left and in the right chunk.
        around: the tokens around the seam, the same in both chunks, that satisfy its conditions.
        place: index of the token after the seam, in `around`.
    """

    left: int
    right: int
    around: tuple[Token, ...]
    place: int


@dataclass
class Chunk:
    """A part of a document.

    Attributes:
        text: its text, which overlaps with the text of the next chunk.
        start: number of characters before it in the document.
        begin, end: the seams between which its tokens are used; None at an end of the document, or
            if not known yet.
        ids, encoding: token ids of its text, and the tokenizer's `Encoding`; None if it is not
            tokenized.
        first: index of the first token that is used.
        more: the text that follows it and is tokenized together with it, because there is no seam.
        wanted: number of characters at which it is tokenized again.
    """

    text: str
    start: int
    begin: Seam | None = None
    end: Seam | None = None
    ids: list[int] | None = None
    encoding: object = None
    first: int = 0
    more: list[str] = field(default_factory=list)
    wanted: int = 0

    def __post_init__(self):
        self.length = len(self.text)  # includes `more`

    def token(self, index: int) -> Token:
        """Return the token with this index."""
        start, end = self.encoding.token_to_chars(index)
        word = self.encoding.token_to_word
        begins = index == 0 or word(index) != word(index - 1)
        return Token(self.ids[index], self.start + start, self.start + end, begins)


class DocumentTokenizer:
    """A tokenizer of documents in chunks, with exact results as the module docstring explains.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chunk: characters from the start of a chunk to the start of the next; at least `overlap`.
        overlap: characters that consecutive chunks have in common.
        batch: minimum number of characters that are tokenized by one call.
    """

    def __init__(
        self,
        tokenizer,
        chunk: int = CHUNK_CHARACTERS,
        overlap: int = OVERLAP_CHARACTERS,
        batch: int = BATCH_CHARACTERS,
    ):
        self.tokenizer, self.overlap, self.batch = tokenizer, overlap, batch
        backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self.chunk = max(chunk, overlap) if _can_be_cut(backend) else sys.maxsize // 2
        self.seams_within_words = backend is not None and type(backend.model).__name__ == "BPE"
        added = tokenizer.added_tokens_decoder.values() if backend is not None else []
        self.room = max((len(token.content) for token in added), default=0)

    # ------------------------------------------------------------------- whole documents

    def ids(self, text: str) -> list[int]:
        """Return the token ids of one text."""
        return [id for _, ids in self.encode([[text]]) for id in ids]

    def encode(
        self,
        documents: Iterable[Iterable[str]],
        advance: Callable[[int], None] = lambda characters: None,
    ) -> Iterator[tuple[bool, list[int]]]:
        """Tokenize documents; empty documents are omitted.

        Args:
            documents: the pieces of each document's text, read when they are needed.
            advance: called after each batch with its number of characters.
        Yields:
            (whether a document begins with these ids, token ids).
        """
        left = None
        for chunk in self._encoded(documents, advance):
            if left is not None and chunk.start == 0:
                yield self._rest(left)
            elif left is not None:
                seam = self.find_seam(left, chunk) if left.encoding is not None else None
                if seam is None:
                    self._join(left, chunk)
                    continue
                yield left.start == 0, left.ids[left.first : seam.left]
                chunk.begin, chunk.first = seam, seam.right
            left = chunk
        if left is not None:
            yield self._rest(left)

    def _encoded(
        self, documents: Iterable[Iterable[str]], advance: Callable[[int], None]
    ) -> Iterator[Chunk]:
        batch, characters = [], 0
        for pieces in documents:
            for chunk in self._chunks(pieces):
                batch.append(chunk)
                characters += chunk.length
                if characters >= self.batch:
                    yield from self._encode(batch)
                    advance(characters)
                    batch, characters = [], 0
        yield from self._encode(batch)
        advance(characters)

    def _chunks(self, pieces: Iterable[str]) -> Iterator[Chunk]:
        text, start = "", 0
        for piece in _short(pieces, self.chunk):
            text += piece
            # Not >=: the last chunk must be longer than the overlap.
            while len(text) > self.chunk + self.overlap:
                yield Chunk(text[: self.chunk + self.overlap], start)
                text, start = text[self.chunk :], start + self.chunk
        if text:
            yield Chunk(text, start)

    def _encode(self, chunks: list[Chunk]) -> list[Chunk]:
        if chunks:
            texts = [chunk.text for chunk in chunks]
            encoded = self.tokenizer(
                texts,
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            encodings = encoded.encodings or [None] * len(chunks)
            for chunk, ids, encoding in zip(chunks, encoded["input_ids"], encodings, strict=True):
                chunk.ids, chunk.encoding = ids, encoding
        return chunks

    def _join(self, left: Chunk, right: Chunk) -> None:
        """Append `right` to `left`, which is tokenized again each time its length has doubled."""
        if left.encoding is not None:
            left.wanted, left.encoding = 2 * left.length, None
        left.more.append(right.text[left.start + left.length - right.start :])
        left.length += len(left.more[-1])
        if left.length >= left.wanted:
            self._encode_again(left)

    def _encode_again(self, chunk: Chunk) -> None:
        chunk.text, chunk.more = "".join([chunk.text, *chunk.more]), []
        self._encode([chunk])
        chunk.first = self._index_of(chunk, chunk.begin) if chunk.begin else 0

    def _rest(self, chunk: Chunk) -> tuple[bool, list[int]]:
        if chunk.more:
            self._encode_again(chunk)
        return chunk.start == 0, chunk.ids[chunk.first :]

    # ------------------------------------------------------------------- parts of a document

    def parts(self, pieces: Iterable[str]) -> Iterator[Chunk]:
        """Cut a text into chunks that can be tokenized independently and in any order.

        Only the text near the seams is tokenized here. `part_ids` checks that both chunks at a seam
        have the tokens in `Seam.around`.

        Args:
            pieces: the text, read when it is needed.
        """
        text, start, begin, cut = "", 0, None, self.chunk
        for piece in _short(pieces, self.chunk):
            text += piece
            while len(text) > cut + 2 * self.overlap:
                seam = self._seam_at(text, start, cut)
                if seam is None:
                    cut += self.chunk
                    continue
                yield Chunk(text[: cut + self.overlap], start, begin, seam)
                text, start, begin, cut = text[cut:], start + cut, seam, self.chunk
        if text:
            yield Chunk(text, start, begin)

    def _seam_at(self, text: str, start: int, cut: int) -> Seam | None:
        left = Chunk(text[cut - self.overlap : cut + self.overlap], start + cut - self.overlap)
        right = Chunk(text[cut : cut + 2 * self.overlap], start + cut)
        self._encode([left, right])
        return self.find_seam(left, right)

    def part_ids(self, part: Chunk) -> list[int]:
        """Return the token ids of one of `parts`; joined, they are the ids of the whole text.

        Raises:
            UserError: the part has other tokens at a seam, because they depend on distant text.
        """
        [chunk] = self._encode([Chunk(part.text, part.start)])
        begin = self._index_of(chunk, part.begin) if part.begin else 0
        return chunk.ids[begin : self._index_of(chunk, part.end) if part.end else None]

    # ------------------------------------------------------------------- seams

    def find_seam(self, left: Chunk, right: Chunk) -> Seam | None:
        """Return a seam of two chunks, or None if there is none.

        It is near the middle of the longest stretch on which the chunks agree, if possible at the
        beginning of a pre-token.
        """
        i = len(left.ids)
        while i > 0 and left.token(i - 1).start >= right.start:
            i -= 1
        last = [left.token(index) for index in range(i, len(left.ids))]
        first = []
        while (
            len(first) < len(right.ids)
            and (token := right.token(len(first))).end <= left.start + left.length
        ):
            first.append(token)
        offset, right_offset, length = _longest_agreement(last, first)
        tokens = last[offset : offset + length]
        if length < 2:
            return None
        changes = self._changes(left, tokens[0].start, tokens[-1].end)
        places = [place for place in range(1, length) if self._is_seam(tokens, place, changes)]
        if not places:
            return None
        place = min(places, key=lambda place: (not tokens[place].begins, abs(place - length / 2)))
        begin, end = self._proof(tokens, place, changes)
        return Seam(
            i + offset + place, right_offset + place, tuple(tokens[begin:end]), place - begin
        )

    def _changes(self, chunk: Chunk, start: int, end: int) -> list[int]:
        """Return the positions in a range whose character is of another kind than the previous."""
        changes, kind = [], None
        for place, character in enumerate(
            chunk.text[start - chunk.start : end - chunk.start], start
        ):
            new_kind = _kind(character)
            if new_kind is not None and new_kind != kind:
                changes.append(place)
                kind = new_kind
        return changes[1:]

    def _is_seam(self, tokens: list[Token], place: int, changes: list[int]) -> bool:
        left, right = tokens[place - 1], tokens[place]
        # The first comparison excludes a seam within a character of several tokens.
        return (
            left.start < left.end <= right.start < right.end
            and (right.begins or self.seams_within_words)
            and self._far_enough(changes, tokens[0].start, right.start)
            and self._far_enough(changes, right.start, tokens[-1].end)
        )

    def _far_enough(self, changes: list[int], start: int, end: int) -> bool:
        return (
            end - start >= self.room
            and bisect_right(changes, end) - bisect_right(changes, start) >= KIND_CHANGES
        )

    def _proof(self, tokens: list[Token], place: int, changes: list[int]) -> tuple[int, int]:
        """Return the range of tokens around a seam that is enough to satisfy its conditions."""
        seam = tokens[place].start
        begin = next(
            n for n in reversed(range(place)) if self._far_enough(changes, tokens[n].start, seam)
        )
        end = next(
            n for n in range(place, len(tokens)) if self._far_enough(changes, seam, tokens[n].end)
        )
        return begin, end + 1

    def _index_of(self, chunk: Chunk, seam: Seam) -> int:
        """Return the index of the token after a seam.

        Raises:
            UserError: the chunk has other tokens around the seam.
        """
        index = chunk.encoding.char_to_token(seam.around[seam.place].start - chunk.start)
        begin = -1 if index is None else index - seam.place
        indices = range(begin, begin + len(seam.around))
        if (
            begin < 0
            or indices.stop > len(chunk.ids)
            or tuple(map(chunk.token, indices)) != seam.around
        ):
            raise UserError(
                "This tokenizer's tokens depend on text that is far away from them: cut long texts "
                "into shorter documents, for instance into rows of a JSON Lines file."
            )
        return index


def _can_be_cut(backend) -> bool:
    """Return whether documents can be cut into chunks; a slow tokenizer has no backend (None)."""
    if backend is None or getattr(backend.model, "dropout", None):
        return False
    steps = [
        json.loads(step.__getstate__())
        for step in (backend.normalizer, backend.pre_tokenizer)
        if step is not None
    ]
    # The pre-tokenizer FixedLength counts characters from the beginning of the document.
    return not any(
        "FixedLength" in _values(step, "type") or FAR.search("\0".join(_values(step, "Regex")))
        for step in steps
    )


def _values(node, key: str) -> list:
    """Return the values of a key in nested dictionaries and lists."""
    if isinstance(node, list):
        return [value for item in node for value in _values(item, key)]
    if not isinstance(node, dict):
        return []
    return [
        value
        for name, item in node.items()
        for value in ([item] if name == key else _values(item, key))
    ]


def _short(pieces: Iterable[str], most: int) -> Iterator[str]:
    """Yield the same text in pieces of at most `most` characters."""
    for piece in pieces:
        for start in range(0, len(piece), most):
            yield piece[start : start + most]


def _longest_agreement(left: list[Token], right: list[Token]) -> tuple[int, int, int]:
    """Return the longest common run of two lists: (start in left, start in right, length)."""
    best, i, j, run = (0, 0, 0), 0, 0, 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            i, j, run = i + 1, j + 1, run + 1
            best = max(best, (i - run, j - run, run), key=lambda found: found[2])
            continue
        run = 0
        places = left[i][1:3], right[j][1:3]
        i, j = i + (places[0] <= places[1]), j + (places[1] <= places[0])
    return best


@cache
def _kind(character: str) -> str | None:
    """Return "L", "N", "whitespace" or "other"; None for a mark or joiner.

    A mark or joiner belongs to the character before it. "L" is a letter and "N" a number, as in the
    general categories of Unicode.
    """
    category = unicodedata.category(character)
    if character.isspace():
        return "whitespace"
    if category[0] == "M" or category == "Cf":
        return None
    return category[0] if category[0] in "LN" else "other"
