"""The units of a stream as token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from distributed_training.data.chat import Encoder
from distributed_training.data.chat_template import use_plain_template
from distributed_training.data.corpus import TEXT_IS_PACKED
from distributed_training.data.document_tokenizer import DocumentTokenizer, batches_of
from distributed_training.data.examples import encode_example
from distributed_training.data.rows import BadRow
from distributed_training.data.special_tokens import document_start
from distributed_training.data.stream_state import Ends
from distributed_training.data.stream_units import Unit
from distributed_training.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EncodedUnit(NamedTuple):
    """The token ids of a unit."""

    ids: np.ndarray | None  # as `sequences` stores them; None if it cannot be used
    flaw: Literal["", "truncated", "skipped"]


class UnitEncoder:
    """An encoder of units into token ids.

    Attributes:
        documents: the tokenizer of documents.
        end_of_text: the id of the end-of-text token.
        ends: the examples that were encoded.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seq_length: int, packing: bool) -> None:
        self.documents, self.end_of_text = DocumentTokenizer(tokenizer), tokenizer.eos_token_id
        self.ends: Ends = {"trained": 0, "cut": 0, "examples": 0}
        self._examples = Encoder(tokenizer)
        self._seq_length, self._packing = seq_length, packing
        # The ids before the first document, and before each later one.
        self._first, self._later = (document_start(tokenizer, n) for n in (True, False))

    def encode(self, unit: Unit) -> EncodedUnit | BadRow:
        """Return the ids of a unit, or a BadRow.

        Raises:
            UserError: the unit is text, which --packing does not support.
        """
        return self._encode_text(unit) if unit.row.kind == "text" else self._encode_example(unit)

    def _encode_text(self, unit: Unit) -> EncodedUnit:
        if self._packing:
            raise UserError(TEXT_IS_PACKED)
        # A row is one piece, or several if it is long.
        pieces = [unit.piece] if unit.piece else list(self.documents.pieces(unit.row.pieces))
        if not pieces:
            return EncodedUnit(None, "skipped")
        start = self._later if unit.place["row"] else self._first
        start = start if unit.begins else []
        parts = [np.array(start, np.int64)]
        for batch, _ in batches_of(pieces):
            parts += self.documents.encode(batch)
        return EncodedUnit(np.concatenate(parts).astype(int), "")

    def _encode_example(self, unit: Unit) -> EncodedUnit | BadRow:
        if unit.row.kind == "chat":
            use_plain_template(self.documents.tokenizer)
        encoded = encode_example(self._examples, unit.row)
        if isinstance(encoded, BadRow):
            return encoded
        ids, end = encoded.ids[: self._seq_length], encoded.end
        if not (ids[1:] >= 0).any():  # no target remains
            return EncodedUnit(None, "skipped")
        self.ends["trained"] += 0 < end <= len(ids)
        self.ends["cut"] += end > len(ids)
        self.ends["examples"] += 1
        return EncodedUnit(ids, "truncated" if len(encoded.ids) > len(ids) else "")
