"""--show_sample: prints the first training sequence as tokens, and marks those that are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distributed_training import console
from distributed_training.data.opening import open_datasets
from distributed_training.data.sequences import Padding, micro_batch
from distributed_training.errors import EXIT_COMPLETED
from distributed_training.loss_chunks import IGNORED
from distributed_training.model import resolve as models
from distributed_training.ranks.context import DistContext
from distributed_training.settings.data import choose_seq_length
from distributed_training.settings.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def show_sample(settings: Settings, ctx: DistContext) -> int:
    """Tokenize the dataset and print its first training sequence; return the exit code."""
    tokenizer, positions = models.find_tokenizer(settings, ctx)
    data = settings.data
    length = choose_seq_length(data.seq_length, settings.model.model, positions)
    padding = Padding.of(length, False, ctx.device.type)
    training = replace(settings.training, eval_only=False)
    parts = open_datasets(data, training, ctx, tokenizer, padding).train.first_sequence()
    if ctx.is_main:
        # Without padding, whose id may be that of a token at the end.
        length = sum(len(ids) for ids, _ in parts)
        inputs, labels = (row[0, :length].tolist() for row in micro_batch([parts], padding)[:2])
        for line in describe(inputs, labels, tokenizer):
            console.write(line)
    return EXIT_COMPLETED


def describe(ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a heading, and one line for each token: position, id, mark, text.

    Args:
        ids, labels: of a sequence, without padding.
    """
    length = len(ids)
    # The first token is not predicted from anything.
    trained = [position > 0 and labels[position] != IGNORED for position in range(length)]
    lines = [
        f"🔎 The first training sequence: {length} tokens, {sum(trained)} of them trained (*)",
        "position      id   token",
    ]
    for position, (token, is_trained) in enumerate(zip(ids, trained, strict=False)):
        text = tokenizer.decode([token])
        # Decoding a SentencePiece token alone drops the space before it.
        if tokenizer.convert_ids_to_tokens(token).startswith("▁") and text[:1] != " ":
            text = f" {text}"
        lines.append(f"{position:8} {token:7} {'*' if is_trained else ' '} {text!r}")
    return lines
