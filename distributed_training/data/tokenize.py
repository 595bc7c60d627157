"""Tokenize the rows of a split, and write their tokens; see token_cache.py for the files."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distributed_training.data import special_tokens
from distributed_training.data.document_tokenizer import DocumentTokenizer, batches_of
from distributed_training.data.facts import SplitCounts, TokenizedSplit
from distributed_training.data.rows import BadRow, PlacedRows, Row, check_kind
from distributed_training.data.token_bytes import bytes_by_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Digest:
    """SHA-256 and size of what is added."""

    def __init__(self) -> None:
        self._digest, self.size = hashlib.sha256(), 0

    def add(self, content: bytes) -> None:
        self._digest.update(content)
        self.size += len(content)

    def separate(self) -> None:
        """Mark the end of a document, which is no part of the size."""
        self._digest.update(b"\0")

    def hex(self) -> str:
        return self._digest.hexdigest()


def write_split(
    path: Path,
    rows: PlacedRows,
    tokenizer: PreTrainedTokenizerBase,
    advance: Callable[[int], object],
    refuse: Callable[[BadRow], None],
) -> TokenizedSplit:
    """Write the files of a split, whose names begin with `path`; return its facts."""
    facts = SplitCounts(kind=None, formats=[], tokens=0, rows=0, empty=0, ended=0)
    text, tokens = _Digest(), _Digest()
    index = list[tuple[int, int, int, int]]()
    usable = _usable(rows, facts, refuse)
    usable = itertools.chain(list(itertools.islice(usable, 1)), usable)  # its kind is known now
    (sizes, are_exact), counted = bytes_by_id(tokenizer), 0
    has_examples = facts["kind"] in ("chat", "pair")
    if has_examples:
        from distributed_training.data.examples import encode_examples

        dtype, encoded = "int32", encode_examples(usable, tokenizer, text.add, refuse)
    else:
        dtype = "uint16" if len(sizes) <= 1 << 16 else "uint32"
        encoded = _encode_documents(usable, tokenizer, text)
    with open(f"{path}.bin", "wb") as file:
        for ids, characters, answer in encoded:
            content = ids.astype(dtype).tobytes()
            file.write(content)
            tokens.add(content)
            start, end = facts["tokens"], facts["tokens"] + len(ids)
            facts["tokens"] = end
            if has_examples:  # the first token is not predicted from anything
                target = start + 1 + int((ids[1:] >= 0).argmax())
                facts["ended"] += bool(answer)
                index.append((start, end, target, start + answer))
            else:
                counted += int(sizes[ids].sum())
            advance(characters)
    if has_examples:
        np.array(index, np.int64).tofile(f"{path}.index.bin")
        facts["rows"] = len(index)
    # The tokens of documents get the bytes of their text, those of examples 0 if not exact.
    scale = text.size / counted if counted else float(are_exact)
    (sizes * scale).tofile(f"{path}.bytes.bin")
    return {
        **facts,
        "dtype": dtype,
        "vocabulary": len(sizes),
        "sha256": text.hex(),
        "tokens_sha256": tokens.hex(),
    }


def _usable(
    rows: PlacedRows, facts: SplitCounts, refuse: Callable[[BadRow], None]
) -> Iterator[Row]:
    """Yield the rows that can be used, and count them."""
    for _, content in rows:
        row = check_kind(content, facts)
        if isinstance(row, BadRow):
            refuse(row)
        else:
            facts["rows"] += 1
            facts["empty"] += row.pieces == [""]
            yield row


def _encode_documents(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, text: _Digest
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield the ids of one stream, their characters, and 0; the digest gets the text."""
    documents = DocumentTokenizer(tokenizer)
    first, later = (
        np.array(special_tokens.document_start(tokenizer, n), np.uint32) for n in (True, False)
    )

    def read(row: Row) -> Iterator[str]:
        for piece in row.pieces:
            text.add(piece.encode())
            yield piece
        text.separate()

    pieces = itertools.chain.from_iterable(documents.pieces(read(row)) for row in rows)
    start = first
    for batch, characters in batches_of(pieces):
        stream = list[np.ndarray]()
        for (_, before), ids in zip(batch, documents.encode(batch), strict=True):
            stream += [ids] if before else [start, ids]
            start = later
        yield np.concatenate(stream), characters, 0
