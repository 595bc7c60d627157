"""Sequences of a tokenized corpus and their micro-batches, in one order for any number of ranks.

A sequence is a slice of `seq_length` tokens of one long token stream, or an example (a
conversation, or a prompt and its completion) that is truncated to `seq_length` and has a loss mask,
or with --packing several examples. Sequences are read from disk when they are needed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from support.cli.arguments import global_batch, held_out_share, isolates_documents
from support.cli.conflicts import NEED_EVALUATIONS
from support.cluster.context import DistContext
from support.data import tokenize
from support.data.mixture import Mixture, mixture_facts
from support.data.packing import pack
from support.errors import UserError
from support.labels import IGNORED
from support.train_state import NEW_RUN, TrainState

ROW_MULTIPLE = 8  # examples are padded to a multiple of this length, which suits matrix units


NOTHING_TO_EVALUATE = (
    "There is nothing to evaluate on: a corpus of one sequence, or a stream without "
    "--validation_file"
)
TEXT_IS_PACKED = (
    "--packing is for conversations and pairs, and this corpus is text, whose sequences have no "
    "padding: use --isolate_documents."
)
# The flag would cost a mask, which isolates nothing here.
EXAMPLES_ARE_ISOLATED = (
    "--isolate_documents is for text, and each conversation or pair is a sequence of its own: "
    "leave the flag out, or use --packing."
)


# ---------------------------------------------------------------------------------------- sequences

# Inputs, labels, and the positions of the tokens in their documents (None: not isolated), each
# int64 of shape [sequences, length].
MicroBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class TokenFile:
    """A stream of token ids on disk, cut into sequences of `seq_length` tokens."""

    # Raw little-endian ids, and their type ("uint16" or "uint32").
    path: str
    dtype: str
    seq_length: int
    # Number of the first sequence of this split, and how many it has.
    first: int
    num_sequences: int
    # Id of the token that ends a document, if documents are isolated; else None.
    end_of_text: int | None = None

    def read(self, indices: np.ndarray) -> MicroBatch:
        """Return the sequences `indices`.

        Each call maps the file again: the pages of a mapping that stays open would count as memory
        of this process, and a shuffled epoch touches all of them.
        """
        stream = np.memmap(self.path, dtype=self.dtype, mode="r")
        inputs = torch.empty(len(indices), self.seq_length, dtype=torch.int64)
        for row, index in zip(inputs.numpy(), indices, strict=True):
            start = (self.first + int(index)) * self.seq_length
            row[:] = stream[start : start + self.seq_length]
        return label_text(inputs, self.end_of_text)

    def tokens(self, indices: np.ndarray) -> int:
        """Return the number of tokens in these sequences."""
        return len(indices) * self.seq_length

    def take(self, count: int) -> TokenFile:
        """Return the first `count` sequences."""
        return replace(self, num_sequences=min(count, self.num_sequences))

    def hold_out(self, count: int) -> tuple[TokenFile, TokenFile]:
        """Return all sequences but the last `count`, and these."""
        kept = self.num_sequences - count
        return self.take(kept), replace(self, first=self.first + kept, num_sequences=count)


@dataclass(frozen=True)
class ExampleFile:
    """Examples on disk, one sequence each, truncated to `seq_length` tokens.

    Examples that are read in one call are padded to the longest of them.
    """

    # `<split>.bin` holds the ids of all examples, `<split>.learned.bin` one byte per token, 1 for a
    # valid token (one that the loss counts), and `<split>.rows.bin` two int64 per example: its end
    # in `<split>.bin`, and the index of its first target, a valid token other than the first token
    # of the sequence.
    folder: str
    split: str
    dtype: str
    seq_length: int
    rows: np.ndarray  # numbers of the examples that belong to this split
    fixed: bool  # always pad to seq_length, because each new length needs another compilation

    @property
    def num_sequences(self) -> int:
        """The number of sequences, one for each example."""
        return len(self.rows)

    def _bounds(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the start of each example in the file, and how many of its tokens are read."""
        table = np.memmap(f"{self.folder}/{self.split}.rows.bin", dtype=np.int64, mode="r")
        ends = table[::2]
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        starts = np.where(rows > 0, ends[rows - 1], 0)
        return starts, np.minimum(ends[rows] - starts, self.seq_length)

    def read(self, indices: np.ndarray) -> MicroBatch:
        """Return the examples `indices`.

        No attention mask is needed: the padding comes after all valid tokens, and in a causal model
        no token attends to a later one.
        """
        return stack_examples(self.examples(indices), self.seq_length, self.fixed)

    def examples(self, indices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (ids, labels) of the examples `indices`, each int64 [its tokens]."""
        ids = np.memmap(f"{self.folder}/{self.split}.bin", dtype=self.dtype, mode="r")
        learned = np.memmap(f"{self.folder}/{self.split}.learned.bin", dtype=np.uint8, mode="r")
        rows = []
        for start, length in zip(*self._bounds(indices), strict=True):
            part = slice(start, start + length)
            example = ids[part].astype(np.int64)
            rows.append((example, np.where(learned[part], example, IGNORED)))
        return rows

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of each of these examples, without padding."""
        return self._bounds(indices)[1]

    def tokens(self, indices: np.ndarray) -> int:
        """Return the number of tokens in these examples, without padding."""
        return int(self.lengths(indices).sum())

    def take(self, count: int) -> ExampleFile:
        """Return the first `count` examples."""
        return replace(self, rows=self.rows[:count])

    def hold_out(self, count: int) -> tuple[ExampleFile, ExampleFile]:
        """Return all examples but `count` that are drawn at random, the same in each run; these."""
        order = np.random.default_rng(0).permutation(self.rows)
        kept, held_out = np.sort(order[count:]), np.sort(order[:count])
        return replace(self, rows=kept), replace(self, rows=held_out)


@dataclass(frozen=True)
class PackedFile:
    """Examples on disk, several in a sequence; no token attends to another example."""

    file: ExampleFile
    members: np.ndarray  # of the sequences, one after the other; see `packing.pack`
    ends: np.ndarray

    @classmethod
    def of(cls, file: ExampleFile) -> PackedFile:
        """Pack all examples of a file."""
        lengths = file.lengths(np.arange(file.num_sequences))
        return cls(file, *pack(lengths, file.seq_length))

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return len(self.ends)

    def _members(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return the examples of each of these sequences."""
        return [
            self.members[self.ends[index - 1] if index else 0 : self.ends[index]]
            for index in indices
        ]

    def read(self, indices: np.ndarray) -> MicroBatch:
        """Return the sequences `indices`."""
        rows = [join_examples(self.file.examples(members)) for members in self._members(indices)]
        return stack_examples(rows, self.file.seq_length, self.file.fixed, packed=True)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of each of these sequences, without padding."""
        of_examples = self.file.lengths(self.members[: self.ends[-1]])
        # reduceat adds up from each begin to the next one; a sequence begins where another ends.
        return np.add.reduceat(of_examples, np.append(0, self.ends[:-1]))[indices]

    def tokens(self, indices: np.ndarray) -> int:
        """Return the number of tokens in these sequences, without padding."""
        return sum(self.file.tokens(members) for members in self._members(indices))

    def take(self, count: int) -> PackedFile:
        """Return the first `count` sequences."""
        return replace(self, ends=self.ends[:count])


Sequences = TokenFile | ExampleFile | PackedFile | Mixture


def label_text(inputs: torch.Tensor, end_of_text: int | None) -> MicroBatch:
    """Return sequences of a token stream with their labels and positions.

    The end-of-text token belongs to the document before it. The first token of a document has no
    loss if documents are isolated, because no token of its document precedes it.

    Args:
        inputs: int64 [sequences, length].
        end_of_text: see `TokenFile`.
    """
    labels = inputs.clone()
    if end_of_text is None:
        return inputs, labels, None
    ends = inputs == end_of_text
    place = torch.arange(inputs.shape[1])
    # After the newest end before the token; the first token of a sequence begins a document, too.
    begins = F.pad((ends * (place + 1))[:, :-1], (1, 0)).cummax(1).values
    positions = place - begins
    return inputs, labels.masked_fill_(positions == 0, IGNORED), positions


def join_examples(
    examples: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join (ids, labels) of examples to (ids, labels, positions) of one sequence.

    The first token of an example has no loss, as in a sequence of its own.
    """
    positions = np.concatenate([np.arange(len(ids)) for ids, _ in examples])
    ids, labels = (np.concatenate(parts) for parts in zip(*examples, strict=True))
    return ids, np.where(positions == 0, IGNORED, labels), positions


def stack_examples(rows: list, seq_length: int, fixed: bool, packed: bool = False) -> MicroBatch:
    """Stack examples of different lengths into one micro-batch, padded with ignored tokens.

    Args:
        rows: (ids, labels) of each example, or with `packed` the result of `join_examples` for each
            sequence, with at most `seq_length` tokens.
        fixed: pad to `seq_length`; otherwise to the longest example, rounded up to a
            multiple of ROW_MULTIPLE.
        packed: also return positions. Each token of the padding is at 0, a document of its own.
    """
    longest = max((len(row[0]) for row in rows), default=1)
    width = padded_length(longest, seq_length, fixed)
    inputs = torch.zeros(len(rows), width, dtype=torch.int64)
    tensors = [inputs, torch.full_like(inputs, IGNORED), torch.zeros_like(inputs)]
    for number, row in enumerate(rows):
        for tensor, values in zip(tensors, row, strict=False):
            tensor[number, : len(values)] = torch.from_numpy(values)
    return inputs, tensors[1], tensors[2] if packed else None


def padded_length(longest, seq_length: int, fixed: bool):
    """Return the length of micro-batches whose longest sequences have `longest` tokens."""
    rounded_up = -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE
    return seq_length if fixed else np.minimum(seq_length, rounded_up)


def padding_share(file: ExampleFile | PackedFile, args) -> float:
    """Return the share of padding in the micro-batches of the first epoch."""
    lengths = file.lengths(epoch_order(file.num_sequences, args.seed, epoch=1))
    starts = np.arange(0, len(lengths), args.batch_size)
    longest, sizes = np.maximum.reduceat(lengths, starts), np.diff(starts, append=len(lengths))
    padded = sizes * padded_length(longest, args.seq_length, one_length(args))
    return round(1 - int(lengths.sum()) / int(padded.sum()), 4)


# ------------------------------------------------------------------------------------------- splits


def open_tokenized(args, ctx: DistContext, tokenizer) -> tuple[Sequences, Sequences, dict]:
    """Tokenize the corpus, or find its tokens in the cache, and cut them into sequences.

    Returns:
        (training sequences, validation sequences, the dataset's entry in results.json).
    Raises:
        UserError: the corpus cannot be read, or is shorter than one sequence.
    """
    if args.mixture:
        return _open_mixture(args, ctx, tokenizer)
    return _open_dataset(args, ctx, tokenizer, args.dataset)


def _open_dataset(args, ctx: DistContext, tokenizer, name: str) -> tuple[Any, Any, dict]:
    """Do what `open_tokenized` does for one dataset."""
    tokens = tokenize.tokenize_corpus(args, ctx, tokenizer, name)
    train, validation, facts = split_sequences(tokens, args)
    tokenize.print_splits(ctx, args, facts, tokenizer)
    entry = {"name": name, **facts["train"], "validation": facts["validation"]}
    return train, validation, {**entry, "bad_rows": tokens["bad_rows"]}


def _open_mixture(args, ctx: DistContext, tokenizer) -> tuple[Mixture, Any, dict]:
    """Do what `open_tokenized` does for several datasets.

    The evaluation uses the validation sequences of each dataset once, or only --validation_file.
    """
    parts, validations, entries = [], [], []
    whole = args.replace(num_samples=None)
    for name, _ in args.mixture:
        ctx.console.print0(f"📂 {name}")
        train, validation, entry = _open_dataset(whole, ctx, tokenizer, name)
        parts.append(train)
        validations.append(validation)
        entries.append(entry)
    weights = [Fraction(weight) for _, weight in args.mixture if weight]
    mixture = Mixture.of(parts, weights)
    mixture = mixture.take(args.num_samples or mixture.num_sequences)
    if unused := [str(d) for d, n in zip(args.mixture, mixture.counts, strict=True) if not n]:
        raise UserError(
            f"--dataset {unused[0]} has less than one sequence in an epoch of "
            f"{mixture.num_sequences}: change the weights, or use more data."
        )
    for name, count, entry in zip(args.mixture, mixture.counts, entries, strict=True):
        entry |= {"weight": name.weight, "blocks_per_epoch": count}
        share = count / mixture.num_sequences
        ctx.console.print0(f"📂 {name.name}: {count:,} sequences in an epoch ({share:.1%})")
    evaluated = validations[0] if args.validation_file else Mixture.of(validations)
    return mixture, evaluated, mixture_facts(args.dataset, entries, mixture, evaluated)


def split_sequences(prepared: dict, args) -> tuple[Sequences, Sequences, dict]:
    """Return the training and validation sequences of a tokenized corpus.

    If the corpus has no validation split, or with --validation_split, a share of the training
    sequences is held out: the end of a token stream, or randomly drawn examples. A corpus of one
    sequence holds out none.

    Args:
        args: --seq_length, --num_samples, --validation_split, --validation_split_percentage,
            --validation_file, and see `one_length`.
    Returns:
        (training sequences, validation sequences, {"train", "validation": facts of `open_split`}).
    Raises:
        UserError: the corpus or --validation_file is shorter than one sequence.
    """
    train, train_facts = open_split(prepared, "train", args)
    validation: Sequences = nothing(args)
    if "validation" in prepared["splits"] and args.validation_split is None:
        validation, validation_facts = open_split(prepared, "validation", args)
    if not validation.num_sequences:
        if args.validation_file:
            raise UserError(
                f"--validation_file {args.validation_file} has less than one sequence of "
                f"{args.seq_length} tokens: use another --seq_length, or another file."
            )
        share = held_out_share(args)
        count = int(train.num_sequences * share) if share else train.num_sequences // 10
        train, validation = train.hold_out(min(max(1, count), train.num_sequences - 1))
        validation_facts = {"blocks": validation.num_sequences}
    # After the split, so that the same examples are held out with and without --packing.
    if args.packing:
        train, validation = PackedFile.of(train), packed_validation(validation)
        validation_facts["blocks"] = validation.num_sequences
    if args.num_samples:
        train = train.take(args.num_samples)
    train_facts["blocks"] = train.num_sequences
    if not isinstance(train, TokenFile):
        train_facts["padding_share"] = padding_share(train, args)
    return train, validation, {"train": train_facts, "validation": validation_facts}


def packed_validation(validation: Sequences) -> Sequences:
    """Pack validation examples; a corpus of one example holds out none."""
    return PackedFile.of(validation) if isinstance(validation, ExampleFile) else validation


def one_length(args) -> bool:
    """Return whether all examples are padded to --seq_length."""
    # --compile compiles each length anew; --simulate_gpus must show the largest memory use.
    return bool(args.compile or args.simulate_gpus)


def nothing(args) -> TokenFile:
    """Return a TokenFile without sequences."""
    return TokenFile("", "uint16", args.seq_length, 0, 0)


def open_split(prepared: dict, name: str, args) -> tuple[Sequences, dict]:
    """Return all sequences of a split, and facts about it.

    Returns:
        (file, {"kind", "formats", "rows", "tokens", "sha256", "truncated", "skipped", "blocks"}),
        where "truncated", "skipped" and "blocks" count examples that are cut to --seq_length, rows
        that are not used, and sequences.
    Raises:
        UserError: the training split is empty or shorter than one sequence.
    """
    folder, dtype, length = prepared["folder"], prepared["dtype"], args.seq_length
    split = prepared["splits"][name]
    facts = {key: split[key] for key in ("kind", "formats", "rows", "tokens", "sha256")}
    facts |= {"truncated": 0, "skipped": split["empty"]}
    if split["kind"] in ("chat", "pair"):
        if args.isolate_documents and not (args.packing or args.mixture):
            raise UserError(EXAMPLES_ARE_ISOLATED)
        table = np.fromfile(f"{folder}/{name}.rows.bin", dtype=np.int64).reshape(-1, 2)
        lengths = np.diff(table[:, 0], prepend=0)
        usable = table[:, 1] < np.minimum(lengths, length)  # a target remains after truncation
        facts["truncated"] = int((usable & (lengths > length)).sum())
        facts["skipped"] = int((~usable).sum())
        file = ExampleFile(folder, name, dtype, length, np.flatnonzero(usable), one_length(args))
        problem = f"No example has a target within --seq_length {length}: use a larger one."
    else:
        end_of_text = prepared["end_of_text"] if isolates_documents(args) else None
        file = TokenFile(
            f"{folder}/{name}.bin", dtype, length, 0, split["tokens"] // length, end_of_text
        )
        problem = (
            f"The corpus has {split['tokens']:,} tokens, less than one sequence of {length}: "
            "use a smaller --seq_length or more text."
        )
    if args.packing and split["kind"] == "text" and split["tokens"]:
        raise UserError(TEXT_IS_PACKED)
    if name == "train" and not split["tokens"]:
        raise UserError("The corpus is empty: it has no row that can be used.")
    if name == "train" and not file.num_sequences:
        raise UserError(problem)
    return file, {**facts, "blocks": file.num_sequences}


# -------------------------------------------------------------------------------------------- order


def check_validation(validation: Sequences, args) -> None:
    """Check that there is something to evaluate on if a flag needs evaluations."""
    needed = [flag for flag in NEED_EVALUATIONS if getattr(args, flag)]
    if needed and not validation.num_sequences:
        raise UserError(f"{NOTHING_TO_EVALUATE}, and --{needed[0]} needs it.")


def epoch_order(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the sequences, the same on every rank: int64 [num_sequences]."""
    return np.random.default_rng([seed, epoch]).permutation(num_sequences)


def steps_of(num_sequences: int, batch: int) -> int:
    """Return the number of optimizer steps, of which the last may be smaller."""
    return -(-num_sequences // batch)


def total_steps(args, world_size: int, num_sequences: int, step: int = 0, samples: int = 0) -> int:
    """Return the number of optimizer steps of the whole run, including those before a resume.

    Args:
        args: --epochs, --max_steps (one epoch if neither is given), and the flags that determine
            the global batch size.
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

    batches: list[MicroBatch]  # micro-batches of batch_size sequences
    tokens: int  # number of tokens in them, without padding
    # With --streaming a `streaming.Place`, the position of the stream after this step; otherwise
    # None.
    state: Any = None


def step_batches(
    file: Sequences,
    order: np.ndarray | range,
    batch_size: int,
    accumulation: int,
    rank: int,
    world_size: int,
) -> Iterator[StepBatch]:
    """Yield the step batch of one rank for each optimizer step.

    The order is cut into global batches of batch_size × world_size × accumulation sequences. The
    number of ranks therefore changes which rank computes a sequence, but never the step in which it
    is used. Every micro-batch has the same number of rows on every rank: if there are too few
    sequences, it is padded with rows whose labels are all ignored. These rows add nothing to the
    loss or the gradient, but every rank takes part in every collective.

    Args:
        order: sequence numbers in the order of this epoch.
        batch_size, accumulation: sequences in a micro-batch of one rank, and micro-batches in a
            step.
    """
    all_ranks_batch = batch_size * world_size
    for start in range(0, len(order), all_ranks_batch * accumulation):
        step_order = order[start : start + all_ranks_batch * accumulation]
        rank_shares = [
            np.array_split(step_order[offset : offset + all_ranks_batch], world_size)[rank]
            for offset in range(0, len(step_order), all_ranks_batch)
        ]
        yield StepBatch(
            [fill_up(file, indices, batch_size) for indices in rank_shares],
            sum(map(file.tokens, rank_shares)),
        )


def train_state(counters: dict, train, args, world_size: int) -> TrainState:
    """Return the state of training from the counters of a checkpoint, or from NEW_RUN."""
    sequences = train.num_sequences
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


def rest_of_epoch(train, state: TrainState, args, ctx: DistContext) -> Iterator[StepBatch]:
    """Iterate over this rank's step batches of the rest of an epoch, on the device.

    Args:
        state: the epoch, which seeds the order of the sequences, and how many of them were trained
            on before a resume or an evaluation.
    """
    if args.streaming:
        return train.step_batches(ctx.device)
    if isinstance(train, Mixture):
        order = train.epoch_order(args.seed, state.epoch)
    else:
        order = epoch_order(train.num_sequences, args.seed, state.epoch)
    order = order[state.position :]
    accumulation = args.gradient_accumulation_steps
    batches = step_batches(train, order, args.batch_size, accumulation, ctx.rank, ctx.world_size)
    return copy_ahead(batches, ctx.device)


def evaluation_batches(validation, args, ctx: DistContext) -> tuple[Iterator, int]:
    """Return this rank's micro-batches of an evaluation, and how many there are.

    Args:
        args: --eval_batch_size, or else --batch_size; --eval_samples, or else --num_samples,
            limits the sequences.
    """
    limit = args.eval_samples or args.num_samples or validation.num_sequences
    validation = validation.take(limit)
    order = np.arange(validation.num_sequences)
    batch_size = args.eval_batch_size or args.batch_size
    steps = step_batches(validation, order, batch_size, 1, ctx.rank, ctx.world_size)
    batches = (step.batches[0] for step in copy_ahead(steps, ctx.device))
    return batches, steps_of(len(order), batch_size * ctx.world_size)


def fill_up(file: Sequences, indices: np.ndarray, rows: int) -> MicroBatch:
    """Read a micro-batch [rows, length]; missing sequences become rows that the loss ignores."""
    inputs, labels, positions = file.read(indices)
    padding = (0, 0, 0, rows - len(indices))
    if positions is not None:
        positions = F.pad(positions, padding)
    return F.pad(inputs, padding), F.pad(labels, padding, value=IGNORED), positions


def seed_dropout(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed the random numbers of dropout with (seed, step, micro-step, rank).

    Every rank and micro-batch draws different numbers, and a resumed run draws the same ones as an
    uninterrupted run.
    """
    numbers = np.random.SeedSequence([seed, step, micro_step, rank])
    torch.manual_seed(int(numbers.generate_state(1, np.uint64)[0]) >> 1)


def copy_ahead(steps: Iterator, device: torch.device) -> Iterator:
    """Read one step batch ahead and copy it to a GPU without blocking, while the GPU computes."""

    def copied(step_batch):
        if device.type == "cuda":
            step_batch.batches = [
                tuple(
                    t if t is None else t.pin_memory().to(device, non_blocking=True) for t in micro
                )
                for micro in step_batch.batches
            ]
        return step_batch

    # The second of each pair is the one ahead.
    for step_batch, _ in itertools.pairwise(itertools.chain(map(copied, steps), [None])):
        yield step_batch


class ReadAhead:
    """An iterator that reads `steps` in its own thread, in order.

    Up to `depth` items wait for the consumer. An error of `steps` is raised in the consumer's
    thread, at the position of the item that it replaces. Nothing is read before the first item is
    wanted, because a stream may have to be resumed before.
    """

    def __init__(self, steps: Iterator, depth: int):
        self._steps, self._depth, self._closed = steps, depth, False
        self._thread = ThreadPoolExecutor(1, "read ahead")
        self._items: deque[Future] = deque()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        while len(self._items) <= self._depth:
            self._items.append(self._thread.submit(next, self._steps))
        return self._items.popleft().result()

    def close(self, seconds: float = 30) -> None:
        """Stop reading, and wait some seconds for the item in progress: a network may hang."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait([item for item in self._items if not item.cancelled()], seconds)
