"""The training and validation sequences of one tokenized corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distributed_training import console
from distributed_training.data.facts import DatasetFacts, SplitFacts
from distributed_training.data.printing import print_splits, warn_of_no_end
from distributed_training.data.sequences import Padding, Sequences
from distributed_training.data.token_cache import TokenizedCorpus, tokenize_corpus
from distributed_training.data.token_file import TokenFile
from distributed_training.errors import UserError
from distributed_training.ranks.context import DistContext
from distributed_training.settings.data import DataSettings
from distributed_training.settings.training import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_IS_PACKED = (
    "--packing is for conversations and pairs, and this corpus is text, whose sequences have no "
    "padding: use --isolate_documents."
)


def open_corpus(
    data: DataSettings,
    training: TrainingSettings,
    ctx: DistContext,
    tokenizer: PreTrainedTokenizerBase,
    padding: Padding,
    name: str,
) -> tuple[Sequences, Sequences, DatasetFacts]:
    """Do what `opening.open_tokenized` does for the dataset `name`."""
    prepared = tokenize_corpus(data, ctx, tokenizer, name, training.eval_only)
    train, validation, facts = split_sequences(prepared, data, training, padding)
    print_splits(facts, tokenizer, "articles" if name == "wikitext" else "rows")
    if "train" in facts and facts["train"].get("trained_ends") == 0:
        is_cut = prepared["splits"]["train"]["ended"] > 0
        warn_of_no_end(tokenizer, facts["train"]["kind"] == "chat", is_cut)
    if not training.eval and "kind" not in facts["validation"] and validation.num_sequences:
        # They stay held out, so that runs with and without evaluations train on the same data.
        console.print0(
            "📚 --no_eval: the validation sequences are held out of the training data and not "
            "used: --validation_split 0 trains on them"
        )
    nothing = {"sha256": None, "tokens": 0, "blocks": 0, "kind": facts["validation"].get("kind")}
    found = {"validation": facts["validation"], "bad_rows": prepared["bad_rows"]}
    return train, validation, {"name": name, **facts.get("train", nothing), **found}


def split_sequences(
    prepared: TokenizedCorpus, data: DataSettings, training: TrainingSettings, padding: Padding
) -> tuple[Sequences, Sequences, dict[str, SplitFacts]]:
    """Return the training and validation sequences of a tokenized corpus, and facts by split.

    If the corpus has no validation split, or with --validation_split, a share of the training
    sequences is held out: the end of a token stream, or randomly drawn examples. A corpus of one
    sequence holds out none, nor does --validation_split 0.

    Raises:
        UserError: the corpus or --validation_file is shorter than one sequence.
    """
    train = validation = Sequences.none(padding)
    facts: dict[str, SplitFacts] = {}
    if "train" in prepared["splits"]:
        train, facts["train"] = open_split(prepared, "train", data, padding)
    if "validation" in prepared["splits"] and data.validation_split is None:
        validation, facts["validation"] = open_split(prepared, "validation", data, padding)
    check_validation_file(validation, data)
    if not validation.num_sequences and "train" in facts:
        share, size = data.held_out_share, train.num_sequences
        count = max(1, size // 10 if share is None else int(size * share)) if share != 0 else 0
        count = min(count, max(0, size - 1))
        train, validation = train.hold_out(count, at_random=facts["train"]["kind"] != "text")
        facts["validation"] = {"blocks": count}
    # After the split, so that the same examples are held out with and without --packing.
    if data.packing:
        train, validation = train.pack(), validation.pack()
        facts["validation"]["blocks"] = validation.num_sequences
    if "train" in facts:
        train = train.take(data.num_samples or train.num_sequences)
        facts["train"]["blocks"] = train.num_sequences
        if facts["train"]["kind"] != "text":
            facts["train"]["padding_share"] = padding_share(
                train, training.seed, training.batch_size
            )
    return train, validation, facts


def check_validation_file(validation: Sequences, data: DataSettings) -> None:
    """Check that --validation_file, if there is one, has at least one sequence."""
    if not validation.num_sequences and data.validation_file:
        raise UserError(
            f"--validation_file {data.validation_file} has less than one sequence of "
            f"{validation.padding.seq_length} tokens: use another --seq_length, or another file."
        )


def padding_share(train: Sequences, seed: int, batch_size: int) -> float:
    """Return the share of padding in the micro-batches of the first epoch."""
    lengths = train.lengths[train.epoch_order(seed, epoch=1)]
    starts = np.arange(0, len(lengths), batch_size)
    longest, sizes = np.maximum.reduceat(lengths, starts), np.diff(starts, append=len(lengths))
    return round(1 - int(lengths.sum()) / int((sizes * train.padding.length(longest)).sum()), 4)


def open_split(
    prepared: TokenizedCorpus, name: str, data: DataSettings, padding: Padding
) -> tuple[Sequences, SplitFacts]:
    """Return all sequences of a split, and the facts about it for results.json.

    Raises:
        UserError: the training split is empty or shorter than one sequence.
    """
    split, length = prepared["splits"][name], padding.seq_length
    path, end_of_text = f"{prepared['folder']}/{name}", None
    facts: SplitFacts = {
        "kind": split["kind"],
        "formats": split["formats"],
        "rows": split["rows"],
        "tokens": split["tokens"],
        "sha256": split["sha256"],
        "tokens_sha256": split["tokens_sha256"],
        "truncated": 0,
        "skipped": split["empty"],
    }
    if split["kind"] in ("chat", "pair"):
        items = 4 * split["rows"]
        index = TokenFile(f"{path}.index.bin", "int64", items).read(0, items).reshape(-1, 4)
        ends = np.minimum(index[:, 1], index[:, 0] + length)
        usable = index[:, 2] < ends  # a target remains after truncation
        facts["truncated"] = int((usable & (index[:, 1] > ends)).sum())
        facts["skipped"] = int((~usable).sum())
        stops = (index[:, 3] > index[:, 0]) & (index[:, 3] <= ends)
        facts["trained_ends"] = int((usable & stops).sum())
        ranges = np.stack([index[:, 0], ends], axis=1)[usable]
    else:
        if data.packing and split["tokens"]:
            raise UserError(TEXT_IS_PACKED)
        end_of_text = prepared["end_of_text"] if data.isolates_documents else None
        starts = np.arange(split["tokens"] // length, dtype=np.int64) * length
        ranges = np.stack([starts, starts + length], axis=1)
    if name == "train" and not len(ranges):
        raise UserError(
            f"The corpus has {split['tokens']:,} tokens, less than one sequence with a target "
            f"within --seq_length {length}: use another --seq_length or more text."
        )
    sizes = TokenFile(f"{path}.bytes.bin", "float64", split["vocabulary"])
    file = TokenFile(f"{path}.bin", split["dtype"], split["tokens"], end_of_text, sizes)
    sequences = Sequences.of(file, ranges, padding)
    facts["blocks"] = sequences.num_sequences
    return sequences, facts
