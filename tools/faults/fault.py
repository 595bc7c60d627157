"""What a fault is: the reports about it, the check that shows it, and what the check found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tools.faults.bench import Bench, Launch

PATCHES = Path(__file__).parent / "patches"
# The groups of the museum in the order of the page, and how many faults each has at least.
GROUPS = {
    "loss and gradients": 6,
    "data and order": 3,
    "resume": 3,
    "sharding and export": 2,
    "memory and counts": 2,
}


@dataclass(frozen=True)
class Report:
    """A public report of the fault in another program."""

    repository: str  # owner/name on GitHub
    number: int  # of the issue or pull request
    says: str  # in at most 15 words

    @property
    def url(self) -> str:
        """The address; GitHub redirects it to the pull request if it is one."""
        return f"https://github.com/{self.repository}/issues/{self.number}"


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    caught: bool
    by: str  # the program, flag or file that shows it
    step: int | None = None  # the first step at which it shows; None: it does not depend on steps
    evidence: str = ""  # the line that was printed


class Check(Protocol):
    """What a user would run. Checks are compared: faults with equal checks share the clean runs."""

    @property
    def command(self) -> str:
        """What the user runs."""

    @property
    def about(self) -> str:
        """What the command does, or what its runs are; the page adds it after a comma."""

    def __call__(self, bench: Bench) -> Finding:
        """Run it on a copy of the project, with the seed of the bench.

        Raises:
            TrainingError: a run fails that should not.
        """


@dataclass(frozen=True)
class Fault:
    """A documented bug, as it would look in this project."""

    name: str  # of its patch: patches/NAME.patch
    group: str  # one of GROUPS
    title: str  # what is wrong, in a line
    reports: tuple[Report, ...]
    effect: str  # what it does to the loss curve
    check: Check
    elsewhere: str  # how to see it in any trainer
    curve: Launch | None = None  # the run whose losses the figure shows, with and without the fault
    also: tuple[Check, ...] = ()  # other checks that must catch it

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks that must catch it, the first one first."""
        return (self.check, *self.also)

    @property
    def patch(self) -> Path:
        """The file of its patch."""
        return PATCHES / f"{self.name}.patch"
