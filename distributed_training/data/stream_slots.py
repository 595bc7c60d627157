"""The sequences of a stream, which batch slots provide."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from distributed_training.data import batches
from distributed_training.data.packing import pack
from distributed_training.data.rows import BadRow, Rows
from distributed_training.data.sequences import Padding, Part, micro_batch
from distributed_training.data.stream_encoder import UnitEncoder
from distributed_training.data.stream_state import START, Counts, Place, Slot, StreamState, new_slot
from distributed_training.data.stream_units import Unit, UnitReader
from distributed_training.errors import UserError
from distributed_training.ranks.context import DistContext
from distributed_training.settings.data import DataSettings
from distributed_training.settings.training import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Place of a unit, its tokens that are in earlier chunks, and all its tokens.
Ids = tuple[Place, int, np.ndarray]


class BatchSlots:
    """The batch slots of this rank. The thread that reads ahead uses them.

    Attributes:
        count: of the slots of all ranks, the sequences of a global batch.
        states: of this rank's slots, by number.
        units: the rows that they read.
    """

    def __init__(
        self,
        data: DataSettings,
        training: TrainingSettings,
        ctx: DistContext,
        tokenizer: PreTrainedTokenizerBase,
        padding: Padding,
        rows: Rows,
    ) -> None:
        self.rows = rows  # of the corpus
        self._data, self._padding, self._seed = data, padding, training.seed
        self.count = training.global_batch(ctx.world_size)
        rank_counts = batches.initial_counts(training, ctx)
        before, own = sum(rank_counts[: ctx.rank]), rank_counts[ctx.rank]
        # The numbers of the slots of this rank, for each micro-batch.
        self._layout = [
            range(first, first + own) for first in range(before, self.count, sum(rank_counts))
        ]
        numbers = list(itertools.chain.from_iterable(self._layout))
        self.states = {number: new_slot() for number in numbers}
        self._sequences = {number: self._sequences_of(number) for number in numbers}
        # A copy of the tokenizer, because rank 0 may save the original at the same time.
        self._encoder = UnitEncoder(copy.deepcopy(tokenizer), padding.seq_length, data.packing)
        self.units = UnitReader(
            rows,
            self._encoder.documents.pieces,
            training.seed,
            self.count,
            numbers,
            data.max_bad_rows,
        )

    def resume(self, states: dict[str, Slot], bad: list[str]) -> Place:
        """Continue from a checkpoint; return the place that is read first.

        Args:
            states: of this rank's slots, by number; none before the first step.
            bad: lines about bad rows.
        """
        self.states |= {int(number): copy.deepcopy(slot) for number, slot in states.items()}
        places = [slot["reader"] for slot in states.values()]
        begin = min(places, key=lambda place: place["row"], default=START)
        self.units.continue_at(begin, bad)
        return begin

    def steps(self) -> Iterator[batches.StepBatch]:
        """Yield the step batches of this rank, without end."""
        while True:
            sequences = [[next(self._sequences[n]) for n in numbers] for numbers in self._layout]
            tokens = sum(len(ids) for some in sequences for parts in some for ids, _ in parts)
            packing = self._data.packing
            stacked = [micro_batch(some, self._padding, packing) for some in sequences]
            yield batches.StepBatch(stacked, tokens, self.state())

    def first_sequence(self) -> list[Part]:
        """Return the parts of this rank's first sequence."""
        return next(self._sequences[min(self.states)])

    def state(self) -> StreamState:
        """Return the state of this rank after what was read."""
        return {
            "slots": {str(number): copy.deepcopy(slot) for number, slot in self.states.items()},
            "bad": len(self.units.bad),
            "rows": self.units.last["row"] + 1,
            "passes": self.units.last["pass"],
            **copy.deepcopy(self.units.kinds),
            "ends": self._encoder.ends.copy(),
        }

    def _sequences_of(self, number: int) -> Iterator[list[Part]]:
        """Yield the parts of each sequence of a slot, and update the state of the slot.

        Rows are tokenized until there are enough for a chunk of sequences, which is shuffled and
        then used one by one; then the next chunk follows.
        """
        slot = self.states[number]
        resumes, refused = slot["chunk"] > 0, 0  # the chunk is cut again
        rest, offset = list[Ids](), slot["offset"]
        full = max(1, self._data.shuffle_buffer // self.count)  # sequences of a chunk
        while True:
            chunk = slot["chunk"] + (not resumes)
            # The first chunks differ in size, so that not all slots refill in the same step.
            size = full if chunk > 1 else 1 + (full - 1) * (number + 1) // self.count
            while (cut := self._cut_chunk(rest, size)) is None:
                unit = self.units.next_unit(number)
                if resumes and not rest and unit.place["row"] < slot["reader"]["row"]:
                    continue
                ids = self._encode(unit, slot["counts"])
                if ids is not None:
                    rest.append((unit.place, offset, ids))
                    offset = 0
                refused = 0 if ids is not None else refused + 1
                if self.units.rows_in_pass and refused > max(100, self.units.rows_in_pass):
                    raise UserError(
                        "--streaming: no row of the corpus can be used: the rows are empty, or "
                        "their targets come after the first --seq_length tokens."
                    )
            reader, at, _ = rest[0]
            sequences, rest = cut
            order = np.random.default_rng([self._seed, number, chunk]).permutation(len(sequences))
            used = slot["used"] if resumes else 0
            slot |= {"reader": reader, "offset": at, "chunk": chunk, "used": used}
            resumes = False
            isolated = self._data.isolates_documents and self.units.kinds["kind"] == "text"
            end_of_text = self._encoder.end_of_text if isolated else None
            for index in order[used:]:
                slot["used"] += 1
                yield [(part, end_of_text) for part in sequences[index]]

    def _cut_chunk(
        self, rest: list[Ids], size: int
    ) -> tuple[list[list[np.ndarray]], list[Ids]] | None:
        """Return about `size` sequences, and the rows of the next chunk; None: more are needed."""
        length, tokens = self._padding.seq_length, sum(len(ids) - at for _, at, ids in rest)
        needed = size * length
        if self._data.packing:  # as many examples as there is room for, and the next one
            if tokens <= needed:
                return None
            examples = [ids for _, _, ids in rest[:-1]]
            members, ends = pack(np.array([len(ids) for ids in examples]), length)
            packed = [[examples[n] for n in part] for part in np.split(members, ends[:-1])]
            return packed, rest[-1:]
        if self.units.kinds["kind"] != "text":
            return ([[ids] for _, _, ids in rest], []) if len(rest) == size else None
        if tokens < needed:
            return None
        stream = np.concatenate([ids[at:] for _, at, ids in rest])
        sequences = [[part] for part in stream[:needed].reshape(size, -1)]
        place, _, ids = rest[-1]  # the only row that may have tokens that are not used
        return sequences, [(place, len(ids) - (tokens - needed), ids)] if tokens > needed else []

    def _encode(self, unit: Unit, counts: Counts) -> np.ndarray | None:
        """Return the ids of a unit, or None if it cannot be used, which is counted."""
        encoded, row = self._encoder.encode(unit), unit.place["row"]
        if isinstance(encoded, BadRow):
            self.units.refuse(encoded, unit.place["pass"])
            return None
        if encoded.flaw and unit.place["pass"] == 0 and row >= counts["counted"]:
            counts[encoded.flaw] += 1
        counts["counted"] = max(counts["counted"], row + 1)
        return encoded.ids
