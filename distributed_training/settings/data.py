"""Which text is trained on, and how it becomes sequences."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from distributed_training.errors import UserError
from distributed_training.known_models import EMBEDDED_MODEL
from distributed_training.settings import flag_types
from distributed_training.settings.fields import (
    COMPUTED,
    EVALUATIONS,
    MUST_MATCH,
    ORDER,
    SEQUENCES,
    TOKENS,
    flag,
    switch,
)


class Dataset(NamedTuple):
    """A dataset among those of --dataset."""

    name: str  # as for a single one
    weight: str | None = None  # a decimal number, as text; None if no dataset has one

    def __str__(self) -> str:
        return self.name if self.weight is None else f"{self.name}:{self.weight}"


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The text, and how it becomes sequences."""

    title: ClassVar[str] = "Data"

    dataset: tuple[Dataset, ...] = flag(
        COMPUTED,
        flag_types.place,
        (
            "pydocs (embedded), wikitext, a file or folder (text, .jsonl, .csv, .parquet: "
            "docs/DATA.md), or a hub dataset; or several, also with weights: A:0.7 B:0.3 "
            "(default: pydocs for tiny-gpt2, else wikitext)"
        ),
        metavar="NAME",
        nargs="+",
        names="dataset_name train_file",
    )
    include: str | None = flag(
        None,
        flag_types.label,
        "files of a folder to read, such as 'books/*.md,*.txt' (default: train split, or all)",
        metavar="PATTERNS",
    )
    dataset_config: str | None = flag(
        None,
        flag_types.label,
        "configuration name of a hub dataset, or in a folder's README.md",
        names="dataset_config_name",
    )
    dataset_revision: str | None = flag(
        None,
        flag_types.label,
        "branch, tag or commit of a hub dataset (default: main)",
        metavar="REV",
    )
    train_split: str | None = flag(
        None,
        flag_types.label,
        "split of a hub dataset to train on, also as 'train[:10%]' (default: train)",
        metavar="SPLIT",
        names="dataset_train_split",
    )
    eval_split: str | None = flag(
        None,
        flag_types.label,
        "split of a hub dataset to evaluate on (default: validation, if there is one)",
        metavar="SPLIT",
        names="dataset_test_split",
        effect=EVALUATIONS,
    )
    text_column: str | None = flag(
        None,
        flag_types.label,
        "column or key of the text (default: recognized by the row's keys, else text)",
        names="dataset_text_field",
        excludes="prompt_column completion_column",
    )
    prompt_column: str | None = flag(None, flag_types.label, "column or key of the prompt")
    completion_column: str | None = flag(
        None, flag_types.label, "column or key of the completion, which is trained on"
    )
    validation_file: str | None = flag(
        None,
        flag_types.place,
        "file or folder to evaluate on (default: the corpus's own validation split)",
        metavar="FILE",
        excludes="validation_split eval_split",
        effect=EVALUATIONS,
    )
    validation_split: float | None = flag(
        None,
        flag_types.probability,
        "share to hold out, 0: none (default: 0.1 without a validation split)",
        metavar="SHARE",
        excludes="eval_split validation_split_percentage",
        effect=ORDER,
        at_resume=MUST_MATCH,
    )
    max_bad_rows: int = flag(
        0,
        flag_types.natural_int,
        "skip up to N rows that cannot be used, and name them",
        metavar="N",
    )
    chat_template: str | None = flag(
        None,
        flag_types.place,
        "Jinja template of conversations (default: the tokenizer's, else a plain one)",
        metavar="FILE",
        effect=TOKENS,
    )
    train_on: str = flag(
        "assistant",
        flag_types.choice,
        "what is trained of conversations and pairs: the assistant's messages, or all",
        choices=("assistant", "all"),
        effect=TOKENS,
        at_resume=MUST_MATCH,
    )
    # The length of a stream is not known in advance.
    streaming: bool = switch(
        False,
        "read and tokenize while training; needs --max_steps",
        excludes="epochs num_samples eval_split validation_split validation_split_percentage",
        needs="max_steps",
        effect=ORDER,
    )
    shuffle_buffer: int = flag(
        1000,
        flag_types.positive_int,
        "sequences among which --streaming shuffles, over all ranks",
        metavar="N",
        effect=ORDER,
        at_resume=MUST_MATCH,
    )
    seq_length: int | None = flag(
        None,
        flag_types.block_length,
        "tokens in a sequence (default: 512, tiny-gpt2 256, or the model's most)",
        names="block_size max_seq_length max_length",
        effect=SEQUENCES,
        at_resume=MUST_MATCH,
        planned=True,
    )
    isolate_documents: bool = switch(
        False,
        "tokens attend to their own document only (default: to all earlier ones)",
        effect=SEQUENCES,
        at_resume=MUST_MATCH,
        planned=True,
    )
    packing: bool = switch(
        False,
        "put several conversations or pairs into a sequence; each attends to itself only",
        effect=SEQUENCES,
        at_resume=MUST_MATCH,
    )
    num_samples: int | None = flag(
        None,
        flag_types.tokens,
        "sequences to train on, over all ranks (default: all)",
        names="max_train_samples data_size",
        effect=ORDER,
    )
    cache_dir: str | None = flag(
        None,
        flag_types.place,
        "where tokenized data is kept (default: distributed_training under HF_HOME)",
    )
    # Not a flag: the share of the training sequences to hold out for evaluations, of
    # --validation_split or --validation_split_percentage; None for the default.
    held_out_share: float | None

    @property
    def dataset_name(self) -> str:
        """The text of --dataset; several are separated by spaces."""
        return " ".join(map(str, self.dataset))

    @property
    def isolates_documents(self) -> bool:
        """Whether tokens attend to their own document only."""
        return self.isolate_documents or self.packing


def default_dataset(model: str) -> str:
    """Return --dataset for a run without it."""
    return "pydocs" if model == EMBEDDED_MODEL else "wikitext"


def choose_seq_length(requested: int | None, model: str, positions: int | None) -> int:
    """Return the tokens of a sequence: --seq_length, or its default for this model.

    Args:
        requested: --seq_length.
        model: --model.
        positions: the largest number of tokens that the model supports; None without a limit.
    Raises:
        UserError: more tokens are requested than the model supports.
    """
    if requested is None:
        default = 256 if model == EMBEDDED_MODEL else 512
        return min(default, positions or default)
    if positions and requested > positions:
        raise UserError(
            f"--seq_length {requested} is more than the {positions} positions of {model}."
        )
    return requested
