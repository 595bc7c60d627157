"""--streaming: sequences of a corpus that is read and tokenized during training.

The corpus is never complete in memory or on disk. A global batch has G sequences, and batch slot g
provides the g-th. Every group of G rows is distributed over the slots, one row each,
in an order drawn from the seed. A slot tokenizes its rows, cuts them into sequences and shuffles
these in chunks. Every rank reads all rows, and processes only the slots whose sequences it trains
on. Each step therefore has the same sequences for any number of ranks, and a checkpoint needs only
the position of each slot in the corpus, which is a few numbers.

A thread reads and tokenizes some steps ahead. Each step carries the position of the stream after
it, so that checkpoints and messages about bad rows exclude rows that were only read ahead.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.cli.arguments import Arguments, global_batch, isolates_documents
from support.cluster.context import DistContext, require_equal_on_all_ranks
from support.data import batches, tokenize
from support.data.chat import Encoder, has_own_template, use_plain_template
from support.data.formats import BadRow, Document, Example, OneKind, RowOptions
from support.data.rows import Source, open_for_streaming
from support.data.sequences import Padding, Part, Sequences, micro_batch, pack
from support.data.tokenize import DocumentTokenizer, Piece
from support.errors import UserError

# Steps that are read ahead, besides the one of `copy_ahead`. A few are enough, because the slots
# refill in different steps.
STEPS_AHEAD = 5
# Increase it when a corpus is divided into other rows, which invalidates positions in checkpoints.
ROWS_VERSION = 3
# See `Unit.state`.
START: dict[str, Any] = {"row": 0, "pass": 0, "first": 0, "rows": None, "part": 0}
# The state of a slot in a checkpoint. "reader": state of the unit at which its chunk of sequences
# begins; "offset": tokens of this unit in earlier chunks; "chunk": its number, from 1; "used": its
# sequences that were used; "counts": of rows, "counted" of which are included.
COUNTS = {"counted": 0, "truncated": 0, "skipped": 0}
NEW_SLOT: dict[str, Any] = {"reader": START, "offset": 0, "chunk": 0, "used": 0, "counts": COUNTS}


@dataclass(frozen=True)
class Unit:
    """A row, or a piece of a text file, that is assigned to a batch slot."""

    # The position before it, from which `Stream._read_units` continues: {"row": number of units
    # before it, in all passes; "pass": number of the pass; "first": value of "row" at the beginning
    # of the pass; "rows": position of its row in the corpus, None for the beginning; "part": for a
    # piece of a text file, the number of pieces before it in the file}. JSON.
    state: dict
    slot: int
    begins: bool  # whether an end-of-text token precedes it
    content: Document | Example
    piece: Piece | None = None  # of a text file


Row = tuple[Unit, int, np.ndarray]  # tokenized, with the number of tokens in earlier chunks


@dataclass(frozen=True)
class Place:
    """The position of the stream after a step, on this rank."""

    slots: dict[str, dict]  # {number of a slot: its state}, for the slots of this rank
    bad: int  # number of bad rows
    rows: int  # number of good rows (or pieces of text files) read so far, in all passes
    passes: int  # number of complete passes
    kind: str | None = None  # of the rows, "text", "chat" or "pair"; None before the first row
    formats: tuple[str, ...] = ()


class Stream:
    """The training sequences of --streaming."""

    def __init__(self, args: Arguments, ctx: DistContext, tokenizer: Any, source: Source) -> None:
        self.args, self.ctx, self.tokenizer, self.source = args, ctx, tokenizer, source
        self.padding = Padding.of(args, ctx.device.type)
        self.place = Place({}, 0, 0, 0)  # position on this rank after the step in progress
        self.bad: list[str] = []  # lines about bad rows, also those before a resume
        self.known_bad: set[str] = set()
        self.one_kind = OneKind()
        # The thread has a copy, because rank 0 may save the original at the same time.
        self.documents = DocumentTokenizer(copy.deepcopy(tokenizer))
        self.encoder = Encoder(self.documents.tokenizer)
        self.num_slots = global_batch(args, ctx.world_size)
        self.order_of_group = functools.lru_cache(2)(
            lambda group: np.random.default_rng([args.seed, group]).permutation(self.num_slots)
        )
        # Sequences of the whole run; there are no epochs.
        self.num_sequences = (args.max_steps or 0) * self.num_slots
        starts = [
            (micro_step * ctx.world_size + ctx.rank) * args.batch_size
            for micro_step in range(args.gradient_accumulation_steps)
        ]
        # The numbers of the slots of this rank, for each micro-batch.
        self.layout = [range(start, start + args.batch_size) for start in starts]
        numbers = list(itertools.chain.from_iterable(self.layout))
        self.states: dict[int, dict[str, Any]] = {n: _copy_of(NEW_SLOT) for n in numbers}
        self.waiting: dict[int, deque[Unit]] = {n: deque() for n in numbers}
        self.sequences = {n: self._sequences_of(n) for n in numbers}
        self.units, self.last, self.rows_in_pass = self._read_units(START), START, 0
        facts = {"name": args.dataset, "sha256": source.fingerprint, "streaming": True}
        self.facts: dict[str, Any] = {**facts, "tokens": None, "blocks": None}  # for results.json
        self._ahead = batches.read_ahead(self._read_steps(), STEPS_AHEAD)
        self._live: Iterator[batches.StepBatch] | None = None

    def progress(self) -> dict:
        """Return the state of all ranks for a checkpoint; every rank must call it."""
        ranks = self.ctx.all_gather((self.place.slots, self.bad[: self.place.bad]))
        slots = {slot: state for states, _ in ranks for slot, state in states.items()}
        rows = sorted({row for _, rows in ranks for row in rows})
        return {"lanes": slots, "bad": rows, "version": ROWS_VERSION}

    def summary(self) -> dict:
        """Stop reading, and return the facts for results.json; every rank must call it."""
        self._ahead.close()
        progress, rows = self.progress(), max(self.ctx.all_gather(self.place.rows))
        counts: dict[str, Any] = {"rows": rows}
        for name in ("truncated", "skipped"):
            counts[name] = sum(slot["counts"][name] for slot in progress["lanes"].values())
        text = ", ".join(f"{number:,} {name}" for name, number in counts.items())
        text += f", {len(progress['bad']):,} bad rows, in {self.place.passes + 1} passes"
        self.ctx.console.print0(f"📚 stream: {text}")
        kind = {"kind": self.place.kind, "formats": list(self.place.formats)}
        return {**self.facts, **kind, **counts, "bad_rows": progress["bad"]}

    def resume(self, state: dict | None) -> None:
        """Continue from the state in a checkpoint.

        Args:
            state: what `progress` returned; None for a run without --streaming.
        Raises:
            UserError: the checkpoint is from a run without --streaming or with another global batch
                size, or an earlier version divided the corpus into other rows.
        """
        slots = state["lanes"] if state else {}
        same = not slots or set(map(int, slots)) == set(range(self.num_slots))
        if state is None or not same or (slots and state.get("version") != ROWS_VERSION):
            raise UserError(
                "--resume: the checkpoint was written without --streaming, with another global "
                "batch size, or by a version that divided the corpus into other rows: use the "
                "flags of its run, or continue from its exported weights in a new run."
            )
        self.bad, self.known_bad = list(state["bad"]), set(state["bad"])
        self.place = Place({}, len(self.bad), 0, 0)
        if not slots:  # before the first step
            return
        for number in self.states:
            self.states[number] = _copy_of(slots[str(number)])
        begins = [state["reader"] for state in self.states.values()]
        self.last = begin = min(begins, key=lambda reader: reader["row"])
        self.ctx.console.print0(f"⏩ Reading the stream again up to row {begin['row']:,}")
        self.units = self._read_units(begin)
        own = {str(number): slots[str(number)] for number in self.states}
        self.place = Place(own, len(self.bad), begin["row"], begin["pass"])

    def step_batches(self, device: Any) -> Iterator[batches.StepBatch]:
        """Yield the step batches of this rank, from where the last caller stopped."""
        if self._live is None:
            self._live = batches.copy_ahead(self._ahead, device)
        for step_batch in self._live:
            place: Place = step_batch.state  # the position after it
            if not self.place.kind:
                tokenize.print_format(self.ctx, place.formats, place.kind, self.tokenizer)
            if place.bad > self.place.bad:
                rows = self.bad[: place.bad]
                tokenize.print_bad_rows(self.ctx.console, rows, self.place.bad)
            self.place = place
            yield step_batch

    # ------------------------------------------------------------- in the thread that reads ahead

    def _read_steps(self) -> Iterator[batches.StepBatch]:
        while True:
            sequences = [[next(self.sequences[n]) for n in numbers] for numbers in self.layout]
            parts = itertools.chain.from_iterable(itertools.chain.from_iterable(sequences))
            tokens = sum(len(ids) for ids, _ in parts)
            states = {str(n): _copy_of(state) for n, state in self.states.items()}
            kind, formats = self.one_kind.kind, tuple(self.one_kind.formats)
            rows, passes = self.last["row"] + 1, self.last["pass"]
            place = Place(states, len(self.bad), rows, passes, kind, formats)
            stacked = [micro_batch(some, self.padding, self.args.packing) for some in sequences]
            yield batches.StepBatch(stacked, tokens, place)

    def _sequences_of(self, number: int) -> Iterator[list[Part]]:
        """Yield the parts of each sequence of a slot, and update the state of the slot.

        Rows are tokenized until there are enough for a chunk of sequences, which is shuffled and
        then used one by one; then the next chunk follows.
        """
        args, state = self.args, self.states[number]
        resumes, refused = state["chunk"] > 0, 0  # the chunk is cut again
        # Tokenized rows, with the number of tokens of each that are in earlier chunks.
        rest, offset = list[Row](), state["offset"]
        full = max(1, args.shuffle_buffer // self.num_slots)  # sequences of a chunk
        while True:
            chunk = state["chunk"] + (not resumes)
            # The first chunks differ in size, so that not all slots refill in the same step.
            size = full if chunk > 1 else 1 + (full - 1) * (number + 1) // self.num_slots
            while not _is_enough(rest, size, args):
                unit = self._next_unit(number)
                if resumes and not rest and unit.state["row"] < state["reader"]["row"]:
                    continue
                ids = self._encode(unit, state["counts"])
                if ids is not None:
                    rest.append((unit, offset, ids))
                    offset = 0
                refused = 0 if ids is not None else refused + 1
                if self.rows_in_pass and refused > max(100, self.rows_in_pass):
                    raise UserError(
                        "--streaming: no row of the corpus can be used: the rows are empty, or "
                        "their targets come after the first --seq_length tokens."
                    )
            unit, at, _ = rest[0]
            sequences, rest = _cut_chunk(rest, size, args)
            order = np.random.default_rng([args.seed, number, chunk]).permutation(len(sequences))
            used = state["used"] if resumes else 0
            state |= {"reader": unit.state, "offset": at, "chunk": chunk, "used": used}
            resumes = False
            isolated = isolates_documents(args) and self.one_kind.kind == "text"
            end_of_text = self.tokenizer.eos_token_id if isolated else None
            for index in order[used:]:
                state["used"] += 1
                yield [(part, end_of_text) for part in sequences[index]]

    def _next_unit(self, number: int) -> Unit:
        """Read rows until there is one for a slot."""
        while not self.waiting[number]:
            unit = next(self.units)
            self.last = unit.state
            if unit.slot in self.waiting:
                self.waiting[unit.slot].append(unit)
        return self.waiting[number].popleft()

    def _read_units(self, state: dict) -> Iterator[Unit]:
        """Yield the units from a state on, pass after pass, without end.

        A slot gets a whole row, or a whole article of WikiText. A text file is assigned in pieces,
        so that all slots have a share of a single file. If the next piece of a slot does not
        directly follow its previous one, an end-of-text token separates the two.
        """
        number, first, start, skip = state["row"], state["first"], state["rows"], state["part"]
        for passes in itertools.count(state["pass"]):
            for position, content in self.source.splits["train"](start):
                row = self.one_kind.check(content)
                if isinstance(row, BadRow):
                    self._refuse(row, passes)
                    continue
                pieces: Iterable[Piece | None] = [None]
                if isinstance(row, Document) and row.is_file:
                    pieces = self.documents.pieces(row)
                for part, piece in itertools.islice(enumerate(pieces), skip, None):
                    slot = self._slot_of(number)
                    begins = number > 0 and not (part and slot == self._slot_of(number - 1))
                    place = {"pass": passes, "first": first, "rows": position}
                    yield Unit({"row": number, "part": part, **place}, slot, begins, row, piece)
                    number += 1
                skip = 0
            if number == first:
                raise UserError("--streaming: the corpus has no row that can be used.")
            self.rows_in_pass, first, start, skip = number - first, number, None, 0

    def _slot_of(self, row: int) -> int:
        # From 1: existing checkpoints have positions in an order that is counted in this way.
        group, place = divmod(row + 1, self.num_slots)
        return int(self.order_of_group(group)[place])

    def _encode(self, unit: Unit, counts: dict[str, int]) -> np.ndarray | None:
        """Return the ids of a row as `sequences` stores them, or None if it cannot be used."""
        content, flaw, ids = unit.content, "", None
        if isinstance(content, Document):
            if self.args.packing:
                raise UserError(batches.TEXT_IS_PACKED)
            # A row is one piece, or several if it is long.
            pieces = [unit.piece] if unit.piece else list(self.documents.pieces(content))
            eos = self.tokenizer.eos_token_id
            separator = np.array([eos] if unit.begins and eos is not None else [], np.int64)
            if pieces:
                ids = np.concatenate([separator, *self.documents.encode(pieces)]).astype(int)
            flaw = "" if pieces else "skipped"
        else:
            use_plain_template(self.documents.tokenizer, content.kind)
            [encoded] = self.encoder.encode([content])
            if isinstance(encoded, BadRow):
                self._refuse(encoded, unit.state["pass"])
                return None
            if (encoded[1 : self.args.seq_length] >= 0).any():  # a target remains
                ids = encoded[: self.args.seq_length]
                flaw = "truncated" if len(encoded) > len(ids) else ""
            else:
                flaw = "skipped"
        row = unit.state["row"]
        if flaw and unit.state["pass"] == 0 and row >= counts["counted"]:
            counts[flaw] += 1
        counts["counted"] = max(counts["counted"], row + 1)
        return ids

    def _refuse(self, row: BadRow, passes: int) -> None:
        """Record a bad row of the first pass, if it is not recorded, as before a resume."""
        if passes == 0 and str(row) not in self.known_bad:
            self.bad.append(str(row))
            self.known_bad.add(str(row))
            tokenize.check_bad_rows(self.bad, self.args.max_bad_rows)


def _copy_of(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "counts": dict(state["counts"])}


def _is_enough(rest: list[Row], size: int, args: Arguments) -> bool:
    """Return whether there are the rows of a chunk of `size` sequences."""
    if not rest:
        return False
    tokens = sum(len(ids) - offset for _, offset, ids in rest)
    if args.packing:  # as many examples as there is room for, and the next one
        return tokens > size * args.seq_length
    if rest[0][0].content.kind == "text":
        return tokens >= size * args.seq_length
    return len(rest) == size


def _cut_chunk(
    rest: list[Row], size: int, args: Arguments
) -> tuple[list[list[np.ndarray]], list[Row]]:
    """Return about `size` sequences, and the rows of the next chunk."""
    if args.packing:
        examples = [ids for _, _, ids in rest[:-1]]
        members, ends = pack(np.array([len(ids) for ids in examples]), args.seq_length)
        return [[examples[n] for n in part] for part in np.split(members, ends[:-1])], rest[-1:]
    if rest[0][0].content.kind != "text":
        return [[ids] for _, _, ids in rest], []
    stream = np.concatenate([ids[at:] for _, at, ids in rest])
    needed = size * args.seq_length
    unit, _, ids = rest[-1]  # the only row that may have tokens that are not used
    surplus = len(stream) - needed
    sequences = [[part] for part in stream[:needed].reshape(size, args.seq_length)]
    return sequences, [(unit, len(ids) - surplus, ids)] if surplus else []


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
    options = RowOptions.of(args, has_own_template(tokenizer))
    source = open_for_streaming(args, options, ctx)
    for line in source.counts:
        ctx.console.print0(f"📂 {line}")
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
