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
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from support.cli.arguments import global_batch, isolates_documents
from support.cli.paths import is_local_dataset
from support.cluster.context import DistContext
from support.data import batches, tokenize
from support.data.chat import PLAIN_NOTICE, Encoder, has_own_template, use_plain_template
from support.data.formats import BadRow, RowOptions
from support.data.long_documents import DocumentTokenizer
from support.data.packing import pack
from support.data.rows import has_rows
from support.data.stream_reader import Item, Reader, StreamCorpus, files_to_read, open_corpus
from support.errors import UserError
from support.labels import IGNORED

# Steps that are read ahead, besides the one of `copy_ahead`. A few are enough, because the slots
# refill in different steps.
STEPS_AHEAD = 5
# Increase it when a corpus is divided into other rows, which invalidates positions in checkpoints.
ROWS_VERSION = 2


class BatchSlot:
    """A batch slot, which provides one sequence at the same position of every global batch.

    Rows are tokenized until there are enough for a chunk of sequences, which is shuffled and then
    used one by one; then the next chunk follows. The state of a slot is the position at which its
    chunk begins, and the number of sequences of the chunk that were used.

    Args:
        chunk: number of sequences that are shuffled together.
    """

    def __init__(self, number: int, slots: int, chunk: int, args, encode: Callable):
        self.number, self.size, self.packing = number, chunk, args.packing
        self.seq_length, self.seed = args.seq_length, args.seed
        self.encode = encode
        # The first chunks differ in size, so that not all slots refill in the same step.
        self.early = 1 + (chunk - 1) * (number + 1) // slots
        self.waiting: deque[Item] = deque()
        self.first = 0  # number of the first row that is still needed
        self.begin: dict | None = None
        self.chunks, self.used = 0, 0
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
        """Return the next sequence: ids of a text, or (ids, labels) of an example.

        With --packing it is the result of `join_examples`.
        """
        while not self.sequences or self.used == len(self.sequences):
            used = 0 if self.sequences else self.used  # may be greater than 0 after a resume
            self.chunks += 1
            size = self.early if self.chunks == 1 else self.size
            if not self._is_text(reader):
                read_chunk = self._packed_chunk if self.packing else self._example_chunk
            elif self.packing:
                raise UserError(batches.TEXT_IS_PACKED)
            else:
                read_chunk = self._text_chunk
            sequences = read_chunk(size, reader)
            generator = np.random.default_rng([self.seed, self.number, self.chunks])
            order = generator.permutation(len(sequences))
            # A chunk may be smaller after a resume with other flags (--resume_force).
            self.sequences, self.used = [sequences[i] for i in order], min(used, len(order))
        self.used += 1
        return self.sequences[self.used - 1]

    def _is_text(self, reader: Reader) -> bool:
        while not (self.waiting or self.rest):
            reader.pull()
        item = self.rest[0][0] if self.rest else self.waiting[0]
        return item.content.kind == "text"

    def _tokenize(self, reader: Reader) -> tuple[Item, int, object]:
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
                    "--streaming: no row of the corpus can be used: the rows are empty, or their "
                    "targets come after the first --seq_length tokens."
                )

    def _text_chunk(self, size: int, reader: Reader) -> list[np.ndarray]:
        needed = size * self.seq_length
        available = sum(len(ids) - offset for _, offset, ids in self.rest)
        while available < needed:
            self.rest.append(self._tokenize(reader))
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
        rows = [self._tokenize(reader) for _ in range(size)]
        self.begin = {"reader": rows[0][0].state, "offset": 0}
        return [encoded for _, _, encoded in rows]

    def _packed_chunk(self, size: int, reader: Reader) -> list:
        """Return about `size` sequences with as many examples as `size` sequences have room for."""
        rows, room = [], size * self.seq_length
        while room >= 0:
            rows.append(self.rest.pop() if self.rest else self._tokenize(reader))
            room -= len(rows[-1][2][0])
        self.rest = [rows.pop()]  # there was no room for it
        self.begin = {"reader": rows[0][0].state, "offset": 0}
        examples = [encoded for _, _, encoded in rows]
        members, ends = pack(np.array([len(ids) for ids, _ in examples]), self.seq_length)
        return [
            batches.join_examples([examples[member] for member in part])
            for part in np.split(members, ends[:-1])
        ]


@dataclass(frozen=True)
class Place:
    """The position of the stream after a step, on this rank."""

    slots: dict[str, dict]  # {number of a slot: its state}, for the slots of this rank
    # (line about a row, whether only this rank has it) for each bad row of this step.
    bad: list[tuple[str, bool]]
    rows: int  # number of good rows (or parts of text files) read so far, in all passes
    passes: int  # number of complete passes
    # The kind of the rows, "text", "chat" or "pair"; None before the first row.
    kind: str | None = None
    formats: tuple[str, ...] = ()


@dataclass
class RowEncoder:
    """The tokenizer of the rows of a stream."""

    documents: DocumentTokenizer  # of the documents; its tokenizer is also that of the examples
    seq_length: int  # tokens to which examples are truncated
    refuse: Callable[[BadRow], None]  # called with examples of the first pass that are not valid
    examples: Encoder | None = None  # created for the first example

    def encode(self, item: Item) -> tuple:
        """Return (token ids of a text, or (ids, labels) of an example, or None; flaw).

        They are None if the row cannot be used. The flaw is "truncated" or "skipped" if the row
        counts as such, or else None.
        """
        return (self._text if item.content.kind == "text" else self._example)(item)

    def _text(self, item: Item) -> tuple[np.ndarray | None, str | None]:
        text = "".join(item.content.pieces)
        if not text:
            return None, "skipped"
        eos = self.documents.tokenizer.eos_token_id
        separator = [eos] if item.begins and eos is not None else []
        ids = self.documents.part_ids(item.part) if item.part else self.documents.ids(text)
        return np.array([*separator, *ids], dtype=np.int64), None

    def _example(self, item: Item) -> tuple[tuple[np.ndarray, np.ndarray] | None, str | None]:
        if self.examples is None:
            use_plain_template(self.documents.tokenizer, item.content.kind)
            self.examples = Encoder(self.documents.tokenizer)
        [encoded] = self.examples.encode([item.content])
        if isinstance(encoded, BadRow):
            if item.state["pass"] == 0:
                self.refuse(encoded)
            return None, None
        ids, mask = (array[: self.seq_length].astype(np.int64) for array in encoded)
        if not mask[1:].any():  # all targets are beyond seq_length
            return None, "skipped"
        flaw = "truncated" if len(encoded[0]) > self.seq_length else None
        return (ids, np.where(mask, ids, IGNORED)), flaw


class Stream:
    """The training sequences of --streaming, used like a TokenFile."""

    def __init__(self, args, ctx: DistContext, tokenizer, corpus: StreamCorpus):
        self.args, self.ctx, self.tokenizer, self.corpus = args, ctx, tokenizer, corpus
        self.end_of_text = tokenizer.eos_token_id if isolates_documents(args) else None
        self.place = Place({}, [], 0, 0)  # position on this rank after the step in progress
        self.bad: dict[str, None] = {}  # an ordered set of lines about bad rows
        self.found: list[tuple[str, bool]] = []  # bad rows of the step that is being read
        self.shown = 0  # number of bad rows that were printed, or known before a resume
        # Bad rows that are not sent to the other ranks yet, and those that all ranks have.
        self.fresh, self.gathered = [], set()
        # A copy, because two threads must not use one tokenizer.
        documents = DocumentTokenizer(copy.deepcopy(tokenizer))
        encoder = RowEncoder(
            documents, args.seq_length, lambda row: self._refuse(row, this_rank_only=True)
        )
        num_slots = global_batch(args, ctx.world_size)
        # Sequences of the whole run; there are no epochs.
        self.num_sequences = args.max_steps * num_slots
        chunk = max(1, args.shuffle_buffer // num_slots)
        self.layout = slots_of_rank(args, ctx.rank, ctx.world_size)
        self.slots = {
            number: BatchSlot(number, num_slots, chunk, args, encoder.encode)
            for micro_batch in self.layout
            for number in micro_batch
        }
        self.reader = Reader(
            corpus.open_rows, documents.parts, self.slots, num_slots, args.seed, self._refuse
        )
        nulls = {"tokens": None, "blocks": None}
        # Facts about the corpus for results.json.
        self.facts = {"name": args.dataset, "sha256": corpus.sha256, **nulls, "streaming": True}
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
        if slots is None or (slots and set(map(int, slots)) != set(range(self.reader.num_slots))):
            raise UserError(
                "--resume: the checkpoint was written without --streaming or with another global "
                "batch size: use the flags of its run."
            )
        if slots and state.get("version", 1) < ROWS_VERSION and _was_cut_otherwise(self.args):
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
        begin = min(
            (slot.begin["reader"] for slot in self.slots.values()), key=lambda reader: reader["row"]
        )
        self.ctx.console.print0(f"⏩ Reading the stream again up to row {begin['row']:,}")
        self.reader.start(begin)
        rank_slots = {
            str(number): {**slots[str(number)], "counts": dict(slot.counts)}
            for number, slot in self.slots.items()
        }
        self.place = Place(rank_slots, [], self.reader.row, self.reader.passes)

    def step_batches(self, device) -> Iterator[batches.StepBatch]:
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
            micro_batches = [
                [self.slots[number].next_sequence(self.reader) for number in numbers]
                for numbers in self.layout
            ]
            tokens = sum(
                len(sequence if isinstance(sequence, np.ndarray) else sequence[0])
                for batch in micro_batches
                for sequence in batch
            )
            slots = {str(number): slot.state() for number, slot in self.slots.items()}
            bad_rows, self.found = self.found, []
            place = Place(
                slots,
                bad_rows,
                self.reader.row,
                self.reader.passes,
                self.reader.one_kind.kind,
                tuple(self.reader.one_kind.formats),
            )
            yield batches.StepBatch([self._stack(batch) for batch in micro_batches], tokens, place)

    def _stack(self, sequences: list) -> batches.MicroBatch:
        if isinstance(sequences[0], np.ndarray):
            inputs = torch.from_numpy(np.stack(sequences).astype(np.int64))
            return batches.label_text(inputs, self.end_of_text)
        return batches.stack_examples(
            sequences, self.args.seq_length, batches.one_length(self.args), self.args.packing
        )

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
            tokenize.refuse_bad_rows(list(self.bad), self.args.max_bad_rows, self.corpus.advice)


def slots_of_rank(args, rank: int, world_size: int) -> list[list[int]]:
    """Return the numbers of the batch slots of a rank, one list for each micro-batch."""
    starts = [
        (micro_step * world_size + rank) * args.batch_size
        for micro_step in range(args.gradient_accumulation_steps)
    ]
    return [list(range(start, start + args.batch_size)) for start in starts]


def open_stream(args, ctx: DistContext, tokenizer) -> tuple[Stream, batches.Sequences, dict]:
    """Open the training stream and --validation_file; every rank must call it.

    Returns:
        (stream, sequences of --validation_file or an empty TokenFile, facts for results.json).
    Raises:
        UserError: see `stream_reader.open_corpus`; or --validation_file cannot be read.
        TrainingError: the corpus differs between the nodes.
    """
    rows = RowOptions.of(args, has_own_template(tokenizer))
    train = Stream(args, ctx, tokenizer, open_corpus(args, ctx, rows))
    validation: batches.Sequences = batches.nothing(args)
    if args.validation_file:
        alone = args.replace(validation_file=None)
        prepared = tokenize.tokenize_corpus(alone, ctx, tokenizer, args.validation_file)
        validation, split_info = batches.open_split(prepared, "train", args)
        if args.packing:
            validation = batches.packed_validation(validation)
            split_info["blocks"] = validation.num_sequences
        train.facts["validation"] = {**split_info, "bad_rows": prepared["bad_rows"]}
        tokenize.print_splits(ctx, args, {"validation": train.facts["validation"]}, tokenizer)
    return train, validation, train.facts


def _was_cut_otherwise(args) -> bool:
    """Return whether the corpus was divided into other rows before ROWS_VERSION 2."""
    if not is_local_dataset(args.dataset):
        return args.dataset == "wikitext"
    files, _ = files_to_read(args)
    return any(not has_rows(file) and file.stat().st_size > 1 << 16 for file in files)
