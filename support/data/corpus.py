"""The training and validation sequences of one tokenized corpus."""

from typing import Any

import numpy as np

from support import console
from support.cluster.context import DistContext
from support.data import tokenize
from support.data.sequences import Padding, Sequences
from support.data.token_file import TokenFile
from support.errors import UserError
from support.settings.settings import Settings

TEXT_IS_PACKED = (
    "--packing is for conversations and pairs, and this corpus is text, whose sequences have no "
    "padding: use --isolate_documents."
)


def open_corpus(
    settings: Settings, ctx: DistContext, tokenizer: Any, name: str
) -> tuple[Sequences, Sequences, dict]:
    """Do what `opening.open_tokenized` does for the dataset `name`."""
    prepared = tokenize.tokenize_corpus(settings, ctx, tokenizer, name)
    train, validation, facts = split_sequences(
        prepared, settings, Padding.of(settings, ctx.device.type)
    )
    tokenize.print_splits(facts, tokenizer, "articles" if name == "wikitext" else "rows")
    if facts.get("train", {}).get("trained_ends") == 0:
        is_cut = prepared["splits"]["train"]["ended"] > 0
        tokenize.warn_of_no_end(tokenizer, facts["train"]["kind"], is_cut)
    if (
        not settings.training.eval
        and "kind" not in facts["validation"]
        and validation.num_sequences
    ):
        # They stay held out, so that runs with and without evaluations train on the same data.
        console.print0(
            "📚 --no_eval: the validation sequences are held out of the training data and not "
            "used: --validation_split 0 trains on them"
        )
    nothing = {"sha256": None, "tokens": 0, "blocks": 0, "kind": facts["validation"].get("kind")}
    found = {"validation": facts["validation"], "bad_rows": prepared["bad_rows"]}
    return train, validation, {"name": name, **facts.get("train", nothing), **found}


def split_sequences(
    prepared: dict, settings: Settings, padding: Padding
) -> tuple[Sequences, Sequences, dict]:
    """Return the training and validation sequences of a tokenized corpus, and facts by split.

    If the corpus has no validation split, or with --validation_split, a share of the training
    sequences is held out: the end of a token stream, or randomly drawn examples. A corpus of one
    sequence holds out none, nor does --validation_split 0.

    Raises:
        UserError: the corpus or --validation_file is shorter than one sequence.
    """
    train = validation = Sequences.none(padding)
    facts: dict[str, dict] = {}
    if "train" in prepared["splits"]:
        train, facts["train"] = open_split(prepared, "train", settings, padding)
    if "validation" in prepared["splits"] and settings.data.validation_split is None:
        validation, facts["validation"] = open_split(prepared, "validation", settings, padding)
    if not validation.num_sequences and settings.data.validation_file:
        raise UserError(
            f"--validation_file {settings.data.validation_file} has less than one sequence of "
            f"{settings.data.seq_length} tokens: use another --seq_length, or another file."
        )
    if not validation.num_sequences and "train" in facts:
        share, size = settings.data.held_out_share, train.num_sequences
        count = max(1, size // 10 if share is None else int(size * share)) if share != 0 else 0
        count = min(count, max(0, size - 1))
        train, validation = train.hold_out(count, at_random=facts["train"]["kind"] != "text")
        facts["validation"] = {"blocks": count}
    # After the split, so that the same examples are held out with and without --packing.
    if settings.data.packing:
        train, validation = train.pack(), validation.pack()
        facts["validation"]["blocks"] = validation.num_sequences
    if "train" in facts:
        train = train.take(settings.data.num_samples or train.num_sequences)
        facts["train"]["blocks"] = train.num_sequences
        if facts["train"]["kind"] != "text":
            facts["train"]["padding_share"] = padding_share(train, settings)
    return train, validation, facts


def padding_share(train: Sequences, settings: Settings) -> float:
    """Return the share of padding in the micro-batches of the first epoch."""
    lengths = train.lengths[train.epoch_order(settings.training.seed, epoch=1)]
    starts = np.arange(0, len(lengths), settings.training.batch_size)
    longest, sizes = np.maximum.reduceat(lengths, starts), np.diff(starts, append=len(lengths))
    return round(1 - int(lengths.sum()) / int((sizes * train.padding.length(longest)).sum()), 4)


def open_split(
    prepared: dict, name: str, settings: Settings, padding: Padding
) -> tuple[Sequences, dict]:
    """Return all sequences of a split, and the facts about it for results.json.

    Raises:
        UserError: the training split is empty or shorter than one sequence.
    """
    split, length = prepared["splits"][name], settings.data.seq_length
    path, end_of_text = f"{prepared['folder']}/{name}", None
    copied = ("kind", "formats", "rows", "tokens", "sha256", "tokens_sha256")
    facts = {key: split[key] for key in copied}
    facts |= {"truncated": 0, "skipped": split["empty"]}
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
        if settings.data.packing and split["tokens"]:
            raise UserError(TEXT_IS_PACKED)
        end_of_text = prepared["end_of_text"] if settings.data.isolates_documents else None
        starts = np.arange(split["tokens"] // length, dtype=np.int64) * length
        ranges = np.stack([starts, starts + length], axis=1)
    if name == "train" and not len(ranges):
        raise UserError(
            f"The corpus has {split['tokens']:,} tokens, less than one sequence with a target "
            f"within --seq_length {length}: use another --seq_length or more text."
        )
    file = TokenFile(f"{path}.bin", split["dtype"], split["tokens"], end_of_text)
    sequences = Sequences.of(file, ranges, padding)
    return sequences, {**facts, "blocks": sequences.num_sequences}
