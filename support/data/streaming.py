"""--streaming: sequences of a corpus that is read and tokenized during training.

A global batch has G sequences, and batch slot g provides the g-th. Every group of G rows is
distributed over the slots in an order drawn from the seed. A slot tokenizes its rows, cuts them
into sequences and shuffles these in chunks. Every rank reads all rows, and processes only the slots
that it trains on. So each step has the same sequences for any number of ranks, and a checkpoint
needs only the position of each slot in the corpus.

A thread reads some steps ahead. Each step carries the state of the stream after it, so that
checkpoints and messages exclude rows that were only read ahead.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from support import console
from support.cli.checks import is_local_dataset
from support.cluster.context import DistContext, require_equal_on_all_ranks
from support.data import batches, tokenize
from support.data.chat import Encoder, use_plain_template
from support.data.corpus import TEXT_IS_PACKED, open_split
from support.data.examples import encode_example
from support.data.facts import DatasetFacts, Kinds
from support.data.packing import pack
from support.data.row_files import reading, rows_of_files
from support.data.rows import BadRow, Row, RowOptions, Source, check_kind
from support.data.sequences import Padding, Part, Sequences, micro_batch
from support.data.sources import announce
from support.data.special_tokens import document_start, end_finder
from support.data.stream_state import (
    START,
    Counts,
    Place,
    Progress,
    StreamState,
    new_slot,
    new_stream,
)
from support.errors import TrainingError, UserError, redact
from support.files.folders import files_of
from support.settings.data import DataSettings
from support.settings.training import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPARED_BYTES = 1 << 16  # of the beginning and the end of a file, in the digest of a stream
STEPS_AHEAD = 5  # besides the one of `copy_ahead`; a few, because slots refill in different steps
# Increase it when a corpus is divided into other rows, which invalidates positions in checkpoints.
ROWS_VERSION = 3

# Position of a unit, its tokens that are in earlier chunks, and all its tokens.
Ids = tuple[Place, int, np.ndarray]


class Unit(NamedTuple):
    """A row, or a piece of a text file, that is assigned to a batch slot."""

    place: Place
    slot: int
    begins: bool  # whether it does not directly follow the previous piece of its slot
    row: Row
    piece: tokenize.Piece | None  # of a text file


class Stream:
    """The training sequences of --streaming."""

    def __init__(
        self,
        data: DataSettings,
        training: TrainingSettings,
        ctx: DistContext,
        tokenizer: PreTrainedTokenizerBase,
        padding: Padding,
        source: Source,
    ) -> None:
        self.data, self.seed, self.ctx = data, training.seed, ctx
        self.tokenizer, self.padding, self.source = tokenizer, padding, source
        self.state = new_stream()  # after the step in progress
        self.bad: dict[str, None] = {}  # lines about bad rows in their order, also before a resume
        self.kinds: Kinds = {"kind": None, "formats": []}
        # The thread has a copy, because rank 0 may save the original at the same time.
        self.documents = tokenize.DocumentTokenizer(copy.deepcopy(tokenizer))
        self.encoder = Encoder(self.documents.tokenizer)
        self.ends = self.state["ends"].copy()
        # The ids before the first document, and before each later one.
        self.first, self.later = (document_start(tokenizer, is_first) for is_first in (True, False))
        self.num_slots = training.global_batch(ctx.world_size)
        self.order_of_group = functools.lru_cache(2)(
            lambda group: np.random.default_rng([self.seed, group]).permutation(self.num_slots)
        )
        # Of the run, without epochs.
        self.num_sequences = (training.max_steps or 0) * self.num_slots
        batch = training.batch_size
        # The numbers of the slots of this rank, for each micro-batch.
        self.layout = [
            range(first, first + batch)
            for first in range(ctx.rank * batch, self.num_slots, batch * ctx.world_size)
        ]
        numbers = list(itertools.chain.from_iterable(self.layout))
        self.slots = {n: new_slot() for n in numbers}
        self.waiting: dict[int, deque[Unit]] = {n: deque() for n in numbers}
        self.sequences = {n: self._sequences_of(n) for n in numbers}
        self.units, self.last, self.rows_in_pass = self._read_units(START), START, 0
        self.facts: DatasetFacts = {"name": data.dataset_name, "sha256": source.fingerprint}
        self.facts |= {"streaming": True, "tokens": None, "blocks": None}  # for results.json
        self._ahead = read_ahead(self._read_steps(), STEPS_AHEAD)
        self._live: Iterator[batches.StepBatch] | None = None

    def progress(self) -> Progress:
        """Return the state of all ranks for a checkpoint; every rank must call it."""
        ranks = self.ctx.all_gather((self.state["slots"], list(self.bad)[: self.state["bad"]]))
        slots = {slot: state for states, _ in ranks for slot, state in states.items()}
        rows = sorted({row for _, rows in ranks for row in rows})
        return {"lanes": slots, "bad": rows, "version": ROWS_VERSION}

    def summary(self) -> DatasetFacts:
        """Stop reading, and return the facts for results.json; every rank must call it."""
        self._ahead.close()
        progress = self.progress()
        counts = {"rows": max(self.ctx.all_gather(self.state["rows"]))}
        of_slots = [slot["counts"] for slot in progress["lanes"].values()]
        counts["truncated"] = sum(slot["truncated"] for slot in of_slots)
        counts["skipped"] = sum(slot["skipped"] for slot in of_slots)
        kind = {"kind": self.state["kind"], "formats": self.state["formats"]}
        return {**self.facts, **kind, **counts, "bad_rows": progress["bad"]}

    def resume(self, state: Progress | None) -> None:
        """Continue from the state in a checkpoint.

        Args:
            state: what `progress` returned; None for a run without --streaming.
        Raises:
            UserError: the state is of another kind of run.
        """
        slots = state["lanes"] if state else {}
        same = not slots or set(map(int, slots)) == set(range(self.num_slots))
        if state is None or not same or (slots and state.get("version") != ROWS_VERSION):
            raise UserError(
                "--resume: the checkpoint was written without --streaming, with another global "
                "batch size, or by a version that divided the corpus into other rows: use the "
                "flags of its run, or continue from its exported weights in a new run."
            )
        self.bad = dict.fromkeys(state["bad"])
        self.state["bad"] = len(self.bad)
        if not slots:  # before the first step
            return
        own = {str(number): slots[str(number)] for number in self.slots}
        self.slots |= {int(number): copy.deepcopy(slot) for number, slot in own.items()}
        self.last = begin = min(
            (slot["reader"] for slot in own.values()), key=lambda place: place["row"]
        )
        console.print0(f"⏩ Reading the stream again up to row {begin['row']:,}")
        self.units = self._read_units(begin)
        self.state |= {"slots": own, "rows": begin["row"], "passes": begin["pass"]}

    def step_batches(self, device: torch.device) -> Iterator[batches.StepBatch]:
        """Yield the step batches of this rank, from where the last caller stopped."""
        if self._live is None:
            self._live = batches.copy_ahead(self._ahead, device)
        for step_batch in self._live:
            before = self.state
            assert step_batch.state is not None  # see _read_steps
            self.state = step_batch.state
            self._print_changes(before, self.state)
            yield step_batch

    def first_sequence(self) -> list[Part]:
        """Return the parts of this rank's first sequence, instead of step batches."""
        parts = next(self.sequences[min(self.slots)])
        self._print_changes(new_stream(), self._state_of_reading())
        return parts

    def _print_changes(self, before: StreamState, after: StreamState) -> None:
        """Print the format of the first rows, whether their answers end, and new bad rows."""
        if not before["kind"]:
            kind, ends = after["kind"], after["ends"]
            tokenize.print_format(after["formats"], kind, self.tokenizer)
            if kind != "text" and not ends["trained"]:
                is_cut, read = ends["cut"] > 0, ends["examples"]
                tokenize.warn_of_no_end(self.tokenizer, kind == "chat", is_cut, read)
        for row in list(self.bad)[before["bad"] : after["bad"]]:
            console.warn(f"Left out: {row}")

    # ------------------------------------------------------------- in the thread that reads ahead

    @functools.cached_property
    def _end_of_answer(self) -> Callable[[np.ndarray], int]:
        ends = self.encoder.ends_of_turns if self.kinds["kind"] == "chat" else ()
        return end_finder(self.documents.tokenizer, ends)

    def _read_steps(self) -> Iterator[batches.StepBatch]:
        while True:
            sequences = [[next(self.sequences[n]) for n in numbers] for numbers in self.layout]
            tokens = sum(len(ids) for some in sequences for parts in some for ids, _ in parts)
            stacked = [micro_batch(some, self.padding, self.data.packing) for some in sequences]
            yield batches.StepBatch(stacked, tokens, self._state_of_reading())

    def _state_of_reading(self) -> StreamState:
        """Return the state of this rank after what was read."""
        return {
            "slots": {str(number): copy.deepcopy(slot) for number, slot in self.slots.items()},
            "bad": len(self.bad),
            "rows": self.last["row"] + 1,
            "passes": self.last["pass"],
            **copy.deepcopy(self.kinds),
            "ends": self.ends.copy(),
        }

    def _sequences_of(self, number: int) -> Iterator[list[Part]]:
        """Yield the parts of each sequence of a slot, and update the state of the slot.

        Rows are tokenized until there are enough for a chunk of sequences, which is shuffled and
        then used one by one; then the next chunk follows.
        """
        slot = self.slots[number]
        resumes, refused = slot["chunk"] > 0, 0  # the chunk is cut again
        rest, offset = list[Ids](), slot["offset"]
        full = max(1, self.data.shuffle_buffer // self.num_slots)  # sequences of a chunk
        while True:
            chunk = slot["chunk"] + (not resumes)
            # The first chunks differ in size, so that not all slots refill in the same step.
            size = full if chunk > 1 else 1 + (full - 1) * (number + 1) // self.num_slots
            while (cut := self._cut_chunk(rest, size)) is None:
                unit = self._next_unit(number)
                if resumes and not rest and unit.place["row"] < slot["reader"]["row"]:
                    continue
                ids = self._encode(unit, slot["counts"])
                if ids is not None:
                    rest.append((unit.place, offset, ids))
                    offset = 0
                refused = 0 if ids is not None else refused + 1
                if self.rows_in_pass and refused > max(100, self.rows_in_pass):
                    raise UserError(
                        "--streaming: no row of the corpus can be used: the rows are empty, or "
                        "their targets come after the first --seq_length tokens."
                    )
            reader, at, _ = rest[0]
            sequences, rest = cut
            order = np.random.default_rng([self.seed, number, chunk]).permutation(len(sequences))
            used = slot["used"] if resumes else 0
            slot |= {"reader": reader, "offset": at, "chunk": chunk, "used": used}
            resumes = False
            isolated = self.data.isolates_documents and self.kinds["kind"] == "text"
            end_of_text = self.tokenizer.eos_token_id if isolated else None
            for index in order[used:]:
                slot["used"] += 1
                yield [(part, end_of_text) for part in sequences[index]]

    def _cut_chunk(
        self, rest: list[Ids], size: int
    ) -> tuple[list[list[np.ndarray]], list[Ids]] | None:
        """Return about `size` sequences, and the rows of the next chunk; None: more are needed."""
        length, tokens = self.padding.seq_length, sum(len(ids) - at for _, at, ids in rest)
        needed = size * length
        if self.data.packing:  # as many examples as there is room for, and the next one
            if tokens <= needed:
                return None
            examples = [ids for _, _, ids in rest[:-1]]
            members, ends = pack(np.array([len(ids) for ids in examples]), length)
            packed = [[examples[n] for n in part] for part in np.split(members, ends[:-1])]
            return packed, rest[-1:]
        if self.kinds["kind"] != "text":
            return ([[ids] for _, _, ids in rest], []) if len(rest) == size else None
        if tokens < needed:
            return None
        stream = np.concatenate([ids[at:] for _, at, ids in rest])
        sequences = [[part] for part in stream[:needed].reshape(size, -1)]
        place, _, ids = rest[-1]  # the only row that may have tokens that are not used
        return sequences, [(place, len(ids) - (tokens - needed), ids)] if tokens > needed else []

    def _next_unit(self, number: int) -> Unit:
        """Read rows until there is one for a slot."""
        while not self.waiting[number]:
            unit = next(self.units)
            self.last = unit.place
            if unit.slot in self.waiting:
                self.waiting[unit.slot].append(unit)
        return self.waiting[number].popleft()

    def _read_units(self, begin: Place) -> Iterator[Unit]:
        """Yield the units from a place on, pass after pass, without end.

        A slot gets a whole row, or a whole article of WikiText. A text file is assigned in pieces,
        so that all slots have a share of a single file. If the next piece of a slot does not
        directly follow its previous one, it begins as a document does.
        """
        number, first, start, skip = begin["row"], begin["first"], begin["rows"], begin["part"]
        for passes in itertools.count(begin["pass"]):
            for position, content in self.source.splits["train"](start):
                row = check_kind(content, self.kinds)
                if isinstance(row, BadRow):
                    self._refuse(row, passes)
                    continue
                pieces: Iterable[tokenize.Piece | None] = [None]
                if row.is_file:
                    pieces = self.documents.pieces(row.pieces)
                for part, piece in itertools.islice(enumerate(pieces), skip, None):
                    slot = self._slot_of(number)
                    begins = not (number and part and slot == self._slot_of(number - 1))
                    place: Place = {
                        "row": number,
                        "part": part,
                        "pass": passes,
                        "first": first,
                        "rows": position,
                    }
                    yield Unit(place, slot, begins, row, piece)
                    number += 1
                skip = 0
            if number == first:
                raise UserError("--streaming: the corpus has no row that can be used.")
            self.rows_in_pass, first, start, skip = number - first, number, None, 0

    def _slot_of(self, row: int) -> int:
        # From 1: existing checkpoints have positions in an order that is counted in this way.
        group, place = divmod(row + 1, self.num_slots)
        return int(self.order_of_group(group)[place])

    def _encode(self, unit: Unit, counts: Counts) -> np.ndarray | None:
        """Return the ids of a row as `sequences` stores them, or None if it cannot be used."""
        flaw: Literal["", "truncated", "skipped"] = ""
        ids = None
        if unit.row.kind == "text":
            if self.data.packing:
                raise UserError(TEXT_IS_PACKED)
            # A row is one piece, or several if it is long.
            pieces = [unit.piece] if unit.piece else list(self.documents.pieces(unit.row.pieces))
            start = self.later if unit.place["row"] else self.first
            start = start if unit.begins else []
            if pieces:
                parts = [np.array(start, np.int64), *self.documents.encode(pieces)]
                ids = np.concatenate(parts).astype(int)
            flaw = "" if pieces else "skipped"
        else:
            if unit.row.kind == "chat":
                use_plain_template(self.documents.tokenizer)
            encoded = encode_example(self.encoder, unit.row)
            if isinstance(encoded, BadRow):
                self._refuse(encoded, unit.place["pass"])
                return None
            ids = encoded[: self.padding.seq_length]
            flaw = "truncated" if len(encoded) > len(ids) else ""
            if not (ids[1:] >= 0).any():  # no target remains
                ids, flaw = None, "skipped"
            else:
                end = self._end_of_answer(encoded)
                self.ends["trained"] += 0 < end <= len(ids)
                self.ends["cut"] += end > len(ids)
                self.ends["examples"] += 1
        row = unit.place["row"]
        if flaw and unit.place["pass"] == 0 and row >= counts["counted"]:
            counts[flaw] += 1
        counts["counted"] = max(counts["counted"], row + 1)
        return ids

    def _refuse(self, row: BadRow, passes: int) -> None:
        """Record a bad row of the first pass, if it is not recorded, as before a resume."""
        line = redact(str(row))  # checkpoints contain it
        if passes == 0 and line not in self.bad:
            self.bad[line] = None
            tokenize.check_bad_rows(list(self.bad), self.data.max_bad_rows)


def read_ahead(
    steps: Iterator[batches.StepBatch], depth: int
) -> Generator[batches.StepBatch, None, None]:
    """Read up to `depth` steps of an endless iterator ahead, in a thread, in their order.

    An error is raised where its step would be. Nothing is read before the first step is requested,
    because a stream may have to be resumed before.
    """
    thread, items = ThreadPoolExecutor(1, "read ahead"), deque[Future]()
    try:
        while True:
            while len(items) <= depth:
                items.append(thread.submit(next, steps))
            yield items.popleft().result()
    finally:  # wait for the item in progress, but not for a network that hangs
        thread.shutdown(wait=False, cancel_futures=True)
        wait([item for item in items if not item.cancelled()], 30)


def open_stream(
    data: DataSettings,
    training: TrainingSettings,
    ctx: DistContext,
    tokenizer: PreTrainedTokenizerBase,
    padding: Padding,
) -> tuple[Stream, Sequences, DatasetFacts]:
    """Open the training stream and --validation_file; every rank must call it.

    Returns:
        (stream, sequences of --validation_file or none, facts for results.json).
    Raises:
        UserError: see `open_for_streaming`; or --validation_file cannot be read.
        TrainingError: the corpus differs between the nodes.
    """
    announce(data)
    source = open_for_streaming(data, RowOptions.of(data, tokenizer), ctx)
    require_equal_on_all_ranks(ctx.all_gather(source.fingerprint), "The corpus")
    train = Stream(data, training, ctx, tokenizer, padding, source)
    validation = Sequences.none(padding)
    if file := data.validation_file:
        alone = replace(data, validation_file=None)
        prepared = tokenize.tokenize_corpus(alone, ctx, tokenizer, file, eval_only=False)
        validation, facts = open_split(prepared, "train", data, padding)
        if data.packing:
            validation = validation.pack()
            facts["blocks"] = validation.num_sequences
        train.facts["validation"] = {**facts, "bad_rows": prepared["bad_rows"]}
        tokenize.print_splits({"validation": facts}, tokenizer, "rows")
    return train, validation, train.facts


def _size_and_edges(file: Path) -> bytes:
    """Return what the digest of a stream has of a file: its size, its beginning and its end."""
    with open(file, "rb") as stream:
        size, begin = os.fstat(stream.fileno()).st_size, stream.read(COMPARED_BYTES)
        stream.seek(max(0, size - COMPARED_BYTES))
        return f"\0{size}".encode() + begin + stream.read(COMPARED_BYTES)


def _check_unchanged(known: dict[Path, tuple[int, bytes]], file: Path) -> None:
    """Raise a TrainingError if a file of a stream is not the one that was opened.

    Args:
        known: for each file the time of its last modification, and a digest of `_size_and_edges`.
    """
    time, digest = known[file]
    try:
        # Most files keep their time. One whose time was set only is still the same.
        if file.stat().st_mtime_ns == time:
            return
        if hashlib.sha256(_size_and_edges(file)).digest() == digest:
            return
        problem = "has changed"
    except OSError as error:
        problem = f"cannot be read any more ({error.strerror or error})"
    raise TrainingError(
        f"{file} {problem} since the run started, and --streaming reads it during training: do "
        "not change the dataset until the run ends. With the same files --resume continues from a "
        "checkpoint; other files need a new run."
    )


def open_for_streaming(data: DataSettings, options: RowOptions, ctx: DistContext) -> Source:
    """Open the training split of --dataset for --streaming; every rank must call it.

    The fingerprint covers the beginnings and ends of files, which are never read completely.
    """
    name = data.dataset_name
    digest = hashlib.sha256(f"{data.dataset_config}\0{data.text_column}".encode())
    if data.prompt_column or data.completion_column:  # else checkpoints of earlier runs stay valid
        digest.update(repr(options.columns).encode())
    if is_local_dataset(name):
        files = files_of(Path(name), name, data.include)
        known = {}
        for file in files:
            with reading(file):
                time, content = file.stat().st_mtime_ns, _size_and_edges(file)
            known[file] = time, hashlib.sha256(content).digest()
            digest.update(os.fsencode(file.name) + content)
        check = functools.partial(_check_unchanged, known)
        rows = functools.partial(rows_of_files, files, options, check)
        return Source(digest.hexdigest(), {"train": rows})
    from support.data.row_hub import builder_of, loading, rows_of_table

    # All ranks read the same commit, even if the dataset changes on the hub meanwhile.
    config, commit = data.dataset_config, None
    if ctx.is_main:
        commit = builder_of(name, config, data.dataset_revision).hash
    commit = ctx.broadcast_from_rank0(commit)
    with loading(name):
        builder = builder_of(name, config, commit)
        table = builder.as_streaming_dataset(split=data.train_split or "train")
    digest.update(f"{name}\0{commit}".encode())
    digest.update(f"\0{data.train_split}".encode() if data.train_split else b"")
    rows = functools.partial(rows_of_table, table, name, f"--dataset {name}", options)
    return Source(digest.hexdigest(), {"train": rows})
