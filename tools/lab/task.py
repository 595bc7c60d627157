"""A task of the lab: a page, the files that it starts with, and a check."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.lab.verdict import Finding

DEFAULT = Path("lab")
TASKS = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class Place:
    """Where a student works on a task.

    Attributes:
        folder: of this task in the lab's folder; it has what the student hands in.
        seed: of this lab, from which a task draws what differs between students.
    """

    folder: Path
    seed: int


def option(lab: Path) -> str:
    """Return the option that names the lab's folder, unless that is the default."""
    return "" if lab == DEFAULT else f" --folder {lab}"


def prepare_nothing(place: Place) -> None:
    """For a task whose files are the same for every student."""


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        number: its place in the lab, from 1.
        name: its folder in tools/lab/tasks.
        title: what the student does.
        minutes: how long it takes on two cores.
        check: looks at what was handed in. Raises UserError if that cannot be read.
        prepare: writes the starting files that depend on the seed.
    """

    number: int
    name: str
    title: str
    minutes: int
    check: Callable[[Place], list[Finding]]
    prepare: Callable[[Place], None] = prepare_nothing

    def page(self, folder: Path) -> str:
        """Return the page of the task, with the folder in which this student works."""
        text = (TASKS / self.name / "page.md").read_text(encoding="utf-8")
        return text.replace("FOLDER", str(folder)).replace("CHECK", self.command("check", folder))

    def command(self, action: str, folder: Path) -> str:
        """Return the command of an action on this task.

        Args:
            folder: of the task, in the folder of the lab.
        """
        return f"python -m tools.lab {action} {self.number}{option(folder.parent)}"

    def start(self, place: Place) -> None:
        """Write the starting files and the page, unless the folder exists."""
        if place.folder.exists():
            return
        # Under another name first: an interrupted start leaves no folder that looks complete.
        partial = Place(place.folder.with_name(f".{place.folder.name}.partial"), place.seed)
        shutil.rmtree(partial.folder, ignore_errors=True)
        partial.folder.mkdir(parents=True)
        if (files := TASKS / self.name / "files").is_dir():
            shutil.copytree(
                files,
                partial.folder,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        self.prepare(partial)
        (partial.folder / "page.md").write_text(self.page(place.folder), encoding="utf-8")
        partial.folder.rename(place.folder)
