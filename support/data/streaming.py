"""--streaming: sequences of a corpus that is read and tokenized during training.

The corpus is never complete in memory or on disk. A global batch has G sequences, and batch slot g
(class `Slot`) provides the g-th. Every group of G rows is distributed over the slots, one row each,
in an order drawn from the seed. A slot tokenizes its rows, cuts them into sequences and shuffles
these in chunks. Every rank reads all rows, and processes only the slots whose sequences it trains
on. Each step therefore has the same sequences for any number of ranks, and a checkpoint needs only
the position of each slot in the corpus, which is a few numbers.

A thread reads and tokenizes some steps ahead of training (`batches.ReadAhead`). Each step carries
the position of the stream after it, so that checkpoints and messages about bad rows exclude rows
that were only read ahead. The thread has its own copy of the tokenizer, because rank 0 may save the
original with a checkpoint at the same time.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support.cli.arguments import Arguments, global_batch, isolates_documents
from support.cli.paths import is_local_dataset
from support.cluster.context import DistContext, require_equal_on_all_ranks
from support.data import batches, tokenize
from support.data.chat import PLAIN_NOTICE, Encoder, has_own_template, use_plain_template
from support.data.documents import DocumentTokenizer, Piece
from support.data.formats import BadRow, Document, Example, OneKind, RowOptions, TextFile
from support.data.rows import Rows, Source, commit_on_hub, has_rows, open_for_streaming
from support.data.sequences import Padding, Part, Sequences, micro_batch, pack
from support.errors import UserError
from support.files.folders import files_of

# Steps that are read ahead, besides the one of `copy_ahead`. A few are enough, because the slots
# refill in different steps.
STEPS_AHEAD = 5
# Increase it when a corpus is divided into other rows, which invalidates positions in checkpoints.
ROWS_VERSION = 3


@dataclass(frozen=True)
class Unit:
    """A row, or a piece of a text file, that is assigned to a batch slot."""

    # The position before it, from which `Reader.units` continues: {"row": number of units before
    # it, in all passes; "pass": number of the pass; "first": value of "row" at the beginning of the
    # pass; "rows": position of its row in the corpus, None for the beginning; "part": for a piece
    # of a text file, the number of pieces before it in the file}. JSON.
    state: dict
    slot: int
    begins: bool  # whether an end-of-text token precedes it
    content: Document | Example
    piece: Piece | None = None  # of a text file


class Reader:
    """A reader that assigns the rows of a corpus to batch slots, pass after pass.

    A slot gets a whole row, or a whole article of WikiText (whose rows are lines). A text file is
    assigned in pieces, so that all slots have a share of a single file. If the next piece of a slot
    does not directly follow its previous one, an end-of-text token separates the two.

    Args:
        cut: cuts the document of a text file into pieces that can be tokenized independently.
        refuse: called with each bad row of the first pass.
    """

    def __init__(
        self, rows: Rows, cut: Callable, num_slots: int, seed: int, refuse: Callable
    ) -> None:
        self.rows, self.cut, self.num_slots, self.refuse = rows, cut, num_slots, refuse
        self.one_kind = OneKind()
        self.row = self.passes = self.rows_in_pass = 0  # units so far, passes, units of a pass
        self._order_of_group = functools.lru_cache(2)(
            lambda group: np.random.default_rng([seed, group]).permutation(num_slots)
        )

    def units(self, state: dict | None = None) -> Iterator[Unit]:
        """Yield the units from a state on, pass after pass, without end.

        Raises:
            UserError: there are too many bad rows, or the corpus has no usable row.
        """
        state = state or {"row": 0, "pass": 0, "first": 0, "rows": None, "part": 0}
        self.row, self.passes, first = state["row"], state["pass"], state["first"]
        start, skip = state["rows"], state["part"]
        while True:
            for position, content in self.rows(start):
                row = self.one_kind.check(content)
                if isinstance(row, BadRow) and self.passes == 0:
                    self.refuse(row)
                if not isinstance(row, BadRow):
                    place = {"pass": self.passes, "first": first, "rows": position}
                    yield from self._units_of(row, place, skip)
                skip = 0
            if self.row == first:
                raise UserError("--streaming: the corpus has no row that can be used.")
            self.rows_in_pass = self.row - first
            self.passes, first, start = self.passes + 1, self.row, None

    def _units_of(self, row: Document | Example, place: dict, skip: int) -> Iterator[Unit]:
        pieces: Iterable[Piece | None] = self.cut(row) if isinstance(row, TextFile) else [None]
        for number, piece in itertools.islice(enumerate(pieces), skip, None):
            slot = self._slot_of(self.row)
            begins = self.row > 0 and not (number and slot == self._slot_of(self.row - 1))
            state = {"row": self.row, "part": number, **place}
            self.row += 1
            yield Unit(state, slot, begins, row, piece)

    def _slot_of(self, row: int) -> int:
        # From 1: existing checkpoints have positions in an order that is counted in this way.
        group, place = divmod(row + 1, self.num_slots)
        return int(self._order_of_group(group)[place])


class Slot:
    """A batch slot, which provides one sequence at the same position of every global batch.

    Rows are tokenized until there are enough for a chunk of sequences, which is shuffled and then
    used one by one; then the next chunk follows. The state of a slot is the position at which its
    chunk begins, and the number of sequences of the chunk that were used.

    Args:
        chunk: number of sequences that are shuffled together.
        encode: returns the stored ids of a row, or None if it cannot be used, and its flaw: see
            `Stream._encode`.
    """

    def __init__(self, number: int, slots: int, chunk: int, args: Arguments, encode: Callable):
        self.number, self.size, self.packing = number, chunk, args.packing
        self.seq_length, self.seed, self.encode = args.seq_length, args.seed, encode
        # The first chunks differ in size, so that not all slots refill in the same step.
        self.early = 1 + (chunk - 1) * (number + 1) // slots
        self.waiting: deque[Unit] = deque()
        # Tokenized rows, with the number of tokens of each that are in earlier chunks.
        self.rest: list[tuple[Unit, int, np.ndarray]] = []
        self.sequences: list[list[np.ndarray]] = []
        self.begin: dict | None = None  # of the chunk: {"reader": state of a Unit, "offset"}
        self.chunks, self.used = 0, 0
        # After a resume: the first row that is needed, and the tokens of it to skip.
        self.first, self.skip = 0, 0
        self.refused = 0  # consecutive rows that could not be used
        # "counted" is the number of rows that are included, so that no row is counted twice.
        self.counts = {"counted": 0, "truncated": 0, "skipped": 0}

    def state(self) -> dict:
        """Return the state for a checkpoint: {"reader", "offset", "chunk", "used", "counts"}.

        "reader" is the position of the first row of the chunk, "offset" the number of its tokens
        that are in earlier chunks, "chunk" the number of the chunk from 1, and "used" the number of
        its sequences that were used.
        """
        assert self.begin is not None
        return {**self.begin, "chunk": self.chunks, "used": self.used, "counts": dict(self.counts)}

    def resume(self, state: dict) -> None:
        """Continue from `state`; rows from `state["reader"]` on must be added again."""
        self.first, self.skip = state["reader"]["row"], state["offset"]
        self.chunks, self.used = state["chunk"] - 1, state["used"]
        self.begin = {"reader": state["reader"], "offset": state["offset"]}
        self.counts = dict(state.get("counts", self.counts))

    def add(self, unit: Unit) -> None:
        """Add a row, unless the slot is already past it."""
        if unit.state["row"] >= self.first:
            self.waiting.append(unit)

    def next_sequence(self) -> list[np.ndarray] | None:
        """Return the parts of the next sequence; None if more rows must be added first."""
        while not self.sequences or self.used == len(self.sequences):
            used = 0 if self.sequences else self.used  # may be greater than 0 after a resume
            size = self.early if self.chunks == 0 else self.size
            while not self._is_enough(size):
                if not self.waiting:
                    return None
                self._tokenize(self.waiting.popleft())
            unit, offset, _ = self.rest[0]
            self.begin, self.chunks = {"reader": unit.state, "offset": offset}, self.chunks + 1
            sequences = self._cut_chunk(size)
            generator = np.random.default_rng([self.seed, self.number, self.chunks])
            order = generator.permutation(len(sequences))
            # A chunk may be smaller after a resume with other flags (--resume_force).
            self.sequences, self.used = [sequences[i] for i in order], min(used, len(order))
        self.used += 1
        return self.sequences[self.used - 1]

    def _tokenize(self, unit: Unit) -> None:
        """Tokenize a row, and append it to `rest` if it can be used."""
        if self.packing and unit.content.kind == "text":
            raise UserError(batches.TEXT_IS_PACKED)
        ids, flaw = self.encode(unit)
        if flaw and unit.state["pass"] == 0 and unit.state["row"] >= self.counts["counted"]:
            self.counts[flaw] += 1
        self.counts["counted"] = max(self.counts["counted"], unit.state["row"] + 1)
        if ids is None:
            self.refused += 1
            return
        self.rest.append((unit, self.skip, ids))
        self.skip = self.refused = 0

    def _is_enough(self, size: int) -> bool:
        """Return whether `rest` has the rows of a chunk of `size` sequences."""
        if not self.rest:
            return False
        tokens = sum(len(ids) - offset for _, offset, ids in self.rest)
        if self.packing:  # as many examples as there is room for, and the next one
            return tokens > size * self.seq_length
        if self.rest[0][0].content.kind == "text":
            return tokens >= size * self.seq_length
        return len(self.rest) == size

    def _cut_chunk(self, size: int) -> list[list[np.ndarray]]:
        """Take about `size` sequences from `rest`."""
        if self.packing:
            *rows, unused = self.rest
            self.rest = [unused]
            examples = [ids for _, _, ids in rows]
            members, ends = pack(np.array([len(ids) for ids in examples]), self.seq_length)
            return [[examples[n] for n in part] for part in np.split(members, ends[:-1])]
        if self.rest[0][0].content.kind != "text":
            rows, self.rest = self.rest, []
            return [[ids] for _, _, ids in rows]
        stream = np.concatenate([ids[at:] for _, at, ids in self.rest])
        needed = size * self.seq_length
        # Only the last row may have tokens that are not used.
        unit, _, ids = self.rest[-1]
        surplus = len(stream) - needed
        self.rest = [(unit, len(ids) - surplus, ids)] if surplus else []
        return [[part] for part in stream[:needed].reshape(size, self.seq_length)]


@dataclass(frozen=True)
class Place:
    """The position of the stream after a step, on this rank."""

    slots: dict[str, dict]  # {number of a slot: its state}, for the slots of this rank
    # (line about a row, whether only this rank has it) for each bad row of this step.
    bad: list[tuple[str, bool]]
    rows: int  # number of good rows (or pieces of text files) read so far, in all passes
    passes: int  # number of complete passes
    # The kind of the rows, "text", "chat" or "pair"; None before the first row.
    kind: str | None = None
    formats: tuple[str, ...] = ()
    joined: str | None = None  # see `tokenize.warn_of_joined`


class Stream:
    """The training sequences of --streaming."""

    def __init__(self, args: Arguments, ctx: DistContext, tokenizer: Any, source: Source):
        self.args, self.ctx, self.tokenizer, self.source = args, ctx, tokenizer, source
        self.padding = Padding.of(args, ctx.device.type)
        self.end_of_text = tokenizer.eos_token_id if isolates_documents(args) else None
        self.place = Place({}, [], 0, 0)  # position on this rank after the step in progress
        self.bad: dict[str, None] = {}  # an ordered set of lines about bad rows
        self.found: list[tuple[str, bool]] = []  # bad rows of the step that is being read
        self.joined: str | None = None
        self.shown = 0  # number of bad rows that were printed, or known before a resume
        # Bad rows that are not sent to the other ranks yet, and those that all ranks have.
        self.fresh: list[str] = []
        self.gathered: set[str] = set()
        # A copy, because two threads must not use one tokenizer.
        self.documents = DocumentTokenizer(copy.deepcopy(tokenizer))
        self.examples: Encoder | None = None  # created for the first example
        num_slots = global_batch(args, ctx.world_size)
        # Sequences of the whole run; there are no epochs.
        assert args.max_steps  # checked with the flags
        self.num_sequences = args.max_steps * num_slots
        chunk = max(1, args.shuffle_buffer // num_slots)
        self.layout = slots_of_rank(args, ctx.rank, ctx.world_size)
        numbers = [number for micro_batch in self.layout for number in micro_batch]
        self.slots = {n: Slot(n, num_slots, chunk, args, self._encode) for n in numbers}
        rows = source.splits["train"]
        self.reader = Reader(rows, self.documents.pieces, num_slots, args.seed, self._refuse)
        self.units = self.reader.units()
        facts = {"name": args.dataset, "sha256": source.fingerprint, "streaming": True}
        self.facts: dict[str, Any] = {**facts, "tokens": None, "blocks": None}  # for results.json
        self._ahead = batches.ReadAhead(self._read_steps(), STEPS_AHEAD)
        self._live: Iterator[batches.StepBatch] | None = None

    def progress(self) -> dict:
        """Return the state of all ranks for a checkpoint; every rank must call it.

        Returns:
            {"lanes": {number of a slot: its state}, "bad": sorted lines about all bad rows,
            "version": ROWS_VERSION}.
        """
        # A rank sends only the bad rows that are new since the last call.
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
        counts: dict[str, Any] = {"rows": rows}
        for name in ("truncated", "skipped"):
            counts[name] = sum(slot["counts"][name] for slot in progress["lanes"].values())
        text = ", ".join(f"{number:,} {name}" for name, number in counts.items())
        counts["bad_rows"] = progress["bad"]
        text += f", {len(progress['bad']):,} bad rows, in {self.place.passes + 1} passes"
        self.ctx.console.print0(f"📚 stream: {text}")
        one_kind = self.reader.one_kind
        return {**self.facts, "kind": one_kind.kind, "formats": one_kind.formats, **counts}

    def resume(self, state: dict | None) -> None:
        """Continue from the state in a checkpoint.

        Args:
            state: what `progress` returned; None for a run without --streaming.
        Raises:
            UserError: the checkpoint is from a run without --streaming or with another global batch
                size, or an earlier version divided the corpus into other rows.
        """
        slots = state["lanes"] if state else None
        num_slots = self.reader.num_slots
        if state is None or (slots and set(map(int, slots)) != set(range(num_slots))):
            raise UserError(
                "--resume: the checkpoint was written without --streaming or with another global "
                "batch size: use the flags of its run."
            )
        version = state.get("version", 1)
        if slots and _was_cut_otherwise(self.args, version):
            raise UserError(
                "--resume: the checkpoint was written by a version that read long text files (and "
                "WikiText) in other pieces, so its position in the corpus cannot be found: "
                "continue from its exported weights (--export_hf) in a new run."
            )
        self.bad, self.gathered = dict.fromkeys(state["bad"]), set(state["bad"])
        self.shown = len(self.bad)
        if not slots:  # before the first step
            return
        for number, slot in self.slots.items():
            slot.resume(slots[str(number)])
        begins = [slot.begin["reader"] for slot in self.slots.values() if slot.begin]
        begin = min(begins, key=lambda reader: reader["row"])
        if version < ROWS_VERSION:  # no position in the files: read the pass from its beginning
            begin = {**begin, "row": begin["first"], "rows": None, "part": 0}
        self.ctx.console.print0(f"⏩ Reading the stream again up to row {begin['row']:,}")
        self.units = self.reader.units(begin)
        states = {
            str(n): {**slots[str(n)], "counts": slot.counts} for n, slot in self.slots.items()
        }
        self.place = Place(states, [], begin["row"], begin["pass"])

    def step_batches(self, device: Any) -> Iterator[batches.StepBatch]:
        """Yield the step batches of this rank, from where the last caller stopped."""
        if self._live is None:
            self._live = batches.copy_ahead(self._ahead, device)
        for step_batch in self._live:
            self._arrive(step_batch.state)
            yield step_batch

    def _arrive(self, place: Place) -> None:
        """Record the position after the step that is trained on next, and print its bad rows."""
        if place.kind and not self.place.kind:
            tokenize.print_format(self.ctx, list(place.formats), place.kind)
            tokenize.warn_of_joined(self.ctx, self.args, place.joined)
            if use_plain_template(self.tokenizer, place.kind):
                self.ctx.console.warn(PLAIN_NOTICE)
        self.place = place
        for row, this_rank_only in place.bad:
            self.fresh.append(row)
            self.shown += 1
            if self.shown <= tokenize.SHOWN_BAD_ROWS and (this_rank_only or self.ctx.is_main):
                self.ctx.console.print(f"ℹ️  Left out: {row}")
            elif self.shown == tokenize.SHOWN_BAD_ROWS + 1:
                self.ctx.console.warn(
                    "More rows are left out: results.json lists all of them under dataset.bad_rows."
                )

    def _read_steps(self) -> Iterator[batches.StepBatch]:
        while True:
            micro_batches = [[self._next(number) for number in slots] for slots in self.layout]
            parts = (part for batch in micro_batches for sequence in batch for part in sequence)
            tokens = sum(len(ids) for ids, _ in parts)
            slots = {str(number): slot.state() for number, slot in self.slots.items()}
            bad_rows, self.found = self.found, []
            reader, one_kind = self.reader, self.reader.one_kind
            kind, formats = one_kind.kind, tuple(one_kind.formats)
            place = Place(slots, bad_rows, reader.row, reader.passes, kind, formats, self.joined)
            stacked = [micro_batch(b, self.padding, self.args.packing) for b in micro_batches]
            yield batches.StepBatch(stacked, tokens, place)

    def _next(self, number: int) -> list[Part]:
        """Read rows until a slot has its next sequence, and return its parts.

        Raises:
            UserError: no row can be used, of as many consecutive rows as the corpus has and at
                least 100.
        """
        slot, reader = self.slots[number], self.reader
        while (sequence := slot.next_sequence()) is None:
            if slot.refused > max(100, reader.rows_in_pass) and reader.passes:
                raise UserError(
                    "--streaming: no row of the corpus can be used: the rows are empty, or their "
                    "targets come after the first --seq_length tokens."
                )
            unit = next(self.units)
            if unit.slot in self.slots:
                self.slots[unit.slot].add(unit)
        end_of_text = self.end_of_text if reader.one_kind.kind == "text" else None
        return [(part, end_of_text) for part in sequence]

    def _encode(self, unit: Unit) -> tuple[np.ndarray | None, str | None]:
        """Return the ids of a row as `sequences` stores them, or None; and its flaw.

        The flaw is "truncated" or "skipped" if the row counts as such, or else None.
        """
        content, tokenizer = unit.content, self.documents.tokenizer
        if isinstance(content, Document):
            # A row is one piece, or several if it is long.
            pieces = [unit.piece] if unit.piece else list(self.documents.pieces(content))
            if not pieces:
                return None, "skipped"
            eos = tokenizer.eos_token_id
            separator = np.array([eos] if unit.begins and eos is not None else [], np.int64)
            return np.concatenate([separator, *self.documents.encode(pieces)]).astype(int), None
        if self.examples is None:
            use_plain_template(tokenizer, content.kind)
            self.examples = Encoder(tokenizer)
        self.joined = self.joined or content.joined
        [encoded] = self.examples.encode([content])
        if isinstance(encoded, BadRow):
            if unit.state["pass"] == 0:
                self._refuse(encoded, this_rank_only=True)
            return None, None
        ids = encoded[: self.args.seq_length]
        if not (ids[1:] >= 0).any():  # all targets are beyond seq_length
            return None, "skipped"
        return ids, "truncated" if len(encoded) > len(ids) else None

    def _refuse(self, row: BadRow, this_rank_only: bool = False) -> None:
        """Record a bad row, unless it is recorded already, for instance before a resume.

        Args:
            this_rank_only: the row was read by all ranks, and cannot be encoded by this one.
        """
        if str(row) in self.bad:
            return
        self.bad[str(row)] = None
        self.found.append((str(row), this_rank_only))
        if len(self.bad) > self.args.max_bad_rows:
            hopeless = row.whole_file and self.source.one_file
            hint = "" if hopeless else f"{tokenize.MAX_BAD_ROWS}{self.source.advice}"
            tokenize.refuse_bad_rows(list(self.bad), self.args.max_bad_rows, hint)


def slots_of_rank(args: Arguments, rank: int, world_size: int) -> list[list[int]]:
    """Return the numbers of the batch slots of a rank, one list for each micro-batch."""
    starts = [
        (micro_step * world_size + rank) * args.batch_size
        for micro_step in range(args.gradient_accumulation_steps)
    ]
    return [list(range(start, start + args.batch_size)) for start in starts]


def open_stream(
    args: Arguments, ctx: DistContext, tokenizer: Any
) -> tuple[Stream, Sequences, dict]:
    """Open the training stream and --validation_file; every rank must call it.

    Returns:
        (stream, sequences of --validation_file or none, facts for results.json).
    Raises:
        UserError: see `rows.open_for_streaming`; or --validation_file cannot be read.
        TrainingError: the corpus differs between the nodes.
    """
    options, commit = RowOptions.of(args, has_own_template(tokenizer)), None
    if not is_local_dataset(args.dataset):
        # All ranks read the same commit, even if the dataset changes on the hub meanwhile.
        commit = commit_on_hub(args.dataset, args.dataset_revision) if ctx.is_main else None
        commit = ctx.broadcast_from_rank0(commit) or args.dataset_revision
    source = open_for_streaming(args, options, commit)
    tokenize.print_files(source, ctx)
    require_equal_on_all_ranks(ctx.all_gather(source.fingerprint), "The corpus")
    train = Stream(args, ctx, tokenizer, source)
    validation = Sequences.none(train.padding)
    if args.validation_file:
        alone = args.replace(validation_file=None, eval_only=False)
        prepared = tokenize.tokenize_corpus(alone, ctx, tokenizer, args.validation_file)
        validation, facts = batches.open_split(prepared, "train", args, train.padding)
        if args.packing:
            validation = validation.pack()
            facts["blocks"] = validation.num_sequences
        train.facts["validation"] = {**facts, "bad_rows": prepared["bad_rows"]}
        tokenize.print_splits(ctx, args, {"validation": train.facts["validation"]}, tokenizer)
    return train, validation, train.facts


def _was_cut_otherwise(args: Arguments, version: int) -> bool:
    """Return whether an earlier version divided the corpus into other rows."""
    if not is_local_dataset(args.dataset):
        return version < 2 and args.dataset == "wikitext"
    files = files_of(Path(args.dataset), args.dataset, args.include)
    long_files = any(not has_rows(file) and file.stat().st_size > 1 << 16 for file in files)
    return version < ROWS_VERSION and long_files
