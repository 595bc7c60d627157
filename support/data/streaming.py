"""--streaming: blocks of a corpus that is read and tokenised while it is trained on, and never
whole anywhere.

A step has G blocks, and lane g gives its g-th block. Of each G documents every lane takes one, in
an order drawn from the seed; it tokenises them, and shuffles its blocks some at a time. A rank
works for the lanes whose blocks it trains on, and for no others. So the same blocks come in the
same steps on any number of ranks, and a lane's place in the corpus, a few numbers, is all that a
checkpoint needs.

A thread reads and tokenises some steps ahead of training (data.ReadAhead). Each step carries where
the stream stands after it, so that a checkpoint, and what is said of bad rows, exclude rows that
were only read ahead. The thread has its own copy of the tokenizer, which rank 0 saves with a
checkpoint meanwhile.

Rows are read through `datasets`' IterableDataset, whose `state_dict()` says how far it is. Every
rank reads all rows, and tokenises its own.
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

from support.cli.flags import global_batch
from support.cli.validate import is_local_dataset
from support.cluster.context import Run, describe_difference
from support.data.batches import (
    IGNORED,
    ExampleFile,
    ReadAhead,
    TokenFile,
    Window,
    nothing,
    one_length,
    open_split,
    prefetch,
    stack_examples,
)
from support.data.chat import PLAIN_NOTICE, Encoder, use_plain_template
from support.data.json_documents import Chunk, DocumentTokenizer
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
    say_files,
    tokenize_corpus,
)
from support.errors import UserError
from support.files.atomic import sha256_of
from support.files.folders import advise_include, count_types, describe_twins, files_of
from support.report.results import say_dataset

STEPS_AHEAD = (
    4  # in the queue of data.ReadAhead, which two more leave; lanes refill at different steps
)
COMPARED_BYTES = 1 << 16  # of a file's beginning and of its end
# raise it when a corpus is read as other rows, so that a checkpoint's place in it is another one
ROWS_VERSION = 2


@dataclass
class Item:
    """A row that a lane has not tokenised yet.

    Attributes:
        state: of the reader, just before it.
        begins: whether an end-of-text token goes before it.
        content: what it holds.
        part: if it is a part of a text file, how that is to be tokenised.
    """

    state: dict
    begins: bool
    content: Document | Example
    part: Chunk | None = None


@dataclass(frozen=True)
class TextFile(Document):
    """A text file, which is dealt in parts."""


class Reader:
    """Reads rows and deals them to lanes, pass after pass.

    A row is dealt as a whole, an article of WikiText (whose rows are lines) too. A text file is
    dealt in parts, so that all lanes have something of a single file. Where a lane continues in
    another place of the file, an end-of-text token separates the two.

    Args:
        open_rows: returns a stateful iterable of rows, as `_open_rows` does.
        parts: cuts a text, given in pieces, into parts that can be tokenised independently.
        text_column: see `corpus.open_source`.
        lanes: how many there are, over all ranks.
        mine: the lanes that this rank works for.
        seed: decides which lane gets which document.
        refuse: called with each bad row of the first pass.
    """

    def __init__(
        self,
        open_rows: Callable,
        parts: Callable,
        text_column: str | None,
        lanes: int,
        mine: dict[int, Lane],
        seed: int,
        refuse: Callable,
    ):
        self.open_rows, self.parts, self.text_column, self.lanes, self.mine = (
            open_rows,
            parts,
            text_column,
            lanes,
            mine,
        )
        self.refuse = refuse
        self.kind: str | None = None
        self.lane_of = functools.lru_cache(2)(
            lambda group: np.random.default_rng([seed, group]).permutation(lanes)
        )
        self.rows_in_pass = 0
        self.start({"row": 0, "pass": 0, "first": 0, "rows": None})

    def start(self, state: dict) -> None:
        """Continue from a state that an Item carries.

        Args:
            state: {"row": good rows before it, counted through all passes, "pass": which this is,
                "first": its first row, "rows": the iterable's own state, "part": parts of the text
                file before it, if it is a part}.
        """
        self.row, self.passes, self.first_of_pass = (state[key] for key in ("row", "pass", "first"))
        self.rows = self.open_rows()
        if state["rows"] is not None:
            self.rows.load_state_dict(state["rows"])
        self.units = self._read(state.get("part", 0))

    def pull(self) -> None:
        """Read one row, or a part of a text file, and deal it to its lane if this rank works for
        that.

        Raises:
            UserError: there are too many bad rows, or nothing in the whole corpus can be used.
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
        lane = self._lane_of(self.row)
        begins = self.row > 0 and not (number and lane == self._lane_of(self.row - 1))
        if lane in self.mine and self.row >= self.mine[lane].first:
            self.mine[lane].waiting.append(
                Item({**place, "rows": rows, "part": number}, begins, content, part)
            )
        self.row += 1

    def _lane_of(self, row: int) -> int:
        group, place = divmod(
            row + 1, self.lanes
        )  # checkpoints hold places in this order, which counts from 1
        return int(self.lane_of(group)[place])

    def _read(self, skip: int) -> Iterator[tuple[dict, int, Document | Example, Chunk | None]]:
        """Each (the iterable's state before it, its number in its file, what it holds, how a part
        is to be tokenised).

        Args:
            skip: parts of the first text file that are not needed.
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
        """(the iterable's state before it, what it holds) of each row; rows that do not begin a
        document continue it.
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


class Lane:
    """Makes the blocks of one place in every step.

    Its rows are tokenised until there are enough for a chunk of blocks, which is shuffled and
    handed out; then comes the next. What remains to be known of it is where its chunk begins, and
    how much of that was handed out.

    Args:
        number: the place.
        lanes: how many there are.
        chunk: blocks that are shuffled together.
        seq_length, seed: of the run.
        encode: tokenises an Item: (token ids of a text, or (ids, labels) of an example, or None if
            nothing of it can be used; "truncated" or "skipped" if it is to be counted as that).
    """

    def __init__(
        self, number: int, lanes: int, chunk: int, seq_length: int, seed: int, encode: Callable
    ):
        self.number, self.size, self.seq_length, self.seed, self.encode = (
            number,
            chunk,
            seq_length,
            seed,
            encode,
        )
        self.early = (
            1 + (chunk - 1) * (number + 1) // lanes
        )  # the first chunks differ, so that not all lanes refill at once
        self.waiting: deque[Item] = deque()
        self.first = 0  # rows before it are behind this lane
        self.begin, self.chunks, self.used = None, 0, 0
        self.blocks: list = []
        self.rest: list[
            tuple[Item, int, np.ndarray]
        ] = []  # tokenised rows, and how much of each went into chunks before
        self.skip = 0
        self.refused = 0  # rows in turn of which nothing could be used
        self.counts = {
            "counted": 0,
            "truncated": 0,
            "skipped": 0,
        }  # rows before "counted" are, and are not counted again

    def state(self) -> dict:
        """Where it stands: {"reader", "offset", "chunk", "used", "counts"}."""
        return {**self.begin, "chunk": self.chunks, "used": self.used, "counts": dict(self.counts)}

    def resume(self, state: dict) -> None:
        """Be where `state` says; rows are dealt to it from there on."""
        self.first, self.skip = state["reader"]["row"], state["offset"]
        self.chunks, self.used = state["chunk"] - 1, state["used"]
        self.begin = {"reader": state["reader"], "offset": state["offset"]}
        self.counts = dict(state.get("counts", self.counts))

    def next_block(self, reader: Reader):
        """The next (ids, labels), or ids where all are learned."""
        while not self.blocks or self.used == len(self.blocks):
            used = 0 if self.blocks else self.used  # more than 0 just after a resume
            self.chunks += 1
            size = self.early if self.chunks == 1 else self.size
            blocks = (
                self._text_chunk(size, reader)
                if self._is_text(reader)
                else self._example_chunk(size, reader)
            )
            order = np.random.default_rng([self.seed, self.number, self.chunks]).permutation(
                len(blocks)
            )
            self.blocks, self.used = [blocks[i] for i in order], used
        self.used += 1
        return self.blocks[self.used - 1]

    def _is_text(self, reader: Reader) -> bool:
        while not (self.waiting or self.rest):
            reader.pull()
        item = self.rest[0][0] if self.rest else self.waiting[0]
        return item.content.kind == "text"

    def _tokenise(self, reader: Reader) -> tuple[Item, int, object]:
        """The next row of which something can be used: (it, tokens of it that are behind this lane,
        what `encode` gives).

        Raises:
            UserError: nothing can be used of as many rows in turn as the corpus has, and 100 at
                least.
        """
        while True:
            while not self.waiting:
                reader.pull()
            item = self.waiting.popleft()
            found, flaw = self.encode(item)
            if flaw and item.state["pass"] == 0 and item.state["row"] >= self.counts["counted"]:
                self.counts[flaw] += 1
            self.counts["counted"] = max(self.counts["counted"], item.state["row"] + 1)
            if found is not None:
                offset, self.skip, self.refused = (
                    self.skip,
                    0,
                    0,
                )  # a resumed chunk begins within a row
                return item, offset, found
            self.refused += 1
            if self.refused > max(100, reader.rows_in_pass) and reader.passes:
                raise UserError(
                    "--streaming: nothing in the corpus can be used: the rows are empty, or what is learned of "
                    "them lies behind --seq_length."
                )

    def _text_chunk(self, size: int, reader: Reader) -> list[np.ndarray]:
        needed = size * self.seq_length
        there = sum(len(ids) - offset for _, offset, ids in self.rest)
        while there < needed:
            self.rest.append(self._tokenise(reader))
            there += len(self.rest[-1][2]) - self.rest[-1][1]
        item, offset, _ = self.rest[0]
        self.begin = {"reader": item.state, "offset": offset}
        stream = np.concatenate([ids[offset:] for _, offset, ids in self.rest])
        left, rest = len(stream) - needed, []
        for item, offset, ids in reversed(self.rest):
            if left > 0:
                rest.append((item, max(offset, len(ids) - left), ids))
            left -= len(ids) - offset
        self.rest = rest[::-1]
        return list(stream[:needed].reshape(size, self.seq_length))

    def _example_chunk(self, size: int, reader: Reader) -> list:
        found = [self._tokenise(reader) for _ in range(size)]
        self.begin = {"reader": found[0][0].state, "offset": 0}
        return [row for _, _, row in found]


@dataclass(frozen=True)
class Place:
    """Where a stream stands after a step, on this rank.

    Attributes:
        lanes: state of each, {lane: state}.
        bad: rows that were left out in this step, and whether this rank alone saw them.
        rows, passes: read so far.
        kind: of the rows: "text", "chat" or "pair"; None before the first.
    """

    lanes: dict[str, dict]
    bad: list[tuple[str, bool]]
    rows: int
    passes: int
    kind: str | None = None


class Stream:
    """The training blocks of --streaming, in the place of a TokenFile.

    Attributes:
        blocks: as many as the whole run needs; there is no epoch.
        seq_length: tokens in a block.
        place: where this rank stands after the step in progress.
        facts: for results.json.
    """

    def __init__(self, args, run: Run, tokenizer):
        self.args, self.run, self.tokenizer = args, run, tokenizer
        self.seq_length, self.place = args.seq_length, Place({}, [], 0, 0)
        self.encoder, self.bad = (
            None,
            {},
        )  # the rows that were left out, in their order, as the keys of a dict
        self.found: list[tuple[str, bool]] = []  # those of the step that is being read
        self.shown = 0  # of them that were said, or known before a resume
        self.fresh, self.gathered = (
            [],
            set(),
        )  # those that no other rank knows of, and those that all know
        self.documents = DocumentTokenizer(copy.deepcopy(tokenizer))  # two threads must not use one
        self.layout = [
            [
                micro * args.batch_size * run.world_size + run.rank * args.batch_size + row
                for row in range(args.batch_size)
            ]
            for micro in range(args.gradient_accumulation_steps)
        ]
        lanes = global_batch(args, run.world_size)
        self.blocks, chunk = args.max_steps * lanes, max(1, args.shuffle_buffer // lanes)
        mine = (number for numbers in self.layout for number in numbers)
        self.lanes = {
            number: Lane(number, lanes, chunk, args.seq_length, args.seed, self._encode)
            for number in mine
        }
        # Of a dataset that changes meanwhile every rank reads the same version.
        remote = run.is_main and not is_local_dataset(args.dataset)
        commit = run.from_main(commit_on_hub(args.dataset) if remote else None)
        files, twins = _files_to_read(args) if is_local_dataset(args.dataset) else ([], {})
        if Path(args.dataset).expanduser().is_dir():
            say_files(
                [f"{args.dataset}: {count_types([*files, *twins])}"],
                describe_twins(twins, "content"),
                run,
            )
        self.advice = advise_include(files)
        rows = _open_rows(args, commit, files)
        self.reader = Reader(
            rows, self.documents.parts, args.text_column, lanes, self.lanes, args.seed, self._refuse
        )
        digest = fingerprint(args, commit, files)
        describe_difference(run.gather(digest), "The corpus")
        self.facts = {
            "name": args.dataset,
            "sha256": digest,
            "tokens": None,
            "blocks": None,
            "streaming": True,
        }
        self._ahead = ReadAhead(self._windows(), STEPS_AHEAD)
        self._live: Iterator[Window] | None = None

    def progress(self) -> dict:
        """What a checkpoint needs, of all ranks: {"lanes": where each stands, "bad": rows that were
        left out, "version"}.

        Every rank calls it, and sends only the rows that it found since the call before.
        """
        ranks = self.run.gather((self.place.lanes, self.fresh))
        lanes = {lane: state for states, _ in ranks for lane, state in states.items()}
        self.gathered.update(row for _, fresh in ranks for row in fresh)
        self.fresh = []
        return {"lanes": lanes, "bad": sorted(self.gathered), "version": ROWS_VERSION}

    def summary(self) -> dict:
        """Read no more. The facts for results.json; every rank calls it, and a line is said."""
        self._ahead.close()
        found, rows = self.progress(), max(self.run.gather(self.place.rows))
        flaws = {
            name: sum(lane["counts"][name] for lane in found["lanes"].values())
            for name in ("truncated", "skipped")
        }
        counts = {"rows": rows, **flaws, "bad_rows": found["bad"]}
        said = ", ".join(
            f"{len(n) if isinstance(n, list) else n:,} {name.replace('_', ' ')}"
            for name, n in counts.items()
        )
        self.run.say(f"📚 stream: {said}, in {self.place.passes + 1} passes")
        return {**self.facts, "kind": self.reader.kind, **counts}

    def resume(self, state: dict | None) -> None:
        """Go on where a checkpoint's lanes stood.

        Args:
            state: see `progress`; None of a run that was not streamed.
        Raises:
            UserError: the checkpoint is of another global batch, or was not streamed, or its rows
                cannot be found any more.
        """
        lanes = state["lanes"] if state else None
        if lanes is None or (lanes and set(map(int, lanes)) != set(range(self.reader.lanes))):
            raise UserError(
                "--resume: the checkpoint was made without --streaming or with another global batch: use that."
            )
        if lanes and state.get("version", 1) < ROWS_VERSION and _was_cut_otherwise(self.args):
            raise UserError(
                "--resume: the checkpoint was written by a version that read long text files (and WikiText) in other "
                "pieces, so its place in the corpus cannot be found: train its weights in a new run (--export_hf)."
            )
        self.bad, self.gathered = dict.fromkeys(state["bad"]), set(state["bad"])
        self.shown = len(self.bad)
        if not lanes:  # before the first step
            return
        for number, lane in self.lanes.items():
            lane.resume(lanes[str(number)])
        begin = min(
            (lane.begin["reader"] for lane in self.lanes.values()), key=lambda reader: reader["row"]
        )
        self.run.say(f"⏩ Reading the stream again up to row {begin['row']:,}")
        self.reader.start(begin)
        mine = {
            str(number): {**lanes[str(number)], "counts": dict(lane.counts)}
            for number, lane in self.lanes.items()
        }
        self.place = Place(mine, [], self.reader.row, self.reader.passes)

    def windows(self, device) -> Iterator[Window]:
        """This rank's windows, in their order; continues where the previous caller stopped."""
        if self._live is None:
            self._live = prefetch(self._ahead, device)
        for window in self._live:
            self._arrive(window.state)
            yield window

    def _arrive(self, place: Place) -> None:
        """A step is trained on now: note where the stream stands after it; say what was left out."""
        first = place.kind and not self.place.kind
        if first and use_plain_template(self.tokenizer, place.kind):
            self.run.warn(PLAIN_NOTICE)
        self.place = place
        for row, mine in place.bad:
            self.fresh.append(row)
            self.shown += 1
            if self.shown <= SHOWN_BAD_ROWS and (mine or self.run.is_main):
                self.run.print(f"ℹ️  Left out: {row}")
            elif self.shown == SHOWN_BAD_ROWS + 1:
                self.run.warn(
                    "More rows are left out: results.json will name all of them under "
                    "dataset.bad_rows."
                )

    def _windows(self) -> Iterator[Window]:
        while True:
            rows = [
                [self.lanes[number].next_block(self.reader) for number in numbers]
                for numbers in self.layout
            ]
            tokens = sum(
                len(block if isinstance(block, np.ndarray) else block[0])
                for batch in rows
                for block in batch
            )
            lanes = {str(number): lane.state() for number, lane in self.lanes.items()}
            found, self.found = self.found, []
            place = Place(lanes, found, self.reader.row, self.reader.passes, self.reader.kind)
            yield Window([self._stack(batch) for batch in rows], tokens, place)

    def _stack(self, blocks: list) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(blocks[0], np.ndarray):
            inputs = torch.from_numpy(np.stack(blocks).astype(np.int64))
            return inputs, inputs.clone()
        return stack_examples(blocks, self.seq_length, one_length(self.args))

    def _encode(self, item: Item):
        if item.content.kind == "text":
            return self._encode_text(item)
        if self.encoder is None:
            use_plain_template(self.documents.tokenizer, item.content.kind)
            self.encoder = Encoder(self.documents.tokenizer)
        [found] = self.encoder.encode([item.content])
        if isinstance(found, BadRow):
            if item.state["pass"] == 0:
                self._refuse(found, mine=True)
            return None, None
        ids, learned = (array[: self.seq_length].astype(np.int64) for array in found)
        if not learned[1:].any():  # what is learned lies behind the block's end
            return None, "skipped"
        return (ids, np.where(learned, ids, IGNORED)), "truncated" if len(
            found[0]
        ) > self.seq_length else None

    def _encode_text(self, item: Item) -> tuple[np.ndarray | None, str | None]:
        text = "".join(item.content.pieces)
        if not text:
            return None, "skipped"
        eos = self.documents.tokenizer.eos_token_id
        between = [eos] if item.begins and eos is not None else []
        ids = self.documents.part_ids(item.part) if item.part else self.documents.ids(text)
        return np.array(between + ids, dtype=np.int64), None

    def _refuse(self, row: BadRow, mine: bool = False) -> None:
        """Note a bad row, unless that was done before a resume.

        Args:
            mine: this rank alone sees it, because it could be read and not be encoded.
        """
        if str(row) in self.bad:
            return
        self.bad[str(row)] = None
        self.found.append((str(row), mine))
        if len(self.bad) > self.args.max_bad_rows:
            refuse_bad_rows(list(self.bad), self.args.max_bad_rows, self.advice)


def open_stream(args, run: Run, tokenizer) -> tuple[Stream, TokenFile | ExampleFile, dict]:
    """The stream, the blocks of --validation_file (none without one), and the facts for
    results.json.

    Raises:
        UserError: nothing there, or nothing readable.
    """
    train, validation = Stream(args, run, tokenizer), nothing(args)
    if args.validation_file:
        prepared = tokenize_corpus(args, run, tokenizer, args.validation_file)
        validation, found = open_split(prepared, "train", args)
        train.facts["validation"] = {**found, "bad_rows": prepared["bad_rows"]}
        say_dataset(run, args, {"validation": train.facts["validation"]}, tokenizer)
    return train, validation, train.facts


def _was_cut_otherwise(args) -> bool:
    """Whether a corpus was read as other rows before ROWS_VERSION 2."""
    if not is_local_dataset(args.dataset):
        return args.dataset == "wikitext"
    files, _ = _files_to_read(args)
    return any(not has_rows(file) and file.stat().st_size > 1 << 16 for file in files)


def _files_to_read(args) -> tuple[list[Path], dict[Path, Path]]:
    """The files of --dataset; and those that are left out because an earlier one has the same
    content, each with that one.

    Only files of the same size, beginning and end are read whole for it.
    Raises:
        UserError: there are none, or one cannot be read.
    """
    files = files_of(Path(args.dataset).expanduser(), f"--dataset {args.dataset}", args.include)
    alike: dict[tuple, list[Path]] = {}
    for file in files:
        size, edges = _edges(file)
        alike.setdefault((size, hashlib.sha256(edges).digest()), []).append(file)
    first_with, twins = {}, {}
    for several in (group for group in alike.values() if len(group) > 1):
        for file in several:
            with reading(file):
                first = first_with.setdefault(sha256_of(file), file)
            if first != file:
                twins[file] = first
    return [file for file in files if file not in twins], twins


def _edges(file: Path) -> tuple[int, bytes]:
    """A file's size, and its beginning and end."""
    with reading(file), open(file, "rb") as stream:
        size = file.stat().st_size
        begin = stream.read(COMPARED_BYTES)
        stream.seek(max(0, size - COMPARED_BYTES))
        return size, begin + stream.read(COMPARED_BYTES)


def fingerprint(args, commit: str | None, files: list[Path]) -> str:
    """What ranks and a resumed run compare: names, sizes, beginnings and ends of the files, or the
    hub's name and commit.

    The text itself is never read whole.
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
    """A function that opens the corpus as a stateful iterable of rows; a dataset on the hub as of a
    commit.

    A row is {"row": what read_row takes, "where": its place, "file": whether it is a whole text
    file, named by "where", "begins": whether it begins a document and does not continue the one
    before it, "bad": why it cannot be used, or None}.
    Raises:
        UserError: nothing there, or nothing readable.
    """
    import datasets

    if is_local_dataset(args.dataset):
        options = {"files": [str(file) for file in files], "text_column": args.text_column}
        return partial(datasets.IterableDataset.from_generator, _rows_of_files, gen_kwargs=options)
    splits = load_from_hub(args.dataset, args.dataset_config, revision=commit, streaming=True)
    where = f"--dataset {args.dataset}"
    columns = list(next(iter(splits["train"].take(1)), {}))
    columns_of_text(columns, args.text_column, where)

    def wrap(row: dict, number: int) -> dict:
        begins = args.dataset != "wikitext" or begins_article(row["text"])  # its rows are lines
        return {
            "row": row,
            "where": f"{where}, row {number + 1}",
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
            found = {"row": None, "where": name} if bad else {"row": row[0], "where": row[1]}
            yield {**found, "file": False, "begins": True, "bad": bad}
