"""Conversations and pairs of a corpus as token ids, or why one cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from support.data.chat import Encoder, use_plain_template
from support.data.rows import BadRow, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_examples(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    add_to_digest: Callable[[bytes], object],
    refuse: Callable[[BadRow], None],
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the ids of each conversation or pair, and its characters.

    Args:
        add_to_digest: gets the content of each.
        refuse: gets those that cannot be used.
    """
    encoder = None
    for row in rows:
        if row.kind == "chat" and encoder is None:
            use_plain_template(tokenizer)
        encoder = encoder or Encoder(tokenizer)
        ids, content = encode_example(encoder, row), row.as_json()
        if isinstance(ids, BadRow):
            refuse(ids)
        else:
            add_to_digest(content.encode() + b"\0")
            yield ids, len(content)


def encode_example(encoder: Encoder, row: Row) -> np.ndarray | BadRow:
    """Return the ids of a conversation or a pair, a token t without a loss as ~t, or a BadRow."""
    try:
        return encoder.encode(row)
    except ValueError as error:
        return BadRow(f"{row.where}: {error}.")
