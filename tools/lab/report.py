"""report.md in the lab's folder: tasks, attempts and times, for the teacher."""

from collections import Counter
from pathlib import Path

from distributed_training.text_tables import markdown_table
from tools.lab.progress import Progress, TaskProgress
from tools.lab.task import Task


def page(tasks: list[Task], progress: Progress, name: str, folder: Path) -> str:
    """Return the page in Markdown.

    Args:
        name: of the student.
        folder: of the lab.
    """
    rows = [row(task, progress.tasks.get(task.number)) for task in tasks]
    done = sum(progress.has_passed(task.number) for task in tasks)
    minutes = sum(task.minutes or 0 for task in progress.tasks.values())
    header = ("task", "passed", "attempts", "minutes", "planned", "mistakes that the check named")
    lines = [
        f"# Lab of {name}",
        "",
        f"{done} of {len(tasks)} tasks passed, in {minutes:.0f} minutes from the start of each "
        "task to the attempt that passed; later attempts are not counted. A number after a mistake "
        f"is that of the attempts with it. Times are in UTC. Folder: {folder}",
        "",
        markdown_table(rows, header),
    ]
    for task in tasks:
        if found := progress.tasks.get(task.number):
            lines += ["", f"## {task.number}. {task.title}", "", *attempts(found)]
            lines += ["", *explained(found)] if explained(found) else []
    return "\n".join(lines)


def row(task: Task, done: TaskProgress | None) -> tuple[str, ...]:
    """Return the row of a task."""
    title = f"{task.number}. {task.title}"
    if done is None:
        return title, "not started", "0", "—", str(task.minutes), "—"
    minutes = "—" if done.minutes is None else f"{done.minutes:.0f}"
    state = "no" if done.passed_at is None else "yes"
    counts = Counter(name for attempt in done.needed for name in dict.fromkeys(attempt.wrong))
    return title, state, str(len(done.needed)), minutes, str(task.minutes), listed(counts) or "—"


def listed(counts: Counter[str]) -> str:
    """Return names with their counts, which are left out if they are 1."""
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())


def attempts(done: TaskProgress) -> list[str]:
    """Return the list of a task's attempts, with the findings of each."""
    lines = [f"- {done.started_at}: started"]
    for number, attempt in enumerate(done.attempts, 1):
        after = " (after the task was passed)" if number > len(done.needed) else ""
        what = listed(Counter(attempt.wrong)) or "passed"
        lines.append(f"- {attempt.at}: attempt {number}{after}: {what}")
    return lines


def explained(done: TaskProgress) -> list[str]:
    """Return a list of the mistakes of a task, each with what the check said about it last."""
    texts = {name: text for attempt in done.attempts for name, text in attempt.texts.items()}
    return [f"- **{name}**: {' '.join(text.split())}" for name, text in texts.items()]
