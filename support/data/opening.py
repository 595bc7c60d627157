"""From --dataset to the training and validation sequences of a run."""

from typing import Any

from support.cli.arguments import Arguments
from support.cli.checks import NEED_EVALUATIONS
from support.cluster.context import DistContext
from support.data.corpus import open_corpus
from support.data.sequences import Sequences
from support.data.sources import announce
from support.errors import UserError

NOTHING_TO_EVALUATE = (
    "There is nothing to evaluate on: a corpus of one sequence, --validation_split 0, or a stream "
    "without --validation_file"
)


def open_dataset(args: Arguments, ctx: DistContext, tokenizer: Any) -> tuple[Any, Sequences, dict]:
    """Tokenize the corpus, once per node, and cut it into sequences; a stream is only opened.

    Returns:
        The training sequences (`Sequences`, or a `Stream` with --streaming), the validation
        sequences, and the dataset's entry in results.json.
    Raises:
        UserError: the corpus cannot be read, is shorter than one sequence, or has nothing to
            evaluate on although a flag needs evaluations.
    """
    if args.streaming:
        from support.data.streaming import open_stream

        opened: tuple[Any, Sequences, dict] = open_stream(args, ctx, tokenizer)
    else:
        opened = open_tokenized(args, ctx, tokenizer)
    check_validation(opened[1], args)
    return opened


def open_tokenized(
    args: Arguments, ctx: DistContext, tokenizer: Any
) -> tuple[Sequences, Sequences, dict]:
    """Tokenize the corpus, or find its tokens in the cache, and cut them into sequences.

    Returns:
        (training sequences, validation sequences, the dataset's entry in results.json).
    Raises:
        UserError: the corpus cannot be read, or is shorter than one sequence.
    """
    announce(args)
    if args.mixture and not (args.eval_only and args.validation_file):
        from support.data.mixture import open_mixture

        return open_mixture(args, ctx, tokenizer)
    return open_corpus(args, ctx, tokenizer, args.dataset)


def check_validation(validation: Sequences, args: Arguments) -> None:
    """Check that there is something to evaluate on if a flag needs evaluations."""
    needed = [flag for flag in NEED_EVALUATIONS if getattr(args, flag)]
    if needed and not validation.num_sequences:
        raise UserError(f"{NOTHING_TO_EVALUATE}, and --{needed[0]} needs it.")
