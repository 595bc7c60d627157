"""The tokenizer of documents of any length.

Long documents are tokenized in pieces, with exactly the ids of the whole document. A text is cut
after a line break, or else before a space, where tokens(left + right) = tokens(left) +
tokens(right) for a few hundred characters on each side, and a very long text without such a place
also between other characters; a text without any is tokenized as a whole. Each piece is tokenized
after the character that precedes it, because a tokenizer may treat the beginning of a text
differently (Llama 2 inserts a space there).
"""

from __future__ import annotations

import functools
import itertools
import re
from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PIECE_CHARACTERS = 1 << 16  # a piece has one to two times as many, if the text can be cut
# A call tokenizes pieces until it has one of these numbers. It uses all cores.
BATCH_CHARACTERS, BATCH_PIECES = 1 << 21, 4096
# Characters on each side of a cut that are tokenized to check it. Two lengths, so that a pattern
# that counts characters or words from the beginning of a text fits at most one of them.
WINDOWS = (250, 381)
# Places where a text may be cut: after a line break or the end of a Chinese sentence, before a
# space. In a run of white space, tokenizers often join characters across any place.
PLACES = [
    re.compile(pattern)
    for pattern in (r"(?<=\S) ?\n(?= ?\S)", r"(?<=[\u3002\uff01\uff1f])(?=\w)", r"(?<=\w)(?= \w)")
]
# Further places for a text with none of these, such as base64 and minified code, whose tokens would
# take hundreds of bytes for each character if they were computed at once: between letters and
# digits, before punctuation, anywhere. They are tried only after PATIENCE times PIECE_CHARACTERS,
# because the pieces of shorter texts are positions in the checkpoints of streams.
LAST_PLACES = [
    re.compile(pattern)
    for pattern in (
        r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])",
        r"(?<=\w)(?=[^\w\s])",
        r"(?<=\S)(?=\S)",
    )
]
PATIENCE = 8
TRIES = 6  # places of each kind that are tried in PIECE_CHARACTERS of text
# A part of a document that is tokenized alone, and the character before it; "" at the beginning.
Piece = tuple[str, str]


def batches_of(pieces: Iterable[Piece]) -> Iterator[tuple[list[Piece], int]]:
    """Yield the pieces that are tokenized together, and the number of their characters."""
    batch, characters = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0])
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_PIECES:
            yield batch, characters
            batch, characters = [], 0
    if batch:
        yield batch, characters


class DocumentTokenizer:
    """A tokenizer of documents, which are cut from `size` characters on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> None:
        self.tokenizer, self.size = tokenizer, size or PIECE_CHARACTERS
        self.places, self.last_places = PLACES, LAST_PLACES
        backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if backend and type(backend.model).__name__ == "Unigram":
            # Its best tokens may depend on distant words. Without a pre-tokenizer a document is a
            # single word, which no check of a part can cut.
            self.places, self.last_places = PLACES[:1] if backend.pre_tokenizer else [], []
        self._backend = _backend_of(tokenizer)
        # The tokens of the character before a piece; few different ones occur.
        self._alone = functools.lru_cache(1 << 10)(lambda before: next(self._tokens([before])))

    def _tokens(self, texts: list[str]) -> Iterator[list[int]]:
        if self._backend is None:
            options = {"add_special_tokens": False, "verbose": False}
            return iter(self.tokenizer(texts, **options)["input_ids"])
        # Without the positions of the tokens in the text, which take 0.4 of the time.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return (encoding.ids for encoding in encodings)

    def encode(self, pieces: list[Piece]) -> list[np.ndarray]:
        """Return the token ids of each piece, uint32; joined, they are those of the document."""
        tokens = self._tokens([before + text for text, before in pieces])
        return [
            # Twice as fast as np.array(ids, np.uint32).
            np.asarray(array("I", ids))[len(self._alone(before)) if before else 0 :]
            for (_, before), ids in zip(pieces, tokens, strict=True)
        ]

    def encode_with_places(self, text: str) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Return the token ids of a text, and where in the text each token begins and ends.

        The memory for the positions of a piece, hundreds of bytes for each character, is free when
        the next piece is tokenized.
        """
        ids, places = list[int](), [np.empty((0, 2), dtype=np.int64)]
        position = 0
        for piece, before in self.pieces([text]):
            encoded = self.tokenizer(
                before + piece, add_special_tokens=False, verbose=False, return_offsets_mapping=True
            )
            first = len(self._alone(before)) if before else 0
            ids += encoded["input_ids"][first:]
            found = np.array(encoded["offset_mapping"][first:], dtype=np.int64).reshape(-1, 2)
            places.append(found + position - len(before))
            position += len(piece)
        starts, ends = np.concatenate(places).T
        return ids, starts, ends

    def pieces(self, texts: Iterable[str]) -> Iterator[Piece]:
        """Cut a document, which is given in parts; the pieces depend on its whole text only."""
        text, before, searched = "", "", self.size
        for read in texts:
            for start in range(0, len(read), self.size):
                text += read[start : start + self.size]
                while len(text) >= searched + self.size + WINDOWS[-1]:
                    cut = self._cut(text, searched)
                    if cut is None:
                        searched += self.size
                        continue
                    yield text[:cut], before
                    text, before, searched = text[cut:], text[cut - 1], self.size
        if text:
            yield text, before

    def _cut(self, text: str, start: int) -> int | None:
        """Return a place for a cut in the `size` characters from `start`; None if there is none."""
        is_late = start >= PATIENCE * self.size
        for pattern in self.places + self.last_places * is_late:
            places = pattern.finditer(text, start, start + self.size)
            for match in itertools.islice(places, TRIES):
                if self._may_cut(text, match.end()):
                    return match.end()
        return None

    def _may_cut(self, text: str, cut: int) -> bool:
        before = text[cut - 1]
        alone = self._alone(before)
        for width in WINDOWS:
            left, right = text[max(0, cut - width) : cut], text[cut : cut + width]
            both, first, second = self._tokens([left + right, left, before + right])
            if second[: len(alone)] != alone or both != first + second[len(alone) :]:
                return False
        return True


def _backend_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return the tokenizer of the tokenizers library that computes a fast tokenizer's ids.

    It has the settings of a call without options: no truncation or padding, and special tokens
    split or not. The result is None if it does not compute the ids alone: the tokenizer is not a
    fast one, or its class changes texts (CPM separates words, and replaces spaces and line breaks).
    """
    if not tokenizer.is_fast:
        return None
    special = " ".join(map(str, tokenizer.get_added_vocab()))
    text = f"a a  a\n\n a\ta\r\n{special} a"  # a vocabulary may lack other characters
    expected = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    backend = tokenizer.backend_tokenizer  # this call has set its options
    same = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids == expected
    return backend if same else None
