"""A lab of a hundred minutes: seven tasks about distributed training, which check themselves.

    python -m tools.lab              # the tasks, and how far you are
    python -m tools.lab start 1      # write the starting files of task 1, and print its page
    python -m tools.lab check 1      # what is right in your answer, what is not, and why
    python -m tools.lab report       # a page for the teacher: tasks, attempts, times

Nothing leaves this machine. Exit codes: 0; 1 if a check is not passed; 2 for wrong usage, or an
answer that cannot be read, which does not count as an attempt.
"""

import getpass
import platform
from pathlib import Path

from distributed_training import programs
from distributed_training.cli.parser import Options, Parser
from distributed_training.errors import EXIT_COMPLETED, EXIT_FAILED, UserError
from distributed_training.files.atomic import write_text
from distributed_training.files.user_files import reason_of
from distributed_training.settings import flag_types
from tools.lab import report
from tools.lab.catalogue import TASKS
from tools.lab.progress import Progress
from tools.lab.task import DEFAULT, Place, Task, option
from tools.lab.verdict import passed

ACTIONS = ("status", "start", "check", "report")


def main() -> int:
    """Read the arguments, and do what they ask for; return the exit code."""
    parser = Parser.of_script(__doc__)
    parser.prog = "python -m tools.lab"
    add = parser.add_argument
    add("action", nargs="?", choices=ACTIONS, default="status", help="(default: status)")
    numbers = f"of start and check: 1 to {len(TASKS)}"
    add("task", nargs="?", type=flag_types.natural_int, help=numbers)
    folder = "where you work (default: lab, next to this project's files)"
    add("--folder", metavar="DIR", type=flag_types.path, default=DEFAULT, help=folder)
    add("--name", help="of the student, for the report (default: user and host)")
    args = parser.parse_args()
    try:
        return run(args)
    except OSError as error:
        raise UserError(f"{args.folder}: {reason_of(error, args.folder)}") from error


def run(args: Options) -> int:
    """Do what the arguments ask for; return the exit code."""
    progress = Progress.read(args.folder)
    if args.action in ("start", "check"):
        task = find(args.task, args.action)
        return (start if args.action == "start" else check)(task, progress, args.folder)
    if args.task is not None:
        raise UserError(f"{args.action} is about all tasks: leave out {args.task}.")
    if args.action == "status":
        status(progress, args.folder)
    else:
        write_report(progress, args.folder, args.name or user_and_host())
    return EXIT_COMPLETED


def find(number: int | None, action: str) -> Task:
    """Return the task of a number."""
    for task in TASKS:
        if task.number == number:
            return task
    raise UserError(f"{action} needs the number of a task: 1 to {len(TASKS)}.")


def status(progress: Progress, folder: Path) -> None:
    """Print the tasks, and which is next."""
    done = sum(progress.has_passed(task.number) for task in TASKS)
    print(f"Lab in {folder}: {done} of {len(TASKS)} tasks passed\n")
    for task in TASKS:
        mark = (
            "✅" if progress.has_passed(task.number) else "▶️" if started(task, progress) else "  "
        )
        print(f" {task.number} {mark} {task.title} ({task.minutes} min)")
    left = [task for task in TASKS if not progress.has_passed(task.number)]
    if left:
        action = "check" if started(left[0], progress) else "start"
        print(f"\nNext: {left[0].command(action, folder / str(left[0].number))}")
    else:
        print(f"\nAll passed. For your teacher: python -m tools.lab report{option(folder)}")


def started(task: Task, progress: Progress) -> bool:
    """Return whether a task was started."""
    return task.number in progress.tasks


def start(task: Task, progress: Progress, folder: Path) -> int:
    """Write the starting files of a task unless they are there, and print its page."""
    progress.write(folder)  # the seed, before anything is drawn from it
    place = Place(folder / str(task.number), progress.seed)
    task.start(place)
    progress.start(task.number)
    progress.write(folder)
    print(task.page(place.folder))
    print(f"📁 {place.folder} (this page: {place.folder / 'page.md'})")
    return EXIT_COMPLETED


def check(task: Task, progress: Progress, folder: Path) -> int:
    """Check what was handed in, and record the attempt; return the exit code."""
    place = Place(folder / str(task.number), progress.seed)
    if not started(task, progress) or not place.folder.is_dir():
        raise UserError(
            f"Task {task.number} has not been started in {folder}: "
            f"{task.command('start', place.folder)}"
        )
    findings = task.check(place)
    progress.add(task.number, findings)
    progress.write(folder)
    print("\n".join(map(str, findings)))
    if not passed(findings):
        count = len(progress.tasks[task.number].attempts)
        print(f"\nTask {task.number} is not passed yet (attempt {count}).")
        return EXIT_FAILED
    print(f"\nTask {task.number} is passed.\n")
    status(progress, folder)
    return EXIT_COMPLETED


def write_report(progress: Progress, folder: Path, name: str) -> None:
    """Write the page for the teacher, about the student of this name."""
    if not progress.tasks:
        raise UserError(f"No task has been started in {folder}: python -m tools.lab start 1")
    file = folder / "report.md"
    text = report.page(TASKS, progress, name, folder.resolve())
    write_text(file, text + "\n")
    print(f"{text}\n\n📁 {file}")


def user_and_host() -> str:
    """Return a name that differs between students, as a shell's prompt has it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        user = "unknown"
    return f"{user}@{platform.node()}"


if __name__ == "__main__":
    programs.run_command_line(main)
