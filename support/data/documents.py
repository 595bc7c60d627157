"""Tokenize documents of any length in pieces, with exactly the ids of the whole document.

A long text is cut after a line break, or else before a space between two words. Before a cut is
used, the tokenizer shows on a few hundred characters around it that tokens(left + right) =
tokens(left) + tokens(right). If it does not, the next place is tried; a text without such a place
is tokenized as a whole. Each piece is tokenized after the character that precedes it, because a
tokenizer may treat the beginning of a text differently (Llama 2 inserts a space there).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.data.formats import Document

PIECE_CHARACTERS = 1 << 16  # a piece has one to two times as many, if the text can be cut
BATCH_CHARACTERS = 1 << 20  # tokenized by one call, which uses all cores
# Characters on each side of a cut that are tokenized to check it. Two lengths, so that a pattern
# that counts characters or words from the beginning of a text fits at most one of them.
WINDOWS = (250, 381)
# Places where a text may be cut: after a line break or the end of a Chinese sentence, before a
# space. In a run of white space, tokenizers often join characters across any place.
PLACES = [
    re.compile(pattern)
    for pattern in (r"(?<=\S) ?\n(?= ?\S)", r"(?<=[\u3002\uff01\uff1f])(?=\w)", r"(?<=\w)(?= \w)")
]
TRIES = 6  # places of each kind that are tried in PIECE_CHARACTERS of text


@dataclass(frozen=True)
class Piece:
    """A part of a document that is tokenized alone."""

    text: str
    before: str = ""  # the character before it; empty at the beginning of a document


class DocumentTokenizer:
    """A tokenizer of documents, which are cut from `size` characters on."""

    def __init__(self, tokenizer: Any, size: int | None = None) -> None:
        self.tokenizer, self.size = tokenizer, size or PIECE_CHARACTERS
        if tokenizer.is_fast:
            # Sets the options of the backend (no truncation, no padding), which is called directly.
            tokenizer("", add_special_tokens=False)
        # The best tokens of a Unigram model may depend on distant words.
        model = tokenizer.backend_tokenizer.model if tokenizer.is_fast else None
        self.places = PLACES[:1] if type(model).__name__ == "Unigram" else PLACES
        self._length_of = functools.lru_cache(1000)(lambda text: len(self._tokens([text])[0]))

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        if self.tokenizer.is_fast:  # faster than transformers' wrapper by a quarter for short rows
            encode = self.tokenizer.backend_tokenizer.encode_batch_fast
            return [encoding.ids for encoding in encode(texts, add_special_tokens=False)]
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def encode(self, pieces: list[Piece]) -> list[np.ndarray]:
        """Return the token ids of each piece, uint32; joined, they are those of the document."""
        tokens = self._tokens([piece.before + piece.text for piece in pieces])
        return [
            np.array(ids[self._length_of(piece.before) if piece.before else 0 :], dtype=np.uint32)
            for piece, ids in zip(pieces, tokens, strict=True)
        ]

    def encode_documents(
        self, documents: Iterable[Document], advance: Callable[[int], object]
    ) -> Iterator[tuple[bool, np.ndarray]]:
        """Tokenize documents; empty documents are omitted.

        A thread tokenizes a batch, on all cores, while this thread reads and cuts the next one.

        Args:
            advance: called after each batch with its number of characters.
        Yields:
            (whether a document begins with these ids, uint32 ids).
        """
        with ThreadPoolExecutor(1) as thread:
            batches = (
                (batch, thread.submit(self.encode, batch)) for batch in self._batches(documents)
            )
            # The second of each pair is tokenized while the first is used.
            for current, _ in itertools.pairwise(itertools.chain(batches, [None])):
                assert current is not None
                batch, future = current
                encoded = future.result()
                advance(sum(len(piece.text) for piece in batch))
                yield from zip((not piece.before for piece in batch), encoded, strict=True)

    def _batches(self, documents: Iterable[Document]) -> Iterator[list[Piece]]:
        batch, characters = list[Piece](), 0
        for piece in itertools.chain.from_iterable(map(self.pieces, documents)):
            batch.append(piece)
            characters += len(piece.text)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        yield batch

    def pieces(self, document: Document) -> Iterator[Piece]:
        """Cut a document; the result depends on its text only, not on how it is read."""
        text, before, searched = "", "", self.size
        for read in document.pieces:
            for start in range(0, len(read), self.size):
                text += read[start : start + self.size]
                while len(text) >= searched + self.size + WINDOWS[-1]:
                    cut = self._cut(text, searched)
                    if cut is None:
                        searched += self.size
                        continue
                    yield Piece(text[:cut], before)
                    text, before, searched = text[cut:], text[cut - 1], self.size
        if text:
            yield Piece(text, before)

    def _cut(self, text: str, start: int) -> int | None:
        """Return a place for a cut in the `size` characters from `start`; None if there is none."""
        for pattern in self.places:
            places = pattern.finditer(text, start, start + self.size)
            for match in itertools.islice(places, TRIES):
                if self._may_cut(text, match.end()):
                    return match.end()
        return None

    def _may_cut(self, text: str, cut: int) -> bool:
        before = text[cut - 1]
        for width in WINDOWS:
            left, right = text[max(0, cut - width) : cut], text[cut : cut + width]
            both, first, second, alone = self._tokens([left + right, left, before + right, before])
            if second[: len(alone)] != alone or both != first + second[len(alone) :]:
                return False
        return True
