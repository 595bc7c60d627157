"""The training and validation sequences of a run, and their micro-batches in one order.

The order is the same for any number of ranks and any strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from support import console
from support.cli.arguments import Arguments, global_batch, held_out_share, isolates_documents
from support.cli.checks import NEED_EVALUATIONS
from support.cluster.context import DistContext
from support.data import tokenize
from support.data.rows import evaluates_only
from support.data.sequences import MicroBatch, Padding, Sequences, mix
from support.errors import UserError
from support.files.atomic import digest_of_json
from support.train_state import NEW_RUN, TrainState
from support.units import IGNORED

NOTHING_TO_EVALUATE = (
    "There is nothing to evaluate on: a corpus of one sequence, or a stream without "
    "--validation_file"
)
TEXT_IS_PACKED = (
    "--packing is for conversations and pairs, and this corpus is text, whose sequences have no "
    "padding: use --isolate_documents."
)


def open_tokenized(
    args: Arguments, ctx: DistContext, tokenizer: Any
) -> tuple[Sequences, Sequences, dict]:
    """Tokenize the corpus, or find its tokens in the cache, and cut them into sequences.

    Returns:
        (training sequences, validation sequences, the dataset's entry in results.json).
    Raises:
        UserError: the corpus cannot be read, or is shorter than one sequence.
    """
    console.print0(f"⏳ Preparing the dataset {args.dataset}")
    if args.mixture and not (evaluates_only(args) and args.validation_file):
        return _open_mixture(args, ctx, tokenizer)
    return _open_dataset(args, ctx, tokenizer, args.dataset)


def _open_dataset(
    args: Arguments, ctx: DistContext, tokenizer: Any, name: str
) -> tuple[Sequences, Sequences, dict]:
    """Do what `open_tokenized` does for one dataset."""
    prepared = tokenize.tokenize_corpus(args, ctx, tokenizer, name)
    train, validation, facts = split_sequences(prepared, args, Padding.of(args, ctx.device.type))
    tokenize.print_splits(facts, tokenizer)
    nothing = {"sha256": None, "tokens": 0, "blocks": 0, "kind": facts["validation"].get("kind")}
    found = {"validation": facts["validation"], "bad_rows": prepared["bad_rows"]}
    return train, validation, {"name": name, **facts.get("train", nothing), **found}


def _open_mixture(
    args: Arguments, ctx: DistContext, tokenizer: Any
) -> tuple[Sequences, Sequences, dict]:
    """Do what `open_tokenized` does for several datasets."""
    # All training sequences of each, also with --eval_only.
    whole = args.replace(num_samples=None, eval_only=False)
    datasets, validations, entries = [], [], []
    for name, _ in args.mixture:
        console.print0(f"📂 {name}")
        train, validation, entry = _open_dataset(whole, ctx, tokenizer, name)
        datasets.append(train)
        validations.append(validation)
        entries.append(entry)
    weights = [Fraction(weight) for _, weight in args.mixture if weight]
    mixture = mix(datasets, weights)
    mixture = mixture.take(args.num_samples or mixture.num_sequences)
    for named, (_, count), entry in zip(args.mixture, mixture.shares, entries, strict=True):
        if not count:
            raise UserError(
                f"--dataset {named} has less than one sequence in an epoch of "
                f"{mixture.num_sequences}: change the weights, or use more data."
            )
        entry |= {"weight": named.weight, "blocks_per_epoch": count}
        share = count / mixture.num_sequences
        console.print0(f"📂 {named.name}: {count:,} sequences in an epoch ({share:.1%})")
    evaluated = validations[0] if args.validation_file else mix(validations)
    held_out = [entry["validation"].get("sha256") for entry in entries]
    kinds = {entry["kind"] for entry in entries}
    facts = {
        "name": args.dataset,
        "kind": kinds.pop() if len(kinds) == 1 else "mixed",
        "formats": list(dict.fromkeys(name for entry in entries for name in entry["formats"])),
        **{key: sum(e[key] for e in entries) for key in ("rows", "tokens", "truncated", "skipped")},
        "sha256": digest_of_json([[entry["sha256"], entry["weight"]] for entry in entries]),
        "blocks": mixture.num_sequences,
        "validation": {
            "blocks": evaluated.num_sequences,
            "sha256": digest_of_json(held_out) if any(held_out) else None,
        },
        "bad_rows": [row for entry in entries for row in entry.pop("bad_rows")],
        "datasets": entries,
    }
    return mixture, evaluated, facts


def split_sequences(
    prepared: dict, args: Arguments, padding: Padding
) -> tuple[Sequences, Sequences, dict]:
    """Return the training and validation sequences of a tokenized corpus, and facts by split.

    If the corpus has no validation split, or with --validation_split, a share of the training
    sequences is held out: the end of a token stream, or randomly drawn examples. A corpus of one
    sequence holds out none.

    Raises:
        UserError: the corpus or --validation_file is shorter than one sequence.
    """
    train = validation = Sequences.none(padding)
    facts: dict[str, dict] = {}
    if "train" in prepared["splits"]:
        train, facts["train"] = open_split(prepared, "train", args, padding)
    if "validation" in prepared["splits"] and args.validation_split is None:
        validation, facts["validation"] = open_split(prepared, "validation", args, padding)
    if not validation.num_sequences and args.validation_file:
        raise UserError(
            f"--validation_file {args.validation_file} has less than one sequence of "
            f"{args.seq_length} tokens: use another --seq_length, or another file."
        )
    if not validation.num_sequences and "train" in facts:
        share, size = held_out_share(args), train.num_sequences
        count = min(max(1, int(size * share) if share else size // 10), max(0, size - 1))
        train, validation = train.hold_out(count, at_random=facts["train"]["kind"] != "text")
        facts["validation"] = {"blocks": count}
    # After the split, so that the same examples are held out with and without --packing.
    if args.packing:
        train, validation = train.pack(), validation.pack()
        facts["validation"]["blocks"] = validation.num_sequences
    if "train" in facts:
        train = train.take(args.num_samples or train.num_sequences)
        facts["train"]["blocks"] = train.num_sequences
        if facts["train"]["kind"] != "text":
            facts["train"]["padding_share"] = padding_share(train, args)
    return train, validation, facts


def padding_share(train: Sequences, args: Arguments) -> float:
    """Return the share of padding in the micro-batches of the first epoch."""
    lengths = train.lengths[train.epoch_order(args.seed, epoch=1)]
    starts = np.arange(0, len(lengths), args.batch_size)
    longest, sizes = np.maximum.reduceat(lengths, starts), np.diff(starts, append=len(lengths))
    return round(1 - int(lengths.sum()) / int((sizes * train.padding.length(longest)).sum()), 4)


def open_split(
    prepared: dict, name: str, args: Arguments, padding: Padding
) -> tuple[Sequences, dict]:
    """Return all sequences of a split, and the facts about it for results.json.

    Raises:
        UserError: the training split is empty or shorter than one sequence.
    """
    split, length = prepared["splits"][name], args.seq_length
    path, end_of_text = f"{prepared['folder']}/{name}", None
    facts = {key: split[key] for key in ("kind", "formats", "rows", "tokens", "sha256")}
    facts |= {"truncated": 0, "skipped": split["empty"]}
    if split["kind"] in ("chat", "pair"):
        index = np.fromfile(f"{path}.index.bin", np.int64).reshape(-1, 3)
        ends = np.minimum(index[:, 1], index[:, 0] + length)
        usable = index[:, 2] < ends  # a target remains after truncation
        facts["truncated"] = int((usable & (index[:, 1] > ends)).sum())
        facts["skipped"] = int((~usable).sum())
        ranges = np.stack([index[:, 0], ends], axis=1)[usable]
    else:
        if args.packing and split["tokens"]:
            raise UserError(TEXT_IS_PACKED)
        end_of_text = prepared["end_of_text"] if isolates_documents(args) else None
        starts = np.arange(split["tokens"] // length, dtype=np.int64) * length
        ranges = np.stack([starts, starts + length], axis=1)
    if name == "train" and not len(ranges):
        raise UserError(
            f"The corpus has {split['tokens']:,} tokens, less than one sequence with a target "
            f"within --seq_length {length}: use another --seq_length or more text."
        )
    sequences = Sequences.of((f"{path}.bin", split["dtype"], end_of_text), ranges, padding)
    return sequences, {**facts, "blocks": sequences.num_sequences}


def check_validation(validation: Sequences, args: Arguments) -> None:
    """Check that there is something to evaluate on if a flag needs evaluations."""
    needed = [flag for flag in NEED_EVALUATIONS if getattr(args, flag)]
    if needed and not validation.num_sequences:
        raise UserError(f"{NOTHING_TO_EVALUATE}, and --{needed[0]} needs it.")


# -------------------------------------------------------------------------------------------- order


def steps_of(num_sequences: int, batch: int) -> int:
    """Return the number of optimizer steps, of which the last may be smaller."""
    return -(-num_sequences // batch)


def total_steps(
    args: Arguments, world_size: int, num_sequences: int, step: int = 0, samples: int = 0
) -> int:
    """Return the number of optimizer steps of the whole run, including those before a resume.

    Args:
        num_sequences: sequences in an epoch.
        step, samples: optimizer steps made before the resume, and the sequences used in them.
    """
    if args.epochs is None and args.max_steps:
        return args.max_steps
    batch = global_batch(args, world_size)
    epochs_left, rest = divmod(max(0, (args.epochs or 1) * num_sequences - samples), num_sequences)
    total = step + epochs_left * steps_of(num_sequences, batch) + steps_of(rest, batch)
    return min(total, args.max_steps or total)


@dataclass
class StepBatch:
    """The step batch of one rank: its micro-batches of one optimizer step."""

    micro_batches: list[MicroBatch]  # of batch_size sequences each
    tokens: int  # number of tokens in them, without padding
    state: Any = None  # with --streaming the position of the stream after this step


def train_state(counters: dict, train: Any, args: Arguments, world_size: int) -> TrainState:
    """Return the state of training from the counters of a checkpoint, or from NEW_RUN.

    Args:
        train: training sequences, or a Stream.
    """
    sequences = max(1, train.num_sequences)  # --eval_only may have none
    steps = total_steps(args, world_size, sequences, counters["step"], counters["samples"])
    state = TrainState(
        total_steps=0 if args.eval_only else steps,
        num_sequences=sequences,
        global_batch=global_batch(args, world_size),
        evaluates=args.eval,
        eval_every=args.eval_every,
        patience=args.early_stopping_patience,
        first_step=counters["step"],
        **{name: counters[name] for name in NEW_RUN},
    )
    if state.tokens is None:  # checkpoints of the first versions did not count tokens
        state.tokens = state.samples * args.seq_length
    return state


def fill_up(sequences: Sequences, indices: np.ndarray, rows: int) -> MicroBatch:
    """Read a micro-batch [rows, length]; missing sequences become rows that the loss ignores."""
    inputs, labels, positions = sequences.read(indices)
    padding = (0, 0, 0, rows - len(indices))
    if positions is not None:
        positions = F.pad(positions, padding)
    return F.pad(inputs, padding), F.pad(labels, padding, value=IGNORED), positions


def seed_dropout(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed the random numbers of dropout, which differ for each rank and micro-batch.

    A resumed run draws the same ones as an uninterrupted run.
    """
    numbers = np.random.SeedSequence([seed, step, micro_step, rank])
    torch.manual_seed(int(numbers.generate_state(1, np.uint64)[0]) >> 1)


def with_bar(steps: Iterator[StepBatch], what: str, count: int) -> Iterator[StepBatch]:
    """Yield the step batches, and show a progress bar of `count` of them."""
    with console.bar(what, count, "batch") as bar:
        for step_batch in steps:
            yield step_batch
            bar.update()


def copy_ahead(steps: Iterator[StepBatch], device: torch.device) -> Iterator[StepBatch]:
    """Read one step batch ahead and copy it to a GPU without blocking, while the GPU computes."""

    def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.pin_memory().to(device, non_blocking=True)

    ahead = None
    for step_batch in steps:
        if device.type == "cuda":
            on_device = [tuple(map(copy, micro)) for micro in step_batch.micro_batches]
            step_batch.micro_batches = on_device  # type: ignore[assignment]
        if ahead:
            yield ahead
        ahead = step_batch
    if ahead:
        yield ahead
