"""From a tokenised corpus to training blocks, served in one order for any number of ranks.

A block is a slice of `seq_length` tokens of one long stream, or an example (a conversation, or a
prompt and its completion) that is cut to `seq_length` and has a mask of what is learned. It is read
when it is needed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from support.cli.flags import global_batch
from support.errors import UserError

ROW_MULTIPLE = 8  # examples are filled up to a multiple of this; matrix units like it
IGNORED = -100  # label of a token that does not count, as in PyTorch's cross_entropy


# ------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class TokenFile:
    """A stream of token ids on disk, cut into blocks of `seq_length`.

    Attributes:
        path: raw little-endian ids.
        dtype: "uint16", or "uint32" for vocabularies of more than 65,536 entries.
        seq_length: tokens in a block.
        first, blocks: the range of blocks that belongs to this split.
    """

    path: str
    dtype: str
    seq_length: int
    first: int
    blocks: int

    def read(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks `indices` as (inputs, labels), both int64 of shape [len(indices), seq_length].

        The file is mapped anew for each call: pages of a mapping that stays open would count as
        this process's memory, and a shuffled epoch touches all of them.
        """
        stream = np.memmap(self.path, dtype=self.dtype, mode="r")
        rows = np.empty((len(indices), self.seq_length), dtype=np.int64)
        for row, start in zip(
            rows, (self.first + np.asarray(indices, dtype=np.int64)) * self.seq_length, strict=True
        ):
            row[:] = stream[start : start + self.seq_length]
        inputs = torch.from_numpy(rows)
        return inputs, inputs.clone()

    def tokens(self, indices: np.ndarray) -> int:
        """Tokens in these blocks."""
        return len(indices) * self.seq_length


@dataclass(frozen=True)
class ExampleFile:
    """Examples on disk, a block each: cut to `seq_length`, and filled up to the longest that is
    read with them.

    Attributes:
        folder, split, dtype: `<split>.bin` holds the ids of all, `<split>.learned.bin` a byte a
            token, 1 where it is learned, and `<split>.rows.bin` two int64 an example: where it
            ends, and which of its tokens is the first that is learned.
        seq_length: tokens in a block at most.
        rows: numbers of the examples that belong to this split.
        fixed: fill up to seq_length always; another length would be another compilation.
    """

    folder: str
    split: str
    dtype: str
    seq_length: int
    rows: np.ndarray
    fixed: bool

    @property
    def blocks(self) -> int:
        """One for each example."""
        return len(self.rows)

    def _bounds(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where these examples begin, and how many tokens of each are read."""
        ends = np.memmap(f"{self.folder}/{self.split}.rows.bin", dtype=np.int64, mode="r").reshape(
            -1, 2
        )[:, 0]
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        starts = np.where(rows > 0, ends[rows - 1], 0)
        return starts, np.minimum(ends[rows] - starts, self.seq_length)

    def read(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Examples `indices` as (inputs, labels), both int64 of shape [len(indices), length].

        What fills a row up comes after all that is learned, so that no attention mask is needed: no
        token sees a later one.
        """
        ids = np.memmap(f"{self.folder}/{self.split}.bin", dtype=self.dtype, mode="r")
        learned = np.memmap(f"{self.folder}/{self.split}.learned.bin", dtype=np.uint8, mode="r")
        parts = [
            slice(start, start + length)
            for start, length in zip(*self._bounds(indices), strict=True)
        ]
        rows = [
            (ids[part], np.where(learned[part], ids[part].astype(np.int64), IGNORED))
            for part in parts
        ]
        return stack_examples(rows, self.seq_length, self.fixed)

    def tokens(self, indices: np.ndarray) -> int:
        """Tokens in these examples, without what fills them up."""
        return int(self._bounds(indices)[1].sum())


def stack_examples(rows: list, seq_length: int, fixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples (ids, labels) of several lengths as (inputs, labels), both int64 [rows, length];
    filled up with what is ignored.

    Args:
        rows: of at most `seq_length` tokens each.
        fixed: as long as `seq_length`; otherwise as the longest of them.
    """
    longest = max((len(ids) for ids, _ in rows), default=1)
    width = seq_length if fixed else min(seq_length, -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE)
    inputs = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORED)
    for row, (ids, wanted) in enumerate(rows):
        inputs[row, : len(ids)] = torch.from_numpy(np.asarray(ids, dtype=np.int64))
        labels[row, : len(ids)] = torch.from_numpy(np.asarray(wanted, dtype=np.int64))
    return inputs, labels


# ------------------------------------------------------------------------------------------- splits


def split_blocks(
    prepared: dict, args
) -> tuple[TokenFile | ExampleFile, TokenFile | ExampleFile, dict]:
    """The training and validation blocks of a tokenised corpus.

    A corpus without a validation split, or any with --validation_split, gives up a share for it:
    the end of a stream of text, or examples drawn at random, always the same ones. A corpus of one
    block keeps it.
    Args:
        prepared: what `tokens.tokenize_once` returned.
        args: --seq_length, --num_samples, --validation_split; --compile and --simulate_gpus want
            one shape of blocks.
    Returns:
        Blocks to train on, blocks to evaluate on, and the facts of each split (train, validation),
        see `open_split`.
    Raises:
        UserError: the corpus is shorter than one block.
    """
    train, facts = open_split(prepared, "train", args)
    facts, validation = {"train": facts}, nothing(args)
    if "validation" in prepared["splits"] and args.validation_split is None:
        validation, facts["validation"] = open_split(prepared, "validation", args)
    if not validation.blocks:
        if args.validation_file:
            raise UserError(
                f"--validation_file {args.validation_file} has less than one block of {args.seq_length} tokens: "
                "use another --seq_length, or another file."
            )
        share = (
            int(train.blocks * args.validation_split)
            if args.validation_split
            else train.blocks // 10
        )
        train, validation = _hold_out(train, min(max(1, share), train.blocks - 1))
        facts["validation"] = {"blocks": validation.blocks}
    train = _first(train, args.num_samples)
    facts["train"]["blocks"] = train.blocks
    return train, validation, facts


def one_length(args) -> bool:
    """Whether examples are filled up to --seq_length: for the compiler, and for a simulation, which
    is to show the most.
    """
    return bool(args.compile or args.simulate_gpus)


def nothing(args) -> TokenFile:
    """No blocks at all."""
    return TokenFile("", "uint16", args.seq_length, 0, 0)


def open_split(prepared: dict, name: str, args) -> tuple[TokenFile | ExampleFile, dict]:
    """All blocks of a split, and its kind, rows, tokens, sha256, blocks, truncated, skipped.

    Raises:
        UserError: the split that is trained on is shorter than one block.
    """
    folder, dtype, found, length = (
        prepared["folder"],
        prepared["dtype"],
        prepared["splits"][name],
        args.seq_length,
    )
    counts = {key: found[key] for key in ("kind", "rows", "tokens", "sha256")} | {
        "truncated": 0,
        "skipped": found["empty"],
    }
    advice = "a smaller --seq_length or more text"
    if found["kind"] in ("chat", "pair"):
        table = np.fromfile(f"{folder}/{name}.rows.bin", dtype=np.int64).reshape(-1, 2)
        lengths = np.diff(table[:, 0], prepend=0)
        usable = np.maximum(table[:, 1], 1) < np.minimum(
            lengths, length
        )  # something learned is left of it
        counts["truncated"], counts["skipped"] = (
            int((usable & (lengths > length)).sum()),
            int((~usable).sum()),
        )
        file = ExampleFile(folder, name, dtype, length, np.flatnonzero(usable), one_length(args))
        advice = "a larger --seq_length: in no example anything that is learned lies within it"
    else:
        file = TokenFile(f"{folder}/{name}.bin", dtype, length, 0, found["tokens"] // length)
    if not found["tokens"] and name == "train":
        raise UserError("The corpus is empty: it has no row that can be used.")
    if file.blocks < 1 and name == "train":
        raise UserError(
            f"The corpus has {found['tokens']:,} tokens, less than one block of {length}: use {advice}."
        )
    return file, {**counts, "blocks": file.blocks}


def _hold_out(file: TokenFile | ExampleFile, blocks: int) -> tuple:
    """(the rest, so many blocks held out)."""
    left = file.blocks - blocks
    if isinstance(file, TokenFile):
        return replace(file, blocks=left), replace(file, first=file.first + left, blocks=blocks)
    drawn = np.random.default_rng(0).permutation(file.rows)
    return replace(file, rows=np.sort(drawn[blocks:])), replace(file, rows=np.sort(drawn[:blocks]))


def _first(file: TokenFile | ExampleFile, blocks: int | None) -> TokenFile | ExampleFile:
    if blocks is None or blocks >= file.blocks:
        return file
    return (
        replace(file, blocks=blocks)
        if isinstance(file, TokenFile)
        else replace(file, rows=file.rows[:blocks])
    )


def describe_split(name: str, facts: dict, seq_length: int) -> str:
    """One line about a split: rows, tokens, blocks, and what was cut or left out."""
    if "rows" not in facts:
        return f"{name}: {facts['blocks']:,} blocks held out of the corpus"
    what = "examples, in blocks of at most" if facts["kind"] in ("chat", "pair") else "blocks of"
    line = f"{name}: {facts['rows']:,} rows, {facts['tokens']:,} tokens, {facts['blocks']:,} {what} {seq_length} tokens"
    return line + "".join(
        f", {facts[what]:,} {what}" for what in ("truncated", "skipped") if facts[what]
    )


# -------------------------------------------------------------------------------------------- order


def epoch_order(blocks: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the blocks in one epoch: a permutation drawn from (seed, epoch), the same on
    every rank.
    """
    return np.random.default_rng([seed, epoch]).permutation(blocks)


def steps_of(blocks: int, together: int) -> int:
    """Optimizer steps for so many blocks; the last one may see fewer than the others."""
    return -(-blocks // together)


def total_steps(args, world_size: int, blocks: int, step: int = 0, samples: int = 0) -> int:
    """Optimizer steps of the whole run, those of before a resume included.

    Args:
        args: --epochs, --max_steps (an epoch if neither is given), and what makes the global batch.
        world_size: ranks.
        blocks: in an epoch.
        step, samples: optimizer steps that were made before, and the blocks they saw.
    """
    if args.epochs is None and args.max_steps:
        return args.max_steps
    together = global_batch(args, world_size)
    epochs_left, rest = divmod(max(0, (args.epochs or 1) * blocks - samples), blocks)
    total = step + epochs_left * steps_of(blocks, together) + steps_of(rest, together)
    return min(total, args.max_steps or total)


@dataclass
class Window:
    """This rank's share of one optimizer step.

    Attributes:
        batches: its micro-batches (inputs, labels), each int64 of shape [batch_size, length].
        tokens: in them, without what only fills them up.
        state: streaming.Place, where a stream stands after it; None where the blocks have numbers.
    """

    batches: list[tuple[torch.Tensor, torch.Tensor]]
    tokens: int
    state: Any = None


def windows(
    file, order: np.ndarray, batch_size: int, accumulation: int, rank: int, world_size: int
) -> Iterator[Window]:
    """This rank's share of each optimizer step.

    The order is cut into global batches of batch_size × world_size × accumulation blocks, so that
    the number of ranks changes who computes a block and never which step it belongs to. Every rank
    has the same number of rows in every micro-batch: where blocks run out, rows whose labels are
    all ignored fill it up. They add nothing to loss or gradient, but let every rank take part in
    every collective.

    Args:
        file: the blocks, a TokenFile or an ExampleFile.
        order: block numbers in the order of this epoch.
        batch_size: blocks in a micro-batch of one rank.
        accumulation: micro-batches in an optimizer step.
        rank, world_size: whose share.
    """
    together = batch_size * world_size
    for start in range(0, len(order), together * accumulation):
        window = order[start : start + together * accumulation]
        mine = [
            np.array_split(window[at : at + together], world_size)[rank]
            for at in range(0, len(window), together)
        ]
        yield Window(
            [fill_up(file, indices, batch_size) for indices in mine], sum(map(file.tokens, mine))
        )


def fill_up(file, indices: np.ndarray, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch of exactly `rows` rows: (inputs, labels), both int64 [rows, length]."""
    inputs, labels = file.read(indices)
    missing = rows - len(indices)
    return F.pad(inputs, (0, 0, 0, missing)), F.pad(labels, (0, 0, 0, missing), value=IGNORED)


def seed_dropout(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Let dropout draw from (seed, step, micro-step, rank): other numbers everywhere, and the same
    ones after a resume.
    """
    torch.manual_seed(
        int(
            np.random.SeedSequence([seed, step, micro_step, rank]).generate_state(1, np.uint64)[0]
            >> 1
        )
    )


def prefetch(steps: Iterator, device: torch.device) -> Iterator:
    """Read each window one ahead and send it to the device without waiting: on a GPU, reading hides
    behind computing.
    """
    ahead = None
    for window in steps:
        if device.type == "cuda":
            window.batches = [
                tuple(t.pin_memory().to(device, non_blocking=True) for t in micro)
                for micro in window.batches
            ]
        if ahead is not None:
            yield ahead
        ahead = window
    if ahead is not None:
        yield ahead


class ReadAhead:
    """Iterates over `steps` in a thread of its own, at most `depth` + 1 items ahead of the
    consumer.

    `depth` items wait in a queue, and the thread holds one more until there is room. `prefetch`
    holds another one. The items come in their order. An error of `steps` is raised where its item
    would have come, in the consumer's thread.
    """

    def __init__(self, steps: Iterator, depth: int):
        self._steps, self._items, self._closed = steps, queue.Queue(depth), threading.Event()
        self._thread = threading.Thread(target=self._read, name="read ahead", daemon=True)

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._closed.is_set():
            raise StopIteration
        if self._thread.ident is None:  # a stream may have to be resumed before it is read
            self._thread.start()
        item, error = self._take()
        if error is not None:
            self._closed.set()
            raise error
        return item

    def _take(self) -> tuple[Any, BaseException | None]:
        """Wait for the next item, but not for a thread that has ended without one."""
        while True:
            try:
                return self._items.get(timeout=1)
            except queue.Empty:
                if not self._thread.is_alive() and self._items.empty():
                    raise RuntimeError("The thread that reads ahead has ended.") from None

    def close(self, seconds: float = 30) -> None:
        """Read no more, and wait for the item in progress.

        Args:
            seconds: to wait at most; a network that hangs must not keep the run from its end.
        """
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _read(self) -> None:
        try:
            for item in self._steps:
                if not self._put(item, None):
                    return
            self._put(None, StopIteration())
        except BaseException as error:
            self._put(None, error)

    def _put(self, item: Any, error: BaseException | None) -> bool:
        """Wait for room, and False after close()."""
        while not self._closed.is_set():
            try:
                self._items.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
