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

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch

from distributed_training import console
from distributed_training.data import printing
from distributed_training.data.batches import StepBatch, copy_ahead
from distributed_training.data.corpus import check_validation_file, open_split
from distributed_training.data.facts import DatasetFacts
from distributed_training.data.rows import PlacedRows
from distributed_training.data.sequences import Padding, Part, Sequences
from distributed_training.data.sources import announce
from distributed_training.data.stream_slots import BatchSlots
from distributed_training.data.stream_source import open_for_streaming
from distributed_training.data.stream_state import Progress, StreamState, new_stream
from distributed_training.data.token_cache import tokenize_corpus
from distributed_training.errors import UserError
from distributed_training.ranks.context import DistContext
from distributed_training.settings.data import DataSettings
from distributed_training.settings.training import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEPS_AHEAD = 5  # besides the one of `copy_ahead`; a few, because slots refill in different steps
GROUPS_AHEAD = 8  # of rows, by which the slots of two ranks may differ
# Increase it when a corpus is divided into other rows, which invalidates positions in checkpoints.
ROWS_VERSION = 3


class Stream:
    """The training sequences of --streaming."""

    def __init__(
        self,
        slots: BatchSlots,
        ctx: DistContext,
        tokenizer: PreTrainedTokenizerBase,
        facts: DatasetFacts,
        max_steps: int,
    ) -> None:
        self.facts = facts  # the dataset's entry in results.json, until `summary`
        self.num_sequences = max_steps * slots.count  # of the run, without epochs
        self.state = new_stream()  # after the step in progress
        self._slots, self._ctx, self._tokenizer = slots, ctx, tokenizer
        self._ahead = read_ahead(slots.steps(), STEPS_AHEAD)
        self._live: Iterator[StepBatch] | None = None

    def progress(self) -> Progress:
        """Return the state of all ranks for a checkpoint; every rank must call it."""
        own_bad = list(self._slots.units.bad)[: self.state["bad"]]
        ranks = self._ctx.all_gather((self.state["slots"], own_bad))
        slots = {slot: state for states, _ in ranks for slot, state in states.items()}
        rows = sorted({row for _, rows in ranks for row in rows})
        return {
            "lanes": slots,
            "bad": rows,
            "version": ROWS_VERSION,
            "kind": self.state["kind"],
            "formats": self.state["formats"],
        }

    def summary(self) -> DatasetFacts:
        """Stop reading, and return the facts for results.json; every rank must call it."""
        self._ahead.close()
        progress = self.progress()
        counts = {"rows": max(self._ctx.all_gather(self.state["rows"]))}
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
        same = not slots or set(map(int, slots)) == set(range(self._slots.count))
        if state is None or not same or (slots and state.get("version") != ROWS_VERSION):
            raise UserError(
                "--resume: the checkpoint was written without --streaming, with another global "
                "batch size, or by a version that divided the corpus into other rows: use the "
                "flags of its run, or continue from its exported weights in a new run."
            )
        own = {str(number): slots[str(number)] for number in self._slots.states if slots}
        begin = self._slots.resume(own, state["bad"])
        self.state["bad"] = len(self._slots.units.bad)
        if own:  # else it was saved before the first step
            console.print0(f"⏩ Reading the stream again up to row {begin['row']:,}")
            self.state |= {"slots": own, "rows": begin["row"], "passes": begin["pass"]}
            self.state |= {"kind": state.get("kind"), "formats": state.get("formats", [])}
            if kind := self.state["kind"]:  # also sets a missing chat template, for --generate
                printing.print_format(self.state["formats"], kind, self._tokenizer)

    def step_batches(self, device: torch.device) -> Iterator[StepBatch]:
        """Yield the step batches of this rank, from where the last caller stopped."""
        if self._live is None:
            self._live = copy_ahead(self._ahead, device)
        for step_batch in self._live:
            before = self.state
            assert step_batch.state is not None  # BatchSlots sets it
            self.state = step_batch.state
            self._print_changes(before, self.state)
            yield step_batch

    def rows_until_now(self) -> PlacedRows:
        """Read again from the beginning the rows that any rank has read until now."""
        rows = self._slots.rows(None)
        if self.state["passes"]:
            return rows
        # The slots of other ranks may have read some groups of rows more.
        return itertools.islice(rows, self.state["rows"] + GROUPS_AHEAD * self._slots.count)

    def first_sequence(self) -> list[Part]:
        """Return the parts of this rank's first sequence, instead of step batches."""
        parts = self._slots.first_sequence()
        self._print_changes(new_stream(), self._slots.state())
        return parts

    def _print_changes(self, before: StreamState, after: StreamState) -> None:
        """Print the format of the first rows, whether their answers end, and new bad rows."""
        if not before["kind"]:
            kind, ends = after["kind"], after["ends"]
            printing.print_format(after["formats"], kind, self._tokenizer)
            if kind != "text" and not ends["trained"]:
                is_cut, read = ends["cut"] > 0, ends["examples"]
                printing.warn_of_no_end(self._tokenizer, kind == "chat", is_cut, read)
        for row in list(self._slots.units.bad)[before["bad"] : after["bad"]]:
            console.warn(f"Left out: {row}")


def read_ahead(steps: Iterator[StepBatch], depth: int) -> Generator[StepBatch, None, None]:
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
        UserError: the corpus or --validation_file cannot be read.
        TrainingError: the corpus differs between the nodes.
    """
    announce(data)
    source = open_for_streaming(data, ctx, tokenizer)
    slots = BatchSlots(data, training, ctx, tokenizer, padding, source.splits["train"])
    facts: DatasetFacts = {"name": data.dataset_name, "sha256": source.fingerprint}
    facts |= {"streaming": True, "tokens": None, "blocks": None}
    validation = Sequences.none(padding)
    if file := data.validation_file:
        prepared = tokenize_corpus(data, ctx, tokenizer, file, eval_only=True)
        validation, held_out = open_split(prepared, "validation", data, padding)
        check_validation_file(validation, data)
        if data.packing:
            validation = validation.pack()
            held_out["blocks"] = validation.num_sequences
        facts["validation"] = {**held_out, "bad_rows": prepared["bad_rows"]}
        printing.print_splits({"validation": held_out}, tokenizer, "rows")
    train = Stream(slots, ctx, tokenizer, facts, training.max_steps or 0)
    return train, validation, facts
