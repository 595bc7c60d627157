"""--show_sample: prints the first training sequence as tokens, and marks those that are trained."""

from typing import Any

import numpy as np

from support import console
from support.cli.arguments import Arguments, choose_seq_length
from support.cluster.context import DistContext
from support.data.opening import open_tokenized
from support.errors import EXIT_COMPLETED
from support.model import resolve as models
from support.units import IGNORED


def show_sample(args: Arguments, ctx: DistContext) -> int:
    """Tokenize the dataset and print its first training sequence; return the exit code."""
    tokenizer, positions = models.find_tokenizer(args, ctx)
    args = args.replace(seq_length=choose_seq_length(args, positions))
    if args.streaming:
        from support.data import streaming

        stream, _, _ = streaming.open_stream(args, ctx, tokenizer)
        inputs, labels = next(stream.step_batches(ctx.device)).micro_batches[0][:2]
    else:
        train, _, _ = open_tokenized(args.replace(eval_only=False), ctx, tokenizer)
        inputs, labels = train.read(np.arange(1))[:2]
    if ctx.is_main:
        for line in describe(inputs[0].tolist(), labels[0].tolist(), tokenizer):
            console.write(line)
    return EXIT_COMPLETED


def describe(ids: list[int], labels: list[int], tokenizer: Any) -> list[str]:
    """Return a heading, and one line for each token: position, id, mark, text.

    Args:
        ids, labels: of a sequence; padding with id 0 at its end is left out.
    """
    length = len(ids)
    while length and ids[length - 1] == 0 and labels[length - 1] == IGNORED:
        length -= 1
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
