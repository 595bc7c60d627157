"""The loss of two models on the same held-out documents, conversations or pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from distributed_training import console
from distributed_training.data.chat_template import use_plain_template
from distributed_training.data.document_tokenizer import DocumentTokenizer
from distributed_training.data.examples import Encoder, encode_example
from distributed_training.data.rows import BadRow
from distributed_training.data.special_tokens import start_of
from distributed_training.errors import UserError
from distributed_training.model.config import max_positions
from distributed_training.trained.load import load, usable_device
from distributed_training.trained.source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from distributed_training.data.rows import Row

LONGEST = 1024  # tokens of a window, if the model has no fewer positions
MOST_ROWS = 1000


def losses_of(source: Source, rows: Iterable[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of each row in nats, and the number of its tokens that have one.

    Rows that cannot be encoded have no loss and no tokens. The loss of a row is that of its text,
    whatever tokens it has, so that models with different tokenizers can be compared.

    Returns:
        Two arrays [rows].
    Raises:
        UserError: the model cannot be loaded.
    """
    device = usable_device()
    model, tokenizer = load(source, device, "fp32")
    if not context_of(tokenizer):
        console.warn(
            f"The tokenizer of {source.name} has neither a start nor an end token, so the first "
            "token of a document has no loss."
        )
    window = min(LONGEST, max_positions(model.config) or LONGEST)
    encode = encoder_of(tokenizer)
    found = [row_loss(model, ids, window) for ids in map(encode, rows)]
    losses, tokens = zip(*found, strict=True) if found else ((), ())
    return np.array(losses), np.array(tokens)


def context_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids before a document: those that begin a text, or else the end-of-text token.

    The latter is what precedes a document in training. So the first token of a document has a loss
    under each model: otherwise one with a start token would have to predict more of the text.
    """
    end = tokenizer.eos_token_id
    return start_of(tokenizer) or ([] if end is None else [end])


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[Row], np.ndarray]:
    """Return a function from a row to its ids, as in training: ~id for one without a loss."""
    documents, context = DocumentTokenizer(tokenizer), ~np.array(context_of(tokenizer), np.int64)
    encoders = list[Encoder]()

    def encode(row: Row) -> np.ndarray:
        if row.kind == "text":
            pieces = documents.encode(list(documents.pieces(row.pieces)))
            return np.concatenate([context, *pieces])
        if not encoders:
            use_plain_template(tokenizer)
            encoders.append(Encoder(tokenizer))
        example = encode_example(encoders[0], row)
        return np.empty(0, np.int64) if isinstance(example, BadRow) else example.ids

    return encode


@torch.no_grad()
def row_loss(model: PreTrainedModel, stored: np.ndarray, window: int) -> tuple[float, int]:
    """Return the loss of a row, and its tokens that have one.

    Args:
        stored: the ids; one without a loss is ~id.
        window: tokens that the model sees at once. Each window predicts all of its tokens but the
            first, which is the last one of the window before.
    """
    ids = np.where(stored < 0, ~stored, stored).astype(np.int64)
    loss, tokens = 0.0, 0
    for begin in range(0, max(0, len(ids) - 1), window - 1):
        part = torch.tensor(ids[begin : begin + window], device=model.device).unsqueeze(0)
        targets = part[0, 1:].clone()
        targets[torch.tensor(stored[begin + 1 : begin + window] < 0)] = -100
        if (targets < 0).all():
            continue
        logits = model(input_ids=part, use_cache=False).logits[0, :-1].float()
        loss += F.cross_entropy(logits, targets, reduction="sum").item()
        tokens += int((targets >= 0).sum())
    return loss, tokens


def limited(rows: Iterable[Row]) -> list[Row]:
    """Return the first MOST_ROWS rows, with their text in memory.

    Raises:
        UserError: there is none.
    """
    found = [replace(row, pieces=[*row.pieces]) for row in itertools.islice(rows, MOST_ROWS)]
    if not found:
        raise UserError("There are no documents to score.")
    return found
