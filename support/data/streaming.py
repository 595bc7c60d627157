"""--streaming: sequences of a corpus that is read and tokenized during training.

The corpus is never complete in memory or on disk. A global batch has G sequences, and batch slot g
(class `BatchSlot`) provides the g-th. Every group of G documents is distributed over the slots, one
document each, in an order drawn from the seed. A slot tokenizes its documents, cuts them into
sequences and shuffles these in chunks. A rank processes only the slots whose sequences it trains
on. Each step therefore has the same sequences for any number of ranks, and a checkpoint needs only
the position of each slot in the corpus, which is a few numbers.

A thread reads and tokenizes some steps ahead of training (`batches.ReadAhead`). Each step carries
the position of the stream after it, so that checkpoints and messages about bad rows exclude rows
that were only read ahead. The thread has its own copy of the tokenizer, because rank 0 may save the
original with a checkpoint at the same time.

Rows are read through `datasets.IterableDataset`, whose `state_dict()` is the position in the
corpus. Every rank reads all rows, and tokenizes only those of its slots.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from support.cli.arguments import global_batch
from support.cli.paths import is_local_dataset
from support.cluster.context import DistContext, describe_difference
from support.data.batches import (
    IGNORED,
    ExampleFile,
    ReadAhead,
    StepBatch,
    TokenFile,
    nothing,
    one_length,
    open_split,
    prefetch,
    stack_examples,
)
from support.data.chat import PLAIN_NOTICE, Encoder, use_plain_template
from support.data.long_documents import Chunk, DocumentTokenizer
from support.data.sources import (
    BadRow,
    Document,
    Example,
    begins_article,
    columns_of_text,
    commit_on_hub,
    has_rows,
    load_from_hub,
    read_row,
    read_text,
    reading,
    rows_of_file,
)
from support.data.tokenize import (
    SHOWN_BAD_ROWS,
    of_another_kind,
    refuse_bad_rows,
    say_dataset,
    say_files,
    tokenize_corpus,
)
from support.errors import UserError
from support.files.atomic import sha256_of
from support.files.folders import advise_include, count_types, describe_twins, files_of

# Steps in the queue of `batches.ReadAhead`; two more are outside it, one in the thread and one in
# `prefetch`. A few are enough, because the slots refill in different steps.
STEPS_AHEAD = 4
COMPARED_BYTES = 1 << 16  # read at the beginning and at the end of a file to compare it
# Increase it when a corpus is divided into other rows, which invalidates positions in checkpoints.
ROWS_VERSION = 2


@dataclass
class Item:
    """A row that is assigned to a batch slot and not tokenized yet.

    Attributes:
        state: state of the reader before this row.
        begins: whether an end-of-text token precedes it.
        content: the document or example.
        part: for a part of a text file, the chunk with its seams; otherwise None.
    """

    state: dict
    begins: bool
    content: Document | Example
    part: Chunk | None = None


@dataclass(frozen=True)
class TextFile(Document):
    """A text file, whose parts are assigned to the batch slots."""


class Reader:
    """A reader that assigns the rows of a corpus to batch slots, pass after pass.

    A slot gets a whole row, or a whole article of WikiText (whose rows are lines). A text file is
    assigned in parts, so that all slots have a share of a single file. If the next part of a slot
    does not directly follow its previous one, an end-of-text token separates the two.

    Args:
        open_rows: returns a stateful iterable of rows, see `_open_rows`.
        parts: cuts a text, given in pieces, into parts that can be tokenized independently.
        text_column: see `sources.open_source`.
        slots: number of batch slots of all ranks.
        mine: {number: slot} of the slots that this rank processes.
        seed: determines the order in which the slots get documents.
        refuse: called with each bad row of the first pass.
    """

    def __init__(
        self,
        open_rows: Callable,
        parts: Callable,
        text_column: str | None,
        slots: int,
        mine: dict[int, BatchSlot],
        seed: int,
        refuse: Callable,
    ):
        self.open_rows, self.parts, self.text_column, self.slots, self.mine = (
            open_rows,
            parts,
            text_column,
            slots,
            mine,
        )
        self.refuse = refuse
        self.kind: str | None = None
        self.lane_of = functools.lru_cache(2)(
            lambda group: np.random.default_rng([seed, group]).permutation(slots)
        )
        self.rows_in_pass = 0
        self.start({"row": 0, "pass": 0, "first": 0, "rows": None})

    def start(self, state: dict) -> None:
        """Continue from the state in an `Item`.

        Args:
            state: {"row": number of good rows (or parts of text files) before it, in all passes;
                "pass": number of the pass; "first": value of "row" at the beginning of the pass;
                "rows": state of the iterable, or None for its beginning; "part": for a part of a
                text file, the number of parts before it in the file}.
        """
        self.row, self.passes, self.first_of_pass = (state[key] for key in ("row", "pass", "first"))
        self.rows = self.open_rows()
        if state["rows"] is not None:
            self.rows.load_state_dict(state["rows"])
        self.units = self._read(state.get("part", 0))

    def pull(self) -> None:
        """Read one row or part of a text file, and assign it to its slot.

        The row is dropped if another rank processes the slot, or if the slot is already past it.

        Raises:
            UserError: there are too many bad rows, or the corpus has no usable row.
        """
        place = {"row": self.row, "pass": self.passes, "first": self.first_of_pass}
        unit = next(self.units, None)
        if unit is None:
            if self.row == self.first_of_pass:
                raise UserError("--streaming: there is nothing in the corpus that can be used.")
            self.rows_in_pass = self.row - self.first_of_pass
            self.start({**place, "pass": self.passes + 1, "first": self.row, "rows": None})
            return
        rows, number, content, part = unit
        slot = self._lane_of(self.row)
        begins = self.row > 0 and not (number and slot == self._lane_of(self.row - 1))
        if slot in self.mine and self.row >= self.mine[slot].first:
            self.mine[slot].waiting.append(
                Item({**place, "rows": rows, "part": number}, begins, content, part)
            )
        self.row += 1

    def _lane_of(self, row: int) -> int:
        # From 1: existing checkpoints have positions in an order that is counted in this way.
        group, place = divmod(row + 1, self.slots)
        return int(self.lane_of(group)[place])

    def _read(self, skip: int) -> Iterator[tuple[dict, int, Document | Example, Chunk | None]]:
        """Yield the good rows and the parts of text files.

        Args:
            skip: number of parts of the first text file to skip.
        Yields:
            (state of the iterable before it, number of the part in its file or 0, content, the
            chunk of a part or None).
        """
        for state, content in self._joined():
            if isinstance(content, BadRow):
                if self.passes == 0:
                    self.refuse(content)
            elif isinstance(content, TextFile):
                for number, part in enumerate(self.parts(content.pieces)):
                    if number >= skip:
                        yield state, number, Document(content.where, [part.text]), part
            else:
                yield state, 0, content, None
            skip = 0

    def _joined(self) -> Iterator[tuple[dict, Document | Example | TextFile | BadRow]]:
        """Yield the documents and other rows; a row that does not begin a document continues it.

        Yields:
            (state of the iterable before it, content).
        """
        rows, pending = iter(self.rows), None
        while True:
            state = self.rows.state_dict()
            row = next(rows, None)
            content = None if row is None else self._understand(row)
            if pending and row is not None and not row["begins"] and isinstance(content, Document):
                pending[1].pieces.extend(content.pieces)
                continue
            if pending:
                yield pending
            if row is None:
                return
            pending = state, content

    def _understand(self, row: dict) -> Document | Example | TextFile | BadRow:
        if row["file"]:
            pieces = read_text(Path(row["where"]))
            content = pieces if isinstance(pieces, BadRow) else TextFile(row["where"], pieces)
        else:
            content = (
                BadRow(row["bad"])
                if row["bad"]
                else read_row(row["row"], row["where"], self.text_column)
            )
        if isinstance(content, BadRow):
            return content
        self.kind = self.kind or content.kind
        return content if content.kind == self.kind else of_another_kind(content, self.kind)


class BatchSlot:
    """A batch slot, which provides one sequence at the same position of every global batch.

    Rows are tokenized until there are enough for a chunk of sequences, which is shuffled and then
    used one by one; then the next chunk follows. The state of a slot is the position at which its
    chunk begins, and the number of sequences of the chunk that were used.

    Args:
        number: index in the global batch.
        slots: number of batch slots.
        chunk: number of sequences that are shuffled together.
        seq_length, seed: tokens in a sequence, and the seed of the run.
        encode: tokenizes an `Item`; returns (token ids of a text, or (ids, labels) of an example,
            or None if it cannot be used; "truncated" or "skipped" if it counts as such, or None).
    """

    def __init__(
        self, number: int, slots: int, chunk: int, seq_length: int, seed: int, encode: Callable
    ):
        self.number, self.size, self.seq_length, self.seed, self.encode = (
            number,
            chunk,
            seq_length,
            seed,
            encode,
        )
        # The first chunks differ in size, so that not all slots refill in the same step.
        self.early = 1 + (chunk - 1) * (number + 1) // slots
        self.waiting: deque[Item] = deque()
        self.first = 0  # number of the first row that is still needed
        self.begin, self.chunks, self.used = None, 0, 0
        self.sequences: list = []
        # Tokenized rows, with the number of tokens of each that are in earlier chunks.
        self.rest: list[tuple[Item, int, np.ndarray]] = []
        self.skip = 0
        self.refused = 0  # consecutive rows that could not be used
        # "counted" is the number of rows that are included, so that no row is counted twice.
        self.counts = {"counted": 0, "truncated": 0, "skipped": 0}

    def state(self) -> dict:
        """Return the state for a checkpoint: {"reader", "offset", "chunk", "used", "counts"}.

        "reader" is the state of the reader before the first row of the chunk, "offset" the number
        of tokens of that row that are in earlier chunks, "chunk" the number of the chunk from 1,
        and "used" the number of its sequences that were used.
        """
        return {**self.begin, "chunk": self.chunks, "used": self.used, "counts": dict(self.counts)}

    def resume(self, state: dict) -> None:
        """Continue from `state`; the reader must assign rows again from `state["reader"]`."""
        self.first, self.skip = state["reader"]["row"], state["offset"]
        self.chunks, self.used = state["chunk"] - 1, state["used"]
        self.begin = {"reader": state["reader"], "offset": state["offset"]}
        self.counts = dict(state.get("counts", self.counts))

    def next_sequence(self, reader: Reader):
        """Return the next sequence: ids of a text, or (ids, labels) of an example."""
        while not self.sequences or self.used == len(self.sequences):
            used = 0 if self.sequences else self.used  # may be greater than 0 after a resume
            self.chunks += 1
            size = self.early if self.chunks == 1 else self.size
            sequences = (
                self._text_chunk(size, reader)
                if self._is_text(reader)
                else self._example_chunk(size, reader)
            )
            order = np.random.default_rng([self.seed, self.number, self.chunks]).permutation(
                len(sequences)
            )
            self.sequences, self.used = [sequences[i] for i in order], used
        self.used += 1
        return self.sequences[self.used - 1]

    def _is_text(self, reader: Reader) -> bool:
        while not (self.waiting or self.rest):
            reader.pull()
        item = self.rest[0][0] if self.rest else self.waiting[0]
        return item.content.kind == "text"

    def _tokenise(self, reader: Reader) -> tuple[Item, int, object]:
        """Tokenize rows up to the next one that can be used.

        Returns:
            (row, number of its tokens that are in earlier chunks, the result of `encode`).
        Raises:
            UserError: no row can be used, of as many consecutive rows as the corpus has and at
                least 100.
        """
        while True:
            while not self.waiting:
                reader.pull()
            item = self.waiting.popleft()
            encoded, flaw = self.encode(item)
            if flaw and item.state["pass"] == 0 and item.state["row"] >= self.counts["counted"]:
                self.counts[flaw] += 1
            self.counts["counted"] = max(self.counts["counted"], item.state["row"] + 1)
            if encoded is not None:
                # After a resume, the chunk may begin within a row.
                offset, self.skip, self.refused = self.skip, 0, 0
                return item, offset, encoded
            self.refused += 1
            if self.refused > max(100, reader.rows_in_pass) and reader.passes:
                raise UserError(
                    "--streaming: nothing in the corpus can be used: the rows are empty, or what "
                    "is learned of them lies behind --seq_length."
                )

    def _text_chunk(self, size: int, reader: Reader) -> list[np.ndarray]:
        needed = size * self.seq_length
        available = sum(len(ids) - offset for _, offset, ids in self.rest)
        while available < needed:
            self.rest.append(self._tokenise(reader))
            available += len(self.rest[-1][2]) - self.rest[-1][1]
        item, offset, _ = self.rest[0]
        self.begin = {"reader": item.state, "offset": offset}
        stream = np.concatenate([ids[offset:] for _, offset, ids in self.rest])
        unused, rest = len(stream) - needed, []
        for item, offset, ids in reversed(self.rest):
            if unused > 0:
                rest.append((item, max(offset, len(ids) - unused), ids))
            unused -= len(ids) - offset
        self.rest = rest[::-1]
        return list(stream[:needed].reshape(size, self.seq_length))

    def _example_chunk(self, size: int, reader: Reader) -> list:
        rows = [self._tokenise(reader) for _ in range(size)]
        self.begin = {"reader": rows[0][0].state, "offset": 0}
        return [encoded for _, _, encoded in rows]


@dataclass(frozen=True)
class Place:
    """The position of the stream after a step, on this rank.

    Attributes:
        slots: {number of a slot: its state}, for the slots of this rank.
        bad: (line about a row, whether only this rank has it) for each bad row of this step.
        rows: number of good rows (or parts of text files) read so far, in all passes.
        passes: number of complete passes.
        kind: the kind of the rows, "text", "chat" or "pair"; None before the first row.
    """

    slots: dict[str, dict]
    bad: list[tuple[str, bool]]
    rows: int
    passes: int
    kind: str | None = None


class Stream:
    """The training sequences of --streaming, used like a TokenFile.

    Attributes:
        num_sequences: sequences of the whole run; there are no epochs.
        seq_length: tokens in a sequence.
        place: position on this rank after the step in progress.
        facts: facts about the corpus for results.json.
    """

    def __init__(self, args, ctx: DistContext, tokenizer):
        self.args, self.ctx, self.tokenizer = args, ctx, tokenizer
        self.seq_length, self.place = args.seq_length, Place({}, [], 0, 0)
        self.encoder, self.bad = None, {}  # `bad` is an ordered set of lines about bad rows
        self.found: list[tuple[str, bool]] = []  # bad rows of the step that is being read
        self.shown = 0  # number of bad rows that were printed, or known before a resume
        # Bad rows that are not sent to the other ranks yet, and those that all ranks have.
        self.fresh, self.gathered = [], set()
        # A copy, because two threads must not use one tokenizer.
        self.documents = DocumentTokenizer(copy.deepcopy(tokenizer))
        self.layout = [
            [
                micro * args.batch_size * ctx.world_size + ctx.rank * args.batch_size + row
                for row in range(args.batch_size)
            ]
            for micro in range(args.gradient_accumulation_steps)
        ]
        slots = global_batch(args, ctx.world_size)
        self.num_sequences, chunk = args.max_steps * slots, max(1, args.shuffle_buffer // slots)
        rank_slots = (number for numbers in self.layout for number in numbers)
        self.slots = {
            number: BatchSlot(number, slots, chunk, args.seq_length, args.seed, self._encode)
            for number in rank_slots
        }
        # All ranks read the same commit, even if the dataset changes on the hub meanwhile.
        remote = ctx.is_main and not is_local_dataset(args.dataset)
        commit = ctx.broadcast_from_rank0(commit_on_hub(args.dataset) if remote else None)
        files, twins = _files_to_read(args) if is_local_dataset(args.dataset) else ([], {})
        if Path(args.dataset).expanduser().is_dir():
            say_files(
                [f"{args.dataset}: {count_types([*files, *twins])}"],
                describe_twins(twins, "content"),
                ctx,
            )
        self.advice = advise_include(files)
        rows = _open_rows(args, commit, files)
        self.reader = Reader(
            rows, self.documents.parts, args.text_column, slots, self.slots, args.seed, self._refuse
        )
        digest = fingerprint(args, commit, files)
        describe_difference(ctx.all_gather(digest), "The corpus")
        self.facts = {
            "name": args.dataset,
            "sha256": digest,
            "tokens": None,
            "blocks": None,
            "streaming": True,
        }
        self._ahead = ReadAhead(self._windows(), STEPS_AHEAD)
        self._live: Iterator[StepBatch] | None = None

    def progress(self) -> dict:
        """Return the state of all ranks for a checkpoint; every rank must call it.

        Each rank sends only the bad rows that are new since the last call.

        Returns:
            {"lanes": {number of a slot: its state}, "bad": sorted lines about all bad rows,
            "version": ROWS_VERSION}.
        """
        ranks = self.ctx.all_gather((self.place.slots, self.fresh))
        slots = {slot: state for states, _ in ranks for slot, state in states.items()}
        self.gathered.update(row for _, fresh in ranks for row in fresh)
        self.fresh = []
        return {"lanes": slots, "bad": sorted(self.gathered), "version": ROWS_VERSION}

    def summary(self) -> dict:
        """Stop reading, print the counts of rows, and return the facts for results.json.

        Every rank must call it.
        """
        self._ahead.close()
        progress, rows = self.progress(), max(self.ctx.all_gather(self.place.rows))
        flaws = {
            name: sum(slot["counts"][name] for slot in progress["lanes"].values())
            for name in ("truncated", "skipped")
        }
        counts = {"rows": rows, **flaws, "bad_rows": progress["bad"]}
        counts_text = ", ".join(
            f"{len(n) if isinstance(n, list) else n:,} {name.replace('_', ' ')}"
            for name, n in counts.items()
        )
        self.ctx.console.print0(f"📚 stream: {counts_text}, in {self.place.passes + 1} passes")
        return {**self.facts, "kind": self.reader.kind, **counts}

    def resume(self, state: dict | None) -> None:
        """Continue from the state in a checkpoint.

        Args:
            state: what `progress` returned; None for a run without --streaming.
        Raises:
            UserError: the checkpoint is from a run without --streaming or with another global batch
                size, or an earlier version divided the corpus into other rows.
        """
        slots = state["lanes"] if state else None
        if slots is None or (slots and set(map(int, slots)) != set(range(self.reader.slots))):
            raise UserError(
                "--resume: the checkpoint was made without --streaming or with another global "
                "batch: use that."
            )
        if slots and state.get("version", 1) < ROWS_VERSION and _was_cut_otherwise(self.args):
            raise UserError(
                "--resume: the checkpoint was written by a version that read long text files (and "
                "WikiText) in other pieces, so its place in the corpus cannot be found: train its "
                "weights in a new run (--export_hf)."
            )
        self.bad, self.gathered = dict.fromkeys(state["bad"]), set(state["bad"])
        self.shown = len(self.bad)
        if not slots:  # before the first step
            return
        for number, slot in self.slots.items():
            slot.resume(slots[str(number)])
        begin = min(
            (slot.begin["reader"] for slot in self.slots.values()), key=lambda reader: reader["row"]
        )
        self.ctx.console.print0(f"⏩ Reading the stream again up to row {begin['row']:,}")
        self.reader.start(begin)
        rank_lanes = {
            str(number): {**slots[str(number)], "counts": dict(slot.counts)}
            for number, slot in self.slots.items()
        }
        self.place = Place(rank_lanes, [], self.reader.row, self.reader.passes)

    def step_batches(self, device) -> Iterator[StepBatch]:
        """Yield the step batches of this rank, from where the last caller stopped."""
        if self._live is None:
            self._live = prefetch(self._ahead, device)
        for step_batch in self._live:
            self._arrive(step_batch.state)
            yield step_batch

    def _arrive(self, place: Place) -> None:
        """Record the position after the step that is trained on next, and print its bad rows."""
        kind_is_new = place.kind and not self.place.kind
        if kind_is_new and use_plain_template(self.tokenizer, place.kind):
            self.ctx.console.warn(PLAIN_NOTICE)
        self.place = place
        for row, this_rank_only in place.bad:
            self.fresh.append(row)
            self.shown += 1
            if self.shown <= SHOWN_BAD_ROWS and (this_rank_only or self.ctx.is_main):
                self.ctx.console.print(f"ℹ️  Left out: {row}")
            elif self.shown == SHOWN_BAD_ROWS + 1:
                self.ctx.console.warn(
                    "More rows are left out: results.json will name all of them under "
                    "dataset.bad_rows."
                )

    def _windows(self) -> Iterator[StepBatch]:
        while True:
            batches = [
                [self.slots[number].next_sequence(self.reader) for number in numbers]
                for numbers in self.layout
            ]
            tokens = sum(
                len(sequence if isinstance(sequence, np.ndarray) else sequence[0])
                for batch in batches
                for sequence in batch
            )
            slots = {str(number): slot.state() for number, slot in self.slots.items()}
            bad_rows, self.found = self.found, []
            place = Place(slots, bad_rows, self.reader.row, self.reader.passes, self.reader.kind)
            yield StepBatch([self._stack(batch) for batch in batches], tokens, place)

    def _stack(self, sequences: list) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(sequences[0], np.ndarray):
            inputs = torch.from_numpy(np.stack(sequences).astype(np.int64))
            return inputs, inputs.clone()
        return stack_examples(sequences, self.seq_length, one_length(self.args))

    def _encode(self, item: Item):
        if item.content.kind == "text":
            return self._encode_text(item)
        if self.encoder is None:
            use_plain_template(self.documents.tokenizer, item.content.kind)
            self.encoder = Encoder(self.documents.tokenizer)
        [encoded] = self.encoder.encode([item.content])
        if isinstance(encoded, BadRow):
            if item.state["pass"] == 0:
                self._refuse(encoded, mine=True)
            return None, None
        ids, mask = (array[: self.seq_length].astype(np.int64) for array in encoded)
        if not mask[1:].any():  # all valid tokens are beyond seq_length
            return None, "skipped"
        return (ids, np.where(mask, ids, IGNORED)), "truncated" if len(
            encoded[0]
        ) > self.seq_length else None

    def _encode_text(self, item: Item) -> tuple[np.ndarray | None, str | None]:
        text = "".join(item.content.pieces)
        if not text:
            return None, "skipped"
        eos = self.documents.tokenizer.eos_token_id
        separator = [eos] if item.begins and eos is not None else []
        ids = self.documents.part_ids(item.part) if item.part else self.documents.ids(text)
        return np.array(separator + ids, dtype=np.int64), None

    def _refuse(self, row: BadRow, mine: bool = False) -> None:
        """Record a bad row, unless it is recorded already, for instance before a resume.

        Args:
            row: the bad row.
            mine: whether only this rank has it, because the row was read but cannot be encoded.
        Raises:
            UserError: there are now more bad rows than --max_bad_rows.
        """
        if str(row) in self.bad:
            return
        self.bad[str(row)] = None
        self.found.append((str(row), mine))
        if len(self.bad) > self.args.max_bad_rows:
            refuse_bad_rows(list(self.bad), self.args.max_bad_rows, self.advice)


def open_stream(args, ctx: DistContext, tokenizer) -> tuple[Stream, TokenFile | ExampleFile, dict]:
    """Open the training stream and --validation_file; every rank must call it.

    Returns:
        (stream, sequences of --validation_file or an empty TokenFile, facts for results.json).
    Raises:
        UserError: a corpus does not exist or cannot be read, or --validation_file is shorter than
            one sequence.
        TrainingError: the corpus differs between the nodes.
    """
    train, validation = Stream(args, ctx, tokenizer), nothing(args)
    if args.validation_file:
        prepared = tokenize_corpus(args, ctx, tokenizer, args.validation_file)
        validation, split_info = open_split(prepared, "train", args)
        train.facts["validation"] = {**split_info, "bad_rows": prepared["bad_rows"]}
        say_dataset(ctx, args, {"validation": train.facts["validation"]}, tokenizer)
    return train, validation, train.facts


def _was_cut_otherwise(args) -> bool:
    """Return whether the corpus was divided into other rows before ROWS_VERSION 2."""
    if not is_local_dataset(args.dataset):
        return args.dataset == "wikitext"
    files, _ = _files_to_read(args)
    return any(not has_rows(file) and file.stat().st_size > 1 << 16 for file in files)


def _files_to_read(args) -> tuple[list[Path], dict[Path, Path]]:
    """Return the files of --dataset, each content once.

    Only files with the same size, beginning and end are read completely for the comparison.

    Returns:
        (files to read, {file that is not used: the earlier file with the same content}).
    Raises:
        UserError: there are no files, or one cannot be read.
    """
    files = files_of(Path(args.dataset).expanduser(), f"--dataset {args.dataset}", args.include)
    candidates: dict[tuple, list[Path]] = {}
    for file in files:
        size, edges = _edges(file)
        candidates.setdefault((size, hashlib.sha256(edges).digest()), []).append(file)
    first_with, twins = {}, {}
    for same_edges in (group for group in candidates.values() if len(group) > 1):
        for file in same_edges:
            with reading(file):
                first = first_with.setdefault(sha256_of(file), file)
            if first != file:
                twins[file] = first
    return [file for file in files if file not in twins], twins


def _edges(file: Path) -> tuple[int, bytes]:
    """Return a file's size in bytes, and its first and last COMPARED_BYTES joined."""
    with reading(file), open(file, "rb") as stream:
        size = file.stat().st_size
        begin = stream.read(COMPARED_BYTES)
        stream.seek(max(0, size - COMPARED_BYTES))
        return size, begin + stream.read(COMPARED_BYTES)


def fingerprint(args, commit: str | None, files: list[Path]) -> str:
    """Return the SHA-256 digest of a corpus that ranks and a resumed run compare.

    It covers --dataset_config, --text_column, and the names, sizes, beginnings and ends of the
    files, or the name and commit on the hub. The text is never read completely.

    Args:
        args: --dataset, --dataset_config, --text_column.
        commit: commit of a hub dataset, if known.
        files: the files of a local corpus.
    Raises:
        UserError: a file cannot be read.
    """
    digest = hashlib.sha256(f"{args.dataset_config}\0{args.text_column}".encode())
    if not is_local_dataset(args.dataset):
        digest.update(f"{args.dataset}\0{commit}".encode())
        return digest.hexdigest()
    for file in files:
        size, edges = _edges(file)
        digest.update(os.fsencode(file.name) + f"\0{size}".encode() + edges)
    return digest.hexdigest()


def _open_rows(args, commit: str | None, files: list[Path]) -> Callable:
    """Return a function that opens the corpus as a stateful iterable of rows.

    A row is {"row": argument of `read_row`; "where": its place; "file": whether it is a whole text
    file, whose path is "where"; "begins": whether it begins a document, or continues the previous
    row; "bad": the reason why it cannot be used, or None}.

    Args:
        args: --dataset, --dataset_config, --text_column.
        commit: the commit of a hub dataset to read; None for the newest.
        files: the files of a local corpus.
    Raises:
        UserError: the hub dataset cannot be loaded, or its columns do not match any kind of row.
    """
    import datasets

    if is_local_dataset(args.dataset):
        options = {"files": [str(file) for file in files], "text_column": args.text_column}
        return partial(datasets.IterableDataset.from_generator, _rows_of_files, gen_kwargs=options)
    splits = load_from_hub(args.dataset, args.dataset_config, revision=commit, streaming=True)
    flag = f"--dataset {args.dataset}"
    columns = list(next(iter(splits["train"].take(1)), {}))
    columns_of_text(columns, args.text_column, flag)

    def wrap(row: dict, number: int) -> dict:
        begins = args.dataset != "wikitext" or begins_article(row["text"])  # its rows are lines
        return {
            "row": row,
            "where": f"{flag}, row {number + 1}",
            "file": False,
            "begins": begins,
            "bad": None,
        }

    return lambda: splits["train"].map(wrap, with_indices=True, remove_columns=columns)


def _rows_of_files(files: list[str], text_column: str | None) -> Iterator[dict]:
    for name in files:
        file = Path(name)
        if not has_rows(file):
            yield {"row": None, "where": name, "file": True, "begins": True, "bad": None}
            continue
        for row in rows_of_file(file, text_column):
            bad = str(row) if isinstance(row, BadRow) else None
            content = {"row": None, "where": name} if bad else {"row": row[0], "where": row[1]}
            yield {**content, "file": False, "begins": True, "bad": bad}
