"""Read metrics.jsonl. Trainer's log_history has records of the same types."""

import json
from pathlib import Path
from typing import TypedDict

from distributed_training import console
from distributed_training.files.atomic import only_finite, write_text
from distributed_training.files.checked_types import Count, has_type
from distributed_training.records.metrics_file import OF_EVALUATIONS
from distributed_training.records.results_types import Generated

# Keys of which a record has one: of a step, of a choice of --rank_shares auto, or of an evaluation.
KINDS = {"loss", "rank_sequences", *OF_EVALUATIONS}
MOST_LINES = 5  # that a message names


class _Step(TypedDict):
    step: Count


class Record(_Step, total=False):
    """A line of metrics.jsonl. A number may be null, and of Trainer NaN or infinite."""

    loss: float | None
    lr: float | None
    learning_rate: float | None
    grad_norm: float | None
    tokens_per_second: float | None
    seconds: float | None
    epoch: float | None
    eval_loss: float | None
    perplexity: float | None
    bits_per_byte: float | None
    generated: list[Generated]
    rank_sequences: list[Count]


def read_metrics(path: Path) -> tuple[list[dict], list[int]]:
    """Return the records of metrics.jsonl, and the numbers of the lines that cannot be read.

    An incomplete last line, which a killed run may leave, is dropped and not listed.

    Raises:
        OSError: the file is missing, cannot be read, or is not a regular file.
    """
    lines = path.read_bytes().split(b"\n")
    records, unreadable = [], []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if has_type(value, Record) and value.keys() & KINDS:
            records.append(value)
        elif number < len(lines):
            unreadable.append(number)
    return records, unreadable


def unreadable_lines(path: Path, numbers: list[int]) -> str:
    """Return the message about the lines of metrics.jsonl that cannot be read."""
    if len(numbers) == 1:
        return f"{path}: line {numbers[0]} cannot be read and is left out."
    lines = ", ".join(map(str, numbers[:MOST_LINES]))
    more = f" and {len(numbers) - MOST_LINES} more" if len(numbers) > MOST_LINES else ""
    return f"{path}: lines {lines}{more} cannot be read and are left out."


def kept_at(records: list[dict], step: int) -> list[dict]:
    """Return the records that a run keeps when it resumes from the checkpoint of a step."""
    # The checkpoint at the end of an epoch is saved before the epoch's evaluation, so a resumed
    # run repeats the evaluation of the checkpoint's own step.
    return [
        r
        for r in records
        if r["step"] < step or (r["step"] == step and not r.keys() & OF_EVALUATIONS)
    ]


def cut_at(path: Path, step: int) -> None:
    """Remove the records after a checkpoint, because these steps are trained again.

    Lines that cannot be read are removed, too, with a notice.
    """
    records, unreadable = read_metrics(path)
    if unreadable:
        console.warn(unreadable_lines(path, unreadable))
    kept = kept_at(records, step)
    write_text(path, "".join(json.dumps(only_finite(record)) + "\n" for record in kept))
