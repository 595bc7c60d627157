"""Read what a student hands in: an answer in JSON, and the output folders of runs."""

from pathlib import Path

from distributed_training.errors import UserError
from distributed_training.files import atomic
from distributed_training.files.json_types import JsonObject, is_number
from distributed_training.files.user_files import read_user_json, shown
from distributed_training.records.recorded_run import RecordedRun, read_run


def read_answer(file: Path) -> JsonObject:
    """Read an answer file.

    Raises:
        UserError: it is missing, or not a JSON object.
    """
    if not file.is_file():
        raise UserError(f"{file} is missing: the task starts with this file; fill it in.")
    return read_user_json("the answer", str(file))


def number_of(answer: JsonObject, *keys: str) -> float:
    """Return the number at these keys, one inside of the other.

    Raises:
        UserError: it is missing, or not a number.
    """
    value: object = answer
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if not is_number(value):
        at = " → ".join(keys)
        raise UserError(f"The answer needs a number at {at}; it has {shown(repr(value))}.")
    return float(value)  # type: ignore[arg-type]


def choice_of(answer: JsonObject, key: str, known: list[str]) -> str:
    """Return the value of a key that must be one of some words.

    Raises:
        UserError: it is another one.
    """
    value = answer.get(key)
    if value not in known:
        raise UserError(
            f"The answer needs one of {', '.join(known)} at {key}; it has {shown(repr(value))}."
        )
    return str(value)


def read_complete_run(folder: Path, what: str) -> RecordedRun:
    """Read the run in a folder.

    Raises:
        UserError: there is no run, or it has not completed.
    """
    if not (folder / "results.json").is_file():
        raise UserError(f"{folder} has no run yet: {what} belongs there (--output_dir {folder}).")
    run = read_run(folder)
    if run.status == "running" and has_ended(folder):
        raise UserError(
            f"The run in {folder} was interrupted, and has not been resumed: it must complete."
        )
    if run.status != "completed":
        because = f" ({run.reason})" if run.reason else ""
        raise UserError(f"The run in {folder} is {run.status}{because}: it must complete.")
    return run


def has_ended(folder: Path) -> bool:
    """Return whether no process has the lock of an output folder: a killed one cannot say so.

    False on a file system without locks, where this cannot be found out.
    """
    file = folder / ".lock"
    if not file.exists():
        return True
    try:
        lock = atomic.lock(file)
    except BlockingIOError:
        return False
    if lock:
        lock.close()
    return lock is not None
