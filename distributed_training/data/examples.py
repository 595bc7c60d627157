"""Conversations and pairs of a corpus as token ids, or why one cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from distributed_training.data.chat import Encoder, Example
from distributed_training.data.chat_template import use_plain_template
from distributed_training.data.rows import BadRow, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_examples(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    add_to_digest: Callable[[bytes], object],
    refuse: Callable[[BadRow], None],
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield the ids of each conversation or pair, its characters, and where its answer ends.

    Args:
        add_to_digest: gets the content of each.
        refuse: gets those that cannot be used.
    """
    encoder = None
    for row in rows:
        if row.kind == "chat" and encoder is None:
            use_plain_template(tokenizer)
        encoder = encoder or Encoder(tokenizer)
        example, content = encode_example(encoder, row), row.as_json()
        if isinstance(example, BadRow):
            refuse(example)
        else:
            add_to_digest(content.encode() + b"\0")
            yield example.ids, len(content), example.end


def encode_example(encoder: Encoder, row: Row) -> Example | BadRow:
    """Return a conversation or a pair as token ids, or why it cannot be used."""
    try:
        return encoder.encode(row)
    except ValueError as error:
        return BadRow(f"{row.where}: {error}.")
