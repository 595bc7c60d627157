"""--streaming: blocks of a corpus that is read and tokenised while it is trained on, and never whole anywhere.

A step has G blocks, and lane g gives its g-th block: a lane takes every G-th row of the corpus, tokenises it, and shuffles
its blocks some at a time. A rank works for the lanes whose blocks it trains on, and for no others. So the same blocks come
in the same steps on any number of ranks, and a lane's place in the corpus, a few numbers, is all that a checkpoint needs.

Rows are read through `datasets`' IterableDataset, whose `state_dict()` says how far it is. Every rank reads all rows, and
tokenises its own.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from support.corpus import (
    BadRow,
    Document,
    Example,
    begins_article,
    files_of,
    has_rows,
    kind_of,
    load_from_hub,
    read_row,
    read_text,
    rows_of_file,
)
from support.data import IGNORED, ROW_MULTIPLE, Window, prefetch
from support.distributed import Run
from support.errors import UserError
from support.examples import PLAIN_NOTICE, Encoder, use_plain_template
from support.preflight import is_local_dataset
from support.tokens import cut_text, of_another_kind, refuse_bad_rows

PARAGRAPHS = 1 << 16  # characters of a text file that make a row


@dataclass
class Item:
    """A row that a lane has not tokenised yet.

    Attributes:
        state: of the reader, just before it.
        begins: whether an end-of-text token goes before it.
        content: what it holds.
    """

    state: dict
    begins: bool
    content: Document | Example


class Reader:
    """Reads rows and deals them to lanes, pass after pass.

    Args:
        open_rows: returns a stateful iterable of rows, as `_open_rows` does.
        text_column: see `corpus.open_source`.
        lanes: how many there are, over all ranks.
        mine: the lanes that this rank works for.
        refuse: told of each bad row of the first pass.
    """

    def __init__(self, open_rows: Callable, text_column: str | None, lanes: int, mine: dict[int, Lane], refuse: Callable):
        self.open_rows, self.text_column, self.lanes, self.mine, self.refuse = open_rows, text_column, lanes, mine, refuse
        self.kind: str | None = None
        self.start({"row": 0, "document": 0, "pass": 0, "rows": None})

    def start(self, state: dict) -> None:
        """Go on from a state that an Item carries.

        Args:
            state: {"row": good rows before, "document": those that did not belong to the one before them, both counted through
                all passes, "pass": which this is, "rows": the iterable's own state}.
        """
        self.row, self.document, self.passes = state["row"], state["document"], state["pass"]
        self.first_of_pass = self.row
        self.rows = self.open_rows()
        if state["rows"] is not None:
            self.rows.load_state_dict(state["rows"])
        self.iterator = iter(self.rows)

    def pull(self) -> None:
        """Read one row, and hand it to its lane if this rank works for that.

        Raises:
            UserError: there are too many bad rows, or nothing in the whole corpus can be used.
        """
        state = {"row": self.row, "document": self.document, "pass": self.passes, "rows": self.rows.state_dict()}
        row = next(self.iterator, None)
        if row is None:
            if self.row == self.first_of_pass:
                raise UserError("--streaming: there is nothing in the corpus that can be used.")
            self.start({**state, "pass": self.passes + 1, "rows": None})
            return
        content = self._understand(row)
        if isinstance(content, BadRow):
            if self.passes == 0:
                self.refuse(content)
            return
        self.document += not row["joined"] or self.row == self.first_of_pass
        lane = self.mine.get(self.document % self.lanes)
        if lane is not None and self.row >= lane.first:
            lane.waiting.append(Item(state, row["begins"] and self.row > 0, content))
        self.row += 1

    def _understand(self, row: dict) -> Document | Example | BadRow:
        content = BadRow(row["bad"]) if row["bad"] else read_row(row["row"], row["where"], self.text_column)
        if isinstance(content, BadRow):
            return content
        self.kind = self.kind or content.kind
        return content if content.kind == self.kind else of_another_kind(content, self.kind)


class Lane:
    """Makes the blocks of one place in every step.

    Its rows are tokenised until there are enough for a chunk of blocks, which is shuffled and handed out; then comes the next.
    What remains to be known of it is where its chunk begins, and how much of that was handed out.

    Args:
        number: the place.
        lanes: how many there are.
        chunk: blocks that are shuffled together.
        seq_length, seed: of the run.
        encode: tokenises an Item: token ids of a text, or (ids, labels) of an example; None if nothing of it can be used.
    """

    def __init__(self, number: int, lanes: int, chunk: int, seq_length: int, seed: int, encode: Callable):
        self.number, self.size, self.seq_length, self.seed, self.encode = number, chunk, seq_length, seed, encode
        self.early = 1 + (chunk - 1) * (number + 1) // lanes  # the first chunks differ, so that not all lanes refill at once
        self.waiting: deque[Item] = deque()
        self.first = 0  # rows before it are behind this lane
        self.begin, self.chunks, self.used = None, 0, 0
        self.blocks: list = []
        self.rest: list[tuple[Item, int, np.ndarray]] = []  # tokenised rows, and how much of each went into chunks before
        self.skip = 0

    def state(self) -> dict:
        """Where it stands: {"reader", "offset", "chunk", "used"}."""
        return {**self.begin, "chunk": self.chunks, "used": self.used}

    def resume(self, state: dict) -> None:
        """Be where `state` says; rows are dealt to it from there on."""
        self.first, self.skip = state["reader"]["row"], state["offset"]
        self.chunks, self.used = state["chunk"] - 1, state["used"]
        self.begin = {"reader": state["reader"], "offset": state["offset"]}

    def next_block(self, pull: Callable[[], None]):
        """The next (ids, labels), or ids where all are learned; `pull` reads another row."""
        while not self.blocks or self.used == len(self.blocks):
            used = 0 if self.blocks else self.used  # more than 0 just after a resume
            self.chunks += 1
            size = self.early if self.chunks == 1 else self.size
            blocks = self._text_chunk(size, pull) if self._is_text(pull) else self._example_chunk(size, pull)
            order = np.random.default_rng([self.seed, self.number, self.chunks]).permutation(len(blocks))
            self.blocks, self.used = [blocks[i] for i in order], used
        self.used += 1
        return self.blocks[self.used - 1]

    def _is_text(self, pull) -> bool:
        while not (self.waiting or self.rest):
            pull()
        item = self.rest[0][0] if self.rest else self.waiting[0]
        return item.content.kind == "text"

    def _tokenise(self, pull) -> tuple[Item, int, object] | None:
        while not self.waiting:
            pull()
        item = self.waiting.popleft()
        found = self.encode(item)
        offset, self.skip = self.skip, 0  # of the row that a resumed chunk begins in
        return None if found is None else (item, offset, found)

    def _text_chunk(self, size: int, pull) -> list[np.ndarray]:
        needed = size * self.seq_length
        while sum(len(ids) - offset for _, offset, ids in self.rest) < needed:
            self.rest.append(self._tokenise(pull))
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

    def _example_chunk(self, size: int, pull) -> list:
        found = []
        while len(found) < size:
            if (row := self._tokenise(pull)) is not None:
                found.append(row)
        self.begin = {"reader": found[0][0].state, "offset": 0}
        return [row for _, _, row in found]


class Stream:
    """The training blocks of --streaming, in the place of a TokenFile.

    Attributes:
        blocks: as many as the whole run needs; there is no epoch.
        seq_length: tokens in a block.
        state: where all lanes of this rank stand after the step in progress, {lane: state}.
        facts: for results.json.
    """

    def __init__(self, args, run: Run, tokenizer):
        self.args, self.run, self.tokenizer = args, run, tokenizer
        self.seq_length, self.state = args.seq_length, {}
        self.encoder, self.bad, self.skipped = None, [], 0
        self.layout = [
            [micro * args.batch_size * run.world_size + run.rank * args.batch_size + row for row in range(args.batch_size)]
            for micro in range(args.gradient_accumulation_steps)
        ]
        lanes = args.batch_size * args.gradient_accumulation_steps * run.world_size
        self.blocks, chunk = args.max_steps * lanes, max(1, args.shuffle_buffer // lanes)
        mine = (number for numbers in self.layout for number in numbers)
        self.lanes = {number: Lane(number, lanes, chunk, args.seq_length, args.seed, self._encode) for number in mine}
        self.reader = Reader(_open_rows(args), args.text_column, lanes, self.lanes, self._refuse)
        self.facts = {"name": args.dataset, "sha256": fingerprint(args), "tokens": None, "blocks": None, "streaming": True}
        self._live: Iterator[Window] | None = None

    def summary(self) -> dict:
        """The facts for results.json at the end: rows read, passes, rows left out; every rank calls it, and it says a line."""
        left_out = sum(self.run.gather(self.skipped))
        bad = sorted({row for rows in self.run.gather(self.bad) for row in rows})
        rows = max(self.run.gather(self.reader.row))
        passes = self.reader.passes + 1
        self.run.say(f"📚 stream: {rows:,} rows read in {passes} passes, {left_out:,} skipped, {len(bad):,} bad")
        return {**self.facts, "kind": self.reader.kind, "rows": rows, "skipped": left_out, "bad_rows": bad}

    def resume(self, state: dict) -> None:
        """Go on where a checkpoint's lanes stood.

        Args:
            state: of the lanes of all ranks.
        Raises:
            UserError: the checkpoint is of another global batch, or was not streamed.
        """
        if set(map(int, state)) != set(range(self.reader.lanes)):
            raise UserError("--resume: the checkpoint was made without --streaming, or with another global batch: keep to it.")
        for number, lane in self.lanes.items():
            lane.resume(state[str(number)])
        self.reader.start(min((lane.begin["reader"] for lane in self.lanes.values()), key=lambda reader: reader["row"]))
        self.state = {str(number): lane.state() | {"chunk": lane.chunks + 1} for number, lane in self.lanes.items()}

    def windows(self, device) -> Iterator[Window]:
        """This rank's windows, read one ahead; goes on where the caller before stopped."""
        if self._live is None:
            self._live = prefetch(self._windows(), device)
        for window in self._live:
            self.state = window.state
            yield window

    def _windows(self) -> Iterator[Window]:
        while True:
            rows = [[self.lanes[number].next_block(self.reader.pull) for number in numbers] for numbers in self.layout]
            tokens = sum(len(block if isinstance(block, np.ndarray) else block[0]) for batch in rows for block in batch)
            state = {str(number): lane.state() for number, lane in self.lanes.items()}
            yield Window([self._stack(batch) for batch in rows], tokens, state)

    def _stack(self, blocks: list) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(blocks[0], np.ndarray):
            inputs = torch.from_numpy(np.stack(blocks).astype(np.int64))
            return inputs, inputs.clone()
        longest = max(len(ids) for ids, _ in blocks)
        fixed = self.args.compile or self.args.simulate_gpus
        width = self.seq_length if fixed else min(self.seq_length, -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE)
        filled = [
            pad_sequence([torch.zeros(width, dtype=torch.int64), *map(torch.from_numpy, column)], True, value)[1:]
            for column, value in zip(zip(*blocks, strict=True), (0, IGNORED), strict=True)
        ]
        return filled[0], filled[1]

    def _encode(self, item: Item):
        if item.content.kind == "text":
            return self._encode_text(item)
        if self.encoder is None:
            if use_plain_template(self.tokenizer, item.content.kind):
                self.run.warn(PLAIN_NOTICE)
            self.encoder = Encoder(self.tokenizer)
        [found] = self.encoder.encode([item.content])
        if isinstance(found, BadRow):
            if item.state["pass"] == 0:
                self._refuse(found)
            return None
        ids, learned = (array[: self.seq_length].astype(np.int64) for array in found)
        if not learned[1:].any():  # what is learned lies behind the block's end
            self.skipped += 1
            return None
        return ids, np.where(learned, ids, IGNORED)

    def _encode_text(self, item: Item) -> np.ndarray:
        between = [self.tokenizer.eos_token_id] if item.begins and self.tokenizer.eos_token_id is not None else []
        text = "".join(item.content.pieces)
        ids = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return np.array(between + ids, dtype=np.int64)

    def _refuse(self, row: BadRow) -> None:
        self.bad.append(str(row))
        refuse_bad_rows(self.bad, self.args.max_bad_rows)
        self.run.warn(f"Left out: {row}")


def fingerprint(args) -> str:
    """What a resumed run compares: names and sizes of the files, or the hub's name; the text itself is never read whole."""
    digest = hashlib.sha256(f"{args.dataset_config}\0{args.text_column}".encode())
    if is_local_dataset(args.dataset):
        for file in files_of(Path(args.dataset).expanduser(), f"--dataset {args.dataset}"):
            digest.update(f"{file.name}\0{file.stat().st_size}".encode())
    else:
        digest.update(args.dataset.encode())
    return digest.hexdigest()


def _open_rows(args) -> Callable:
    """A function that opens the corpus as a stateful iterable of rows.

    A row is {"row": what read_row takes, "where": its place, "begins": whether an end-of-text token goes before it, "joined":
    whether it belongs to the row before it, "bad": why it cannot be used, or None}.
    Raises:
        UserError: nothing there, or nothing readable.
    """
    import datasets

    if is_local_dataset(args.dataset):
        files = [str(file) for file in files_of(Path(args.dataset).expanduser(), f"--dataset {args.dataset}")]
        options = {"files": files, "text_column": [args.text_column] * len(files)}
        return partial(datasets.IterableDataset.from_generator, _rows_of_files, gen_kwargs=options)
    splits = load_from_hub(args.dataset, args.dataset_config, streaming=True)
    where = f"--dataset {args.dataset}"
    if "train" not in splits:
        raise UserError(f"{where} has no split named train; it has {', '.join(splits)}.")
    columns = list(next(iter(splits["train"].take(1)), {}))
    if kind_of(columns, args.text_column) is None:
        there = ", ".join(columns) or "nothing"
        raise UserError(f"{where}: no column {args.text_column or 'text'!r}; there is {there}: use --text_column.")

    def wrap(row: dict, number: int) -> dict:
        begins = args.dataset != "wikitext" or begins_article(row["text"])  # its rows are lines
        return {"row": row, "where": f"{where}, row {number + 1}", "begins": begins, "joined": not begins, "bad": None}

    return lambda: splits["train"].map(wrap, with_indices=True, remove_columns=columns)


def _rows_of_files(files: list[str], text_column: list) -> Iterator[dict]:
    for name, column in zip(files, text_column, strict=True):
        file = Path(name)
        if not has_rows(file):
            for number, text in enumerate(cut_text(read_text(file), PARAGRAPHS)):
                found = {"row": {column or "text": text}, "where": name}
                yield {**found, "begins": number == 0, "joined": False, "bad": None}
            continue
        for row in rows_of_file(file, column):
            bad = str(row) if isinstance(row, BadRow) else None
            found = {"row": None, "where": name} if bad else {"row": row[0], "where": row[1]}
            yield {**found, "begins": True, "joined": False, "bad": bad}
