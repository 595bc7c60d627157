"""From --dataset to the training and validation sequences of a run."""

from typing import Any, NamedTuple

from support import console
from support.cli.checks import NEED_EVALUATIONS
from support.cluster.context import DistContext
from support.data.corpus import open_corpus
from support.data.sequences import Sequences
from support.data.sources import announce
from support.errors import UserError
from support.settings.settings import Settings

NOTHING_TO_EVALUATE = (
    "There is nothing to evaluate on: a corpus of one sequence, --validation_split 0, or a stream "
    "without --validation_file"
)


class Datasets(NamedTuple):
    """The sequences of a run."""

    train: Any  # Sequences, or a Stream with --streaming
    validation: Sequences
    facts: dict[str, Any]  # the dataset's entry in results.json


def open_stream(settings: Settings, ctx: DistContext, tokenizer: Any) -> Datasets:
    """Open the corpus of --streaming, which is read and tokenized while training.

    Raises:
        UserError: the corpus or --validation_file cannot be read.
    """
    from support.data import streaming

    return Datasets(*streaming.open_stream(settings, ctx, tokenizer))


def open_tokenized(settings: Settings, ctx: DistContext, tokenizer: Any) -> Datasets:
    """Tokenize the corpus, or find its tokens in the cache, and cut them into sequences.

    Raises:
        UserError: the corpus cannot be read, or is shorter than one sequence.
    """
    announce(settings)
    if len(settings.data.dataset) > 1 and not (
        settings.training.eval_only and settings.data.validation_file
    ):
        from support.data.mixture import open_mixture

        return Datasets(*open_mixture(settings, ctx, tokenizer))
    return Datasets(*open_corpus(settings, ctx, tokenizer, settings.data.dataset_name))


def check_validation(validation: Sequences, settings: Settings) -> None:
    """Check that there is something to evaluate on if a flag needs evaluations."""
    needed = [flag for flag in NEED_EVALUATIONS if settings.flags()[flag]]
    if needed and not validation.num_sequences:
        raise UserError(f"{NOTHING_TO_EVALUATE}, and --{needed[0]} needs it.")


def say_nothing_to_evaluate() -> None:
    """Print that there are no validation sequences."""
    console.warn(f"{NOTHING_TO_EVALUATE}.")
