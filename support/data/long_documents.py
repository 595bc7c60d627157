"""Tokenize a document of any length in chunks, with exactly the ids of the whole document.

Consecutive chunks overlap. A seam is a position in the overlap at which their tokens agree: the
left chunk's tokens are used before it, the right chunk's tokens after it. Seams are found by
tokenizing a short text around them, and checked in the tokens of both chunks. Chunks can therefore
be tokenized independently and in any order.

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

Text without such a seam is not cut, so in the worst case (a document of one kind of characters) the
chunk is the whole document. Three kinds of tokenizers always get the whole document: a slow
tokenizer does not give the characters of a token, a pattern such as "[^"]*" looks ahead to any
distance, and with other tokens than expected at a seam, a tokenizer has shown that it depends on
distant text. In all other cases memory is bounded by `BATCH_CHARACTERS`.
"""

from __future__ import annotations

import copy
import itertools
import json
import operator
import re
import sys
import unicodedata
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any, NamedTuple

from support.errors import UserError

CHUNK_CHARACTERS = 1 << 16
OVERLAP_CHARACTERS = 1 << 10
SHORT_OVERLAP_CHARACTERS = 1 << 8
BATCH_CHARACTERS = 1 << 20  # tokenized by one call, which uses all cores
WHOLE_DOCUMENT = sys.maxsize // 2  # characters of a chunk that is never cut
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
    """A position at which two chunks have the same tokens."""

    around: tuple[Token, ...]  # the tokens around the seam that satisfy its conditions
    place: int  # index of the token after the seam, in `around`


@dataclass
class Chunk:
    """A part of a document."""

    text: str  # its text, which overlaps with the text of the next chunk
    start: int  # number of characters before it in the document
    # The seams between which its tokens are used; None at an end of the document.
    begin: Seam | None = None
    end: Seam | None = None
    # Token ids of its text as unsigned ints, and the tokenizer's `Encoding`; None if it is not
    # tokenized.
    ids: array[int] | None = None
    encoding: Any = None

    def tokens(self) -> list[Token]:
        """Return all tokens."""
        words = self.encoding.word_ids
        begins = [True, *map(operator.ne, words[1:], words)]
        return [
            Token(id, self.start + start, self.start + end, begin)
            for id, (start, end), begin in zip(
                self.ids, self.encoding.offsets, begins, strict=False
            )
        ]

    def token(self, index: int) -> Token:
        """Return the token with this index."""
        start, end = self.encoding.token_to_chars(index)
        word = self.encoding.token_to_word
        begins = index == 0 or word(index) != word(index - 1)
        return Token(self.ids[index], self.start + start, self.start + end, begins)

    def index_of(self, seam: Seam) -> int | None:
        """Return the index of the token after a seam; None if the tokens around it differ."""
        index = self.encoding.char_to_token(seam.around[seam.place].start - self.start)
        begin = -1 if index is None else index - seam.place
        indices = range(begin, begin + len(seam.around))
        if begin < 0 or indices.stop > len(self.ids):
            return None
        return index if tuple(map(self.token, indices)) == seam.around else None

    def ids_between_seams(self) -> array[int]:
        """Return the ids that are used."""
        if not (self.begin or self.end):
            return self.ids
        indices = [seam and self.index_of(seam) for seam in (self.begin, self.end)]
        if (self.begin and indices[0] is None) or (self.end and indices[1] is None):
            raise UserError(
                "This tokenizer's tokens depend on text that is far away from them: cut long texts "
                "into shorter documents, for instance into rows of a JSON Lines file."
            )
        return self.ids[slice(*indices)]


class DocumentTokenizer:
    """A tokenizer of documents in chunks, with exact results as the module docstring explains.

    Args:
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
        self.overlaps = [overlap]  # in which a seam is searched, one after the other
        backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self.chunk = max(chunk, overlap) if _can_be_cut(backend) else WHOLE_DOCUMENT
        self.seams_within_words = backend is not None and type(backend.model).__name__ == "BPE"
        added = tokenizer.added_tokens_decoder.values() if backend is not None else []
        self.longest_added = max((len(token.content) for token in added), default=0)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of one text."""
        if text and len(text) <= self.chunk:  # needs no thread
            return list(self._encode([Chunk(text, 0)])[0].ids)
        return [id for _, ids in self.encode([[text]]) for id in ids]

    def encode(
        self,
        documents: Iterable[Iterable[str]],
        advance: Callable[[int], None] = lambda characters: None,
    ) -> Iterator[tuple[bool, array[int]]]:
        """Tokenize documents; empty documents are omitted.

        Args:
            documents: the pieces of each document's text, read when they are needed.
            advance: called after each batch with its number of characters.
        Yields:
            (whether a document begins with these ids, token ids as unsigned ints).
        """
        cutter, left = copy.copy(self), None
        # Most seams are found in a short overlap: 2.2 ms of a core instead of 5.4 for each 64 Ki
        # characters (GPT-2's tokenizer). `parts` alone uses the long one, because the checkpoints
        # of a stream have positions among its parts.
        cutter.overlaps = sorted({min(SHORT_OVERLAP_CHARACTERS, self.overlap), self.overlap})
        for chunk in cutter._encoded(documents, advance):
            if left is not None:
                seam = chunk.begin
                if seam and (left.index_of(seam) is None or chunk.index_of(seam) is None):
                    cutter.chunk = WHOLE_DOCUMENT  # from here on
                    text = left.text[: chunk.start - left.start] + chunk.text
                    chunk = Chunk(text, left.start, left.begin, chunk.end)
                    self._encode([chunk])
                else:
                    yield left.start == 0, left.ids_between_seams()
            left = chunk
        if left is not None:
            yield left.start == 0, left.ids_between_seams()

    def _encoded(
        self, documents: Iterable[Iterable[str]], advance: Callable[[int], None]
    ) -> Iterator[Chunk]:
        """Yield the tokenized chunks of documents, in their order.

        A thread tokenizes, because the tokenizer releases Python's lock and uses all cores, while
        this thread reads and cuts the next batch, and its caller writes the tokens of the last one.
        """
        if self.tokenizer.is_fast:
            # The first call sets the options of the backend, which `_encode_batch` calls directly.
            # Later, while another call runs, setting them would be an error.
            self._encode([Chunk("", 0)])
        with ThreadPoolExecutor(1) as thread:
            futures = (
                thread.submit(self._encode_batch, batch) for batch in self._batches(documents)
            )
            # The second of each pair is tokenized while the first is used.
            for future, _ in itertools.pairwise(itertools.chain(futures, [None])):
                chunks = future.result()
                advance(sum(len(chunk.text) for chunk in chunks))
                yield from chunks

    def _batches(self, documents: Iterable[Iterable[str]]) -> Iterator[list[Chunk]]:
        batch, characters = [], 0
        for pieces in documents:
            for chunk in self.parts(pieces):
                batch.append(chunk)
                characters += len(chunk.text)
                if characters >= self.batch:
                    yield batch
                    batch, characters = [], 0
        yield batch

    def _encode_batch(self, chunks: list[Chunk]) -> list[Chunk]:
        """Tokenize chunks; those without a seam, such as all short documents, get no `encoding`.

        The tokenizers library then omits the characters of each token, and transformers' wrapper,
        whose options `_encoded` has set, is not needed: a quarter less CPU time for short rows.
        """
        if not self.tokenizer.is_fast:
            return self._encode(chunks)
        whole = [chunk for chunk in chunks if not (chunk.begin or chunk.end)]
        self._encode([chunk for chunk in chunks if chunk.begin or chunk.end])
        encode = self.tokenizer.backend_tokenizer.encode_batch_fast
        texts = [chunk.text for chunk in whole]
        for chunk, encoding in zip(whole, encode(texts, add_special_tokens=False), strict=True):
            chunk.ids = array("I", encoding.ids)
        return chunks

    def _encode(self, chunks: list[Chunk]) -> list[Chunk]:
        if chunks:
            encoded = self.tokenizer(
                [chunk.text for chunk in chunks],
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            encodings = encoded.encodings or [None] * len(chunks)
            for chunk, ids, encoding in zip(chunks, encoded["input_ids"], encodings, strict=True):
                chunk.ids, chunk.encoding = array("I", ids), encoding
        return chunks

    def parts(self, pieces: Iterable[str]) -> Iterator[Chunk]:
        """Cut a text into chunks; only the text near the seams is tokenized here.

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

    def part_ids(self, part: Chunk) -> array[int]:
        """Return the token ids of one of `parts`; joined, they are the ids of the whole text."""
        [chunk] = self._encode([Chunk(part.text, part.start, part.begin, part.end)])
        return chunk.ids_between_seams()

    # ------------------------------------------------------------------- seams

    def _seam_at(self, text: str, start: int, cut: int) -> Seam | None:
        for size in self.overlaps:
            left = Chunk(text[cut - size : cut + size], start + cut - size)
            right = Chunk(text[cut : cut + 2 * size], start + cut)
            self._encode([left, right])
            if seam := self.find_seam(left, right):
                return seam
        return None

    def find_seam(self, left: Chunk, right: Chunk) -> Seam | None:
        """Return a seam of two tokenized chunks, or None if there is none.

        It is near the middle of the longest stretch on which the chunks agree, if possible at the
        beginning of a pre-token.
        """
        left_tokens, right_tokens = left.tokens(), right.tokens()
        run = SequenceMatcher(None, left_tokens, right_tokens, autojunk=False).find_longest_match()
        if run.size < 2:
            return None
        tokens = left_tokens[run.a : run.a + run.size]
        changes = _changes(left.text, left.start, tokens[0].start, tokens[-1].end)

        def is_far(start: int, end: int) -> bool:
            return (
                end - start >= self.longest_added
                and bisect_right(changes, end) - bisect_right(changes, start) >= KIND_CHANGES
            )

        def is_seam(place: int) -> bool:
            return (
                self._is_boundary(tokens[place - 1], tokens[place])
                and is_far(tokens[0].start, tokens[place].start)
                and is_far(tokens[place].start, tokens[-1].end)
            )

        def order(place: int) -> tuple[bool, float]:
            return not tokens[place].begins, abs(place - run.size / 2)

        place = next(filter(is_seam, sorted(range(1, run.size), key=order)), None)
        if place is None:
            return None
        # As few tokens around the seam as satisfy its conditions.
        seam = tokens[place].start
        begin = next(n for n in reversed(range(place)) if is_far(tokens[n].start, seam))
        end = next(n for n in range(place, run.size) if is_far(seam, tokens[n].end))
        return Seam(tuple(tokens[begin : end + 1]), place - begin)

    def _is_boundary(self, left: Token, right: Token) -> bool:
        # The comparison excludes a position within a character of several tokens.
        return left.start < left.end <= right.start < right.end and (
            right.begins or self.seams_within_words
        )


def _can_be_cut(backend) -> bool:
    """Return whether documents can be cut into chunks; a slow tokenizer has no backend (None)."""
    if backend is None or getattr(backend.model, "dropout", None):
        return False
    settings = []  # of the normalizer and the pre-tokenizer, and all that they contain
    for step in (backend.normalizer, backend.pre_tokenizer):
        if step is not None:
            json.loads(step.__getstate__(), object_hook=lambda node: settings.append(node) or node)
    # The pre-tokenizer FixedLength counts characters from the beginning of the document.
    return not any(
        node.get("type") == "FixedLength" or FAR.search(str(node.get("Regex", "")))
        for node in settings
    )


def _short(pieces: Iterable[str], most: int) -> Iterator[str]:
    """Yield the same text in pieces of at most `most` characters."""
    for piece in pieces:
        for start in range(0, len(piece), most):
            yield piece[start : start + most]


def _changes(text: str, text_start: int, start: int, end: int) -> list[int]:
    """Return the positions from `start` to `end` whose character is of another kind than before."""
    changes, kind = [], None
    for place, character in enumerate(text[start - text_start : end - text_start], start):
        new_kind = _kind(character)
        if new_kind is not None and new_kind != kind:
            changes.append(place)
            kind = new_kind
    return changes[1:]


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
