"""The rows of a stream, pass after pass, assigned to batch slots."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from distributed_training.data.document_tokenizer import Piece
from distributed_training.data.facts import Kinds
from distributed_training.data.rows import BadRow, Row, Rows, check_kind
from distributed_training.data.stream_state import START, Place
from distributed_training.data.token_cache import check_bad_rows
from distributed_training.errors import UserError, redact


class Unit(NamedTuple):
    """A row, or a piece of a text file, that is assigned to a batch slot."""

    place: Place
    slot: int
    begins: bool  # whether it does not directly follow the previous piece of its slot
    row: Row
    piece: Piece | None  # of a text file


def slot_order(seed: int, num_slots: int) -> Callable[[int], int]:
    """Return a function from the number of a unit to its slot.

    Every group of `num_slots` units is distributed over the slots in an order drawn from the seed.
    """

    @functools.lru_cache(2)
    def order_of(group: int) -> np.ndarray:
        return np.random.default_rng([seed, group]).permutation(num_slots)

    def slot_of(number: int) -> int:
        # From 1: existing checkpoints have positions in an order that is counted in this way.
        group, place = divmod(number + 1, num_slots)
        return int(order_of(group)[place])

    return slot_of


class UnitReader:
    """The units of some batch slots, which are read in the order of the corpus.

    Args:
        rows: of the corpus.
        pieces_of: cuts a text file, which is given in parts, into pieces.
        num_slots: of all ranks.
        slots: the numbers of those whose units are returned.
    Attributes:
        last: the place of the last unit that was read.
        rows_in_pass: the units of a whole pass; 0 before the end of the first.
        kinds: of the rows that were read.
        bad: lines about bad rows in their order, also of those before a resume.
    """

    def __init__(
        self,
        rows: Rows,
        pieces_of: Callable[[Iterable[str]], Iterator[Piece]],
        seed: int,
        num_slots: int,
        slots: Iterable[int],
        max_bad_rows: int,
    ) -> None:
        self.last, self.rows_in_pass = START, 0
        self.kinds: Kinds = {"kind": None, "formats": []}
        self.bad: dict[str, None] = {}
        self._rows, self._pieces_of = rows, pieces_of
        self._slot_of = slot_order(seed, num_slots)
        self._max_bad_rows = max_bad_rows
        self._waiting: dict[int, deque[Unit]] = {slot: deque() for slot in slots}
        self._units = self._read(START)

    def continue_at(self, place: Place, bad: Iterable[str]) -> None:
        """Continue at a place, before the first unit is read; `bad` are lines about bad rows."""
        self.last, self._units = place, self._read(place)
        self.bad = dict.fromkeys(bad)

    def next_unit(self, slot: int) -> Unit:
        """Read rows until there is a unit for a slot."""
        while not self._waiting[slot]:
            unit = next(self._units)
            self.last = unit.place
            if unit.slot in self._waiting:
                self._waiting[unit.slot].append(unit)
        return self._waiting[slot].popleft()

    def refuse(self, row: BadRow, passes: int) -> None:
        """Record a bad row of the first pass, if it is not recorded, as before a resume."""
        line = redact(str(row))  # checkpoints contain it
        if passes == 0 and line not in self.bad:
            self.bad[line] = None
            check_bad_rows(list(self.bad), self._max_bad_rows)

    def _read(self, begin: Place) -> Iterator[Unit]:
        """Yield the units from a place on, pass after pass, without end.

        A slot gets a whole row, or a whole article of WikiText. A text file is assigned in pieces,
        so that all slots have a share of a single file. If the next piece of a slot does not
        directly follow its previous one, it begins as a document does.
        """
        number, first, start, skip = begin["row"], begin["first"], begin["rows"], begin["part"]
        for passes in itertools.count(begin["pass"]):
            for position, content in self._rows(start):
                row = check_kind(content, self.kinds)
                if isinstance(row, BadRow):
                    self.refuse(row, passes)
                    continue
                pieces: Iterable[Piece | None] = [None]
                if row.is_file:
                    pieces = self._pieces_of(row.pieces)
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
