"""progress.json in the lab's folder: when each task was started, its attempts, and its end."""

import json
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from distributed_training.errors import UserError
from distributed_training.files.atomic import write_text
from distributed_training.files.user_files import read_user_json
from tools.lab.verdict import Finding, passed

NAME = "progress.json"
VERSION = 1


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass
class Attempt:
    """A check of what a student handed in.

    Attributes:
        at: the time in UTC.
        wrong: the names of the mistakes; none if it passed.
        texts: what the check said about each name; none in files of earlier versions.
    """

    at: str
    wrong: list[str]
    texts: dict[str, str] = field(default_factory=dict)


@dataclass
class TaskProgress:
    """How far a task is. Further attempts after the first that passes are recorded too."""

    started_at: str
    attempts: list[Attempt] = field(default_factory=list)
    passed_at: str | None = None

    @property
    def needed(self) -> list[Attempt]:
        """The attempts up to the first that passed."""
        first = next((n for n, one in enumerate(self.attempts, 1) if not one.wrong), None)
        return self.attempts[:first]

    @property
    def minutes(self) -> float | None:
        """The minutes from the start to the attempt that passed; None before."""
        if self.passed_at is None:
            return None
        took = datetime.fromisoformat(self.passed_at) - datetime.fromisoformat(self.started_at)
        return took.total_seconds() / 60


@dataclass
class Progress:
    """The progress in one lab folder; `seed` makes it differ from that of other students."""

    seed: int
    tasks: dict[int, TaskProgress] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Progress":
        """Read the progress of a folder; a new folder gets a new seed.

        Raises:
            UserError: the file cannot be read, or is damaged.
        """
        file = folder / NAME
        if not file.exists():
            return cls(secrets.randbelow(2**31))
        found = read_user_json("progress", str(file))
        try:
            if found["schema_version"] != VERSION:
                raise ValueError(f"version {found['schema_version']}")
            tasks = {
                int(number): TaskProgress(
                    task["started_at"],
                    [
                        Attempt(one["at"], list(one["wrong"]), dict(one.get("texts", {})))
                        for one in task["attempts"]
                    ],
                    task["passed_at"],
                )
                for number, task in found["tasks"].items()
            }
            for task in tasks.values():
                task.minutes  # noqa: B018 (the times are valid)
            return cls(int(found["seed"]), tasks)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{file} is damaged ({error!r}): restore it, or use another folder (--folder)."
            ) from None

    def write(self, folder: Path) -> None:
        """Write the file; a task whose check is interrupted loses nothing."""
        folder.mkdir(parents=True, exist_ok=True)
        tasks = {
            str(number): {
                "started_at": task.started_at,
                "passed_at": task.passed_at,
                "attempts": [vars(attempt) for attempt in task.attempts],
            }
            for number, task in sorted(self.tasks.items())
        }
        content = {"schema_version": VERSION, "seed": self.seed, "tasks": tasks}
        write_text(folder / NAME, json.dumps(content, indent=2) + "\n")

    def start(self, number: int) -> None:
        """Record the start of a task, unless it was started before."""
        self.tasks.setdefault(number, TaskProgress(now()))

    def add(self, number: int, findings: list[Finding]) -> None:
        """Record an attempt."""
        task, at = self.tasks[number], now()
        mistakes = [one for one in findings if not one.is_right]
        texts = {one.name: one.text for one in mistakes}
        task.attempts.append(Attempt(at, [one.name for one in mistakes], texts))
        if passed(findings):
            task.passed_at = task.passed_at or at

    def has_passed(self, number: int) -> bool:
        """Return whether a task was passed."""
        return number in self.tasks and self.tasks[number].passed_at is not None
