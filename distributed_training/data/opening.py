"""From --dataset to the training and validation sequences of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from distributed_training.data.facts import DatasetFacts
from distributed_training.data.sequences import Padding, Sequences
from distributed_training.errors import UserError
from distributed_training.ranks.context import DistContext
from distributed_training.settings.data import DataSettings
from distributed_training.settings.fields import NEED_EVALUATIONS
from distributed_training.settings.settings import Settings
from distributed_training.settings.training import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distributed_training.data.streaming import Stream

NOTHING_TO_EVALUATE = (
    "There is nothing to evaluate on: a corpus of one sequence, --validation_split 0, or a stream "
    "without --validation_file"
)


class Datasets(NamedTuple):
    """The sequences of a run."""

    train: Sequences | Stream
    validation: Sequences
    facts: DatasetFacts  # the dataset's entry in results.json

    @classmethod
    def open(
        cls, settings: Settings, ctx: DistContext, tokenizer: PreTrainedTokenizerBase, length: int
    ) -> Datasets:
        """Tokenize the text, and cut it into sequences of `length` tokens.

        One rank of each node tokenizes, unless the tokens are in the cache; all ranks memory-map
        the token file. With --streaming the text is read and tokenized while the run trains.

        Raises:
            UserError: the corpus cannot be read, is shorter than one sequence, or has nothing to
                evaluate on although a flag needs evaluations.
        """
        data, training = settings.data, settings.training
        # Micro-batches are padded to few lengths; to one if --compile needs a graph for each layer.
        model = settings.model
        one_length = ctx.simulated or (model.compile and settings.strategy.gathers_single_layers)
        padding = Padding.of(length, one_length, ctx.device.type, bool(model.compiler_flag))
        datasets = open_datasets(data, training, ctx, tokenizer, padding)
        check_validation(datasets.validation, training)
        return datasets.evaluate_on(training.eval_samples or data.num_samples)

    def evaluate_on(self, count: int | None) -> Datasets:
        """Return a copy with the first `count` validation sequences; None: all."""
        return self._replace(validation=self.validation.take(count)) if count else self

    @property
    def kind(self) -> str | None:
        """The kind of the rows, see `facts.Kinds`; a mixture's may be "mixed"."""
        return self.facts["kind"] if self.stream is None else self.stream.state["kind"]

    @property
    def stream(self) -> Stream | None:
        """The training sequences of --streaming, whose position a checkpoint contains."""
        return None if isinstance(self.train, Sequences) else self.train


def open_datasets(
    data: DataSettings,
    training: TrainingSettings,
    ctx: DistContext,
    tokenizer: PreTrainedTokenizerBase,
    padding: Padding,
) -> Datasets:
    """Open the corpus, tokenized or as the stream of --streaming.

    Raises:
        UserError: the corpus or --validation_file cannot be read, or the corpus is shorter than one
            sequence.
    """
    if not data.streaming:
        return open_tokenized(data, training, ctx, tokenizer, padding)
    # Imported here: a run loads the modules of its own kind of data only.
    from distributed_training.data import streaming

    return Datasets(*streaming.open_stream(data, training, ctx, tokenizer, padding))


def open_tokenized(
    data: DataSettings,
    training: TrainingSettings,
    ctx: DistContext,
    tokenizer: PreTrainedTokenizerBase,
    padding: Padding,
) -> Datasets:
    """Tokenize the corpus, or find its tokens in the cache, and cut them into sequences.

    Raises:
        UserError: the corpus cannot be read, or is shorter than one sequence.
    """
    # A run loads the modules of its own kind of data, here those of a stored corpus.
    from distributed_training.data.corpus import open_corpus
    from distributed_training.data.sources import announce

    announce(data)
    only_validates = training.eval_only and data.validation_file
    if len(data.dataset) > 1 and not only_validates:
        from distributed_training.data.mixture import open_mixture

        return Datasets(*open_mixture(data, training, ctx, tokenizer, padding))
    return Datasets(*open_corpus(data, training, ctx, tokenizer, padding, data.dataset_name))


def check_validation(validation: Sequences, training: TrainingSettings) -> None:
    """Check that there is something to evaluate on if a flag needs evaluations."""
    needed = [flag for flag in ("eval_only", *NEED_EVALUATIONS.split()) if getattr(training, flag)]
    if needed and not validation.num_sequences:
        raise UserError(f"{NOTHING_TO_EVALUATE}, and --{needed[0]} needs it.")
