"""Attacks as rows of a table: what is damaged or sent, and what must hold afterwards.

To add an attack, add a row to the table of a test_attacks_*.py file. A row that takes seconds runs
in `make test`; one with `soak=True` runs in `make soak` only. `make soak` runs every row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Attack:
    """One attack on the script or on one of its command lines.

    Attributes:
        name: what is damaged or sent; the test's id.
        prepare: gets a fresh folder; damages or creates what the attack needs there. Returns
            further arguments, or None.
        args: arguments of the attacked command.
        env: environment variables of the attacked command.
        code: the exit code that must hold.
        says: regular expression that the error line must match; None if the attack must not cause
            an error.
        holds: what else must hold; gets the folder and the finished run.
        soak: too slow for `make test`.
    """

    name: str
    prepare: Callable[[Path], list | None] = lambda folder: None
    args: tuple = ()
    env: dict = field(default_factory=dict)
    code: int = 2
    says: str | None = None
    holds: Callable | None = None
    soak: bool = False

    def check(self, folder: Path, run) -> None:
        """Assert what must hold.

        Args:
            folder: the folder that `prepare` got.
            run: a conftest.Run of the attacked command.
        """
        assert run.code == self.code, (
            f"exit code {run.code} instead of {self.code}\n{run.out[-3000:]}\n{run.err[-3000:]}"
        )
        if self.says is not None:
            assert re.search(self.says, run.error), run.error
        else:
            assert "Traceback" not in run.out + run.err, run.err
        if self.holds is not None:
            self.holds(folder, run)


def table(*attacks: Attack):
    """Decorate a test with it to run the test once for each row, as its argument `attack`."""
    rows = [
        pytest.param(
            attack,
            id=attack.name,
            marks=[pytest.mark.attack, *([pytest.mark.soak] if attack.soak else [])],
        )
        for attack in attacks
    ]
    return pytest.mark.parametrize("attack", rows)
