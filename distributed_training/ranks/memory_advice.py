"""What a user reads whose memory ran out: what used it, and what would fit."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from distributed_training.errors import LESS_MEMORY


@dataclass
class MemoryAdvice:
    """Lines for a user whose memory ran out, from the parts of the run that know them."""

    facts: list[Callable[[], list[str]]] = field(default_factory=list)  # on what uses the memory
    remedies: Callable[[], list[str]] = list  # on what would fit

    def lines(self) -> list[str]:
        """Return all lines; a part that fails has none."""
        lines, remedies = [], []
        for describe in self.facts:
            with contextlib.suppress(Exception):  # there may be too little memory left
                lines += describe()
        with contextlib.suppress(Exception):  # an architecture that the planner does not know
            remedies = self.remedies()
        return lines + (remedies or [LESS_MEMORY])
