"""--streaming: read the rows of a corpus and assign them to batch slots.

Rows are read through `datasets.IterableDataset`, whose `state_dict()` is the position in the
corpus. Every rank reads all rows, and tokenizes only those of its slots.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from support.cli.paths import is_local_dataset
from support.cluster.context import DistContext, require_equal_on_all_ranks
from support.data.formats import (
    BadRow,
    Document,
    Example,
    OneKind,
    RowOptions,
    TextFile,
    columns_of_table,
    read_row,
)
from support.data.long_documents import Chunk
from support.data.rows import contents_of_file, reading
from support.data.sources import begins_article, commit_on_hub, stream_from_hub
from support.data.tokenize import print_files
from support.errors import UserError
from support.files.atomic import sha256_of
from support.files.folders import advise_include, count_types, describe_twins, files_of

if TYPE_CHECKING:
    from support.data.streaming import BatchSlot

COMPARED_BYTES = 1 << 16  # read at the beginning and at the end of a file to compare it


@dataclass(frozen=True)
class StreamCorpus:
    """A corpus that is read during training."""

    # Digest that the ranks and a resumed run compare. It covers the flags that select the text and,
    # because the text is never read completely, only the names, sizes, beginnings and ends of the
    # files, or the name and commit on the hub.
    sha256: str
    # Opens the corpus as a stateful iterable of rows {"content": a Document, TextFile, Example or
    # BadRow; "begins": whether it begins a document, or continues the previous row}.
    open_rows: Callable
    advice: str = ""  # text to add to the message about a bad row


def open_corpus(args, ctx: DistContext, options: RowOptions) -> StreamCorpus:
    """Open --dataset and print which files it has; every rank must call it.

    Raises:
        UserError: the corpus does not exist or cannot be read, or its columns do not match any kind
            of row.
        TrainingError: the corpus differs between the nodes.
    """
    digest = hashlib.sha256(f"{args.dataset_config}\0{args.text_column}".encode())
    if args.prompt_column or args.completion_column:  # checkpoints of runs without them stay valid
        digest.update(repr(options.columns).encode())
    if is_local_dataset(args.dataset):
        files, twins = files_to_read(args)
        if Path(args.dataset).is_dir():
            counts = f"{args.dataset}: {count_types([*files, *twins])}"
            print_files([counts], describe_twins(twins, "content"), ctx)
        for file in files:
            size, edges = _edges(file)
            digest.update(os.fsencode(file.name) + f"\0{size}".encode() + edges)
        open_rows = rows_of_files(files, options)
    else:
        # All ranks read the same commit, even if the dataset changes on the hub meanwhile.
        commit = commit_on_hub(args.dataset, args.dataset_revision) if ctx.is_main else None
        commit, files = ctx.broadcast_from_rank0(commit), []
        commit = commit or args.dataset_revision
        digest.update(f"{args.dataset}\0{commit}".encode())
        if args.train_split:
            digest.update(f"\0{args.train_split}".encode())
        open_rows = _rows_on_hub(args, commit, options)
    sha256 = digest.hexdigest()
    require_equal_on_all_ranks(ctx.all_gather(sha256), "The corpus")
    return StreamCorpus(sha256, open_rows, advise_include(files))


def files_to_read(args) -> tuple[list[Path], dict[Path, Path]]:
    """Return the files of --dataset, each content once.

    Only files with the same size, beginning and end are read completely for the comparison.

    Returns:
        (files to read, {file that is not used: the earlier file with the same content}).
    Raises:
        UserError: there are no files, or one cannot be read.
    """
    files = files_of(Path(args.dataset), f"--dataset {args.dataset}", args.include)
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


def rows_of_files(files: list[Path], options: RowOptions) -> Callable:
    """Return the `StreamCorpus.open_rows` of local files."""
    import datasets

    arguments = {"files": [str(file) for file in files], "options": options}
    return partial(datasets.IterableDataset.from_generator, _generate_rows, gen_kwargs=arguments)


def _generate_rows(files: list[str], options: RowOptions) -> Iterator[dict]:
    for file in files:
        for content in contents_of_file(Path(file), options):
            yield {"content": content, "begins": True}


def _rows_on_hub(args, commit: str | None, options: RowOptions) -> Callable:
    """Return the `StreamCorpus.open_rows` of a dataset on the hub."""
    split = stream_from_hub(args, commit)
    flag = f"--dataset {args.dataset}"
    columns = list(next(iter(split.take(1)), {}))
    columns_of_table(columns, options, flag)

    def understand(row: dict, number: int) -> dict:
        begins = args.dataset != "wikitext" or begins_article(row["text"])  # its rows are lines
        content = read_row(row, f"{flag}, row {number + 1}", options)
        return {"content": content, "begins": begins}

    return lambda: split.map(understand, with_indices=True, remove_columns=columns)


@dataclass
class Item:
    """A row that is assigned to a batch slot and not tokenized yet."""

    state: dict  # state of the reader before this row
    begins: bool  # whether an end-of-text token precedes it
    content: Document | Example
    part: Chunk | None = None  # for a part of a text file, the chunk with its seams; otherwise None


class Reader:
    """A reader that assigns the rows of a corpus to batch slots, pass after pass.

    A slot gets a whole row, or a whole article of WikiText (whose rows are lines). A text file is
    assigned in parts, so that all slots have a share of a single file. If the next part of a slot
    does not directly follow its previous one, an end-of-text token separates the two.

    Args:
        open_rows: see `StreamCorpus`.
        parts: cuts a text, given in pieces, into parts that can be tokenized independently.
        slots: {number: slot} of the slots that this rank processes.
        num_slots: number of batch slots of all ranks.
        seed: determines the order in which the slots get documents.
        refuse: called with each bad row of the first pass.
    """

    def __init__(
        self,
        open_rows: Callable,
        parts: Callable,
        slots: dict[int, BatchSlot],
        num_slots: int,
        seed: int,
        refuse: Callable[[BadRow], None],
    ):
        self.open_rows, self.parts, self.slots, self.num_slots = open_rows, parts, slots, num_slots
        self.refuse, self.one_kind = refuse, OneKind()
        self.order_of_group = functools.lru_cache(2)(
            lambda group: np.random.default_rng([seed, group]).permutation(num_slots)
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
        self.units = self._read(state["rows"], state.get("part", 0))

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
                raise UserError("--streaming: the corpus has no row that can be used.")
            self.rows_in_pass = self.row - self.first_of_pass
            self.start({**place, "pass": self.passes + 1, "first": self.row, "rows": None})
            return
        rows, number, content, part = unit
        slot = self._slot_of(self.row)
        begins = self.row > 0 and not (number and slot == self._slot_of(self.row - 1))
        if slot in self.slots and self.row >= self.slots[slot].first:
            self.slots[slot].waiting.append(
                Item({**place, "rows": rows, "part": number}, begins, content, part)
            )
        self.row += 1

    def _slot_of(self, row: int) -> int:
        # From 1: existing checkpoints have positions in an order that is counted in this way.
        group, place = divmod(row + 1, self.num_slots)
        return int(self.order_of_group(group)[place])

    def _read(
        self, rows_state: dict | None, skip: int
    ) -> Iterator[tuple[dict, int, Document | Example, Chunk | None]]:
        """Yield the good rows and the parts of text files.

        Args:
            rows_state: state of the iterable of rows, or None for its beginning.
            skip: number of parts of the first text file to skip.
        Yields:
            (state of the iterable before it, number of the part in its file or 0, content, the
            chunk of a part or None).
        """
        for state, content in self._documents(rows_state):
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

    def _documents(
        self, rows_state: dict | None
    ) -> Iterator[tuple[dict, Document | Example | BadRow]]:
        """Yield the rows, joined to documents, each with the state of the iterable before it."""
        iterable = self.open_rows()
        if rows_state is not None:
            iterable.load_state_dict(rows_state)
        rows, pending = iter(iterable), None
        while True:
            state = iterable.state_dict()
            row = next(rows, None)
            content = None if row is None else self.one_kind.check(row["content"])
            if pending and row is not None and not row["begins"] and isinstance(content, Document):
                pending[1].pieces.extend(content.pieces)
                continue
            if pending:
                yield pending
            if row is None:
                return
            pending = state, content
