"""What a user reads whose memory ran out: what used it, and what would fit."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from distributed_training.errors import LESS_MEMORY


@dataclass
class MemoryAdvice:
    """Lines for a user whose memory ran out, from the parts of the run that know them."""

    _facts: list[Callable[[], list[str]]] = field(default_factory=list)  # on what uses the memory
    _remedies: Callable[[], list[str]] = list  # on what would fit

    def explain_with(self, describe: Callable[[], list[str]]) -> None:
        """Add a function that returns lines on what uses the memory."""
        self._facts.append(describe)

    def advise_with(self, remedies: Callable[[], list[str]]) -> None:
        """Take the lines on what would fit from this function."""
        self._remedies = remedies

    def lines(self) -> list[str]:
        """Return all lines; a part that fails has none."""
        lines, remedies = [], []
        for describe in self._facts:
            with contextlib.suppress(Exception):  # there may be too little memory left
                lines += describe()
        with contextlib.suppress(Exception):  # an architecture that the planner does not know
            remedies = self._remedies()
        return lines + (remedies or [LESS_MEMORY])
