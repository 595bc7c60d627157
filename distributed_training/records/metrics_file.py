"""metrics.jsonl, one JSON object for each optimizer step and evaluation."""

import json
from pathlib import Path

from distributed_training import console
from distributed_training.files.atomic import only_finite, write_text

FILE = "metrics.jsonl"
# Keys that only a record of one kind has: of an evaluation, and of the texts generated after it; of
# a step, and of a choice of --rank_shares auto.
OF_EVALUATIONS = {"eval_loss", "generated"}
KINDS = {"loss", "rank_sequences", *OF_EVALUATIONS}
MOST_LINES = 5  # that a message names


def read_metrics(path: Path) -> tuple[list[dict], list[int]]:
    """Return the records of metrics.jsonl, and the numbers of the lines that cannot be read.

    An incomplete last line, which a killed run may leave, is dropped and not listed.

    Raises:
        OSError: the file is missing, cannot be read, or is not a regular file.
    """
    from distributed_training.records.record_types import is_record  # writing needs no types

    lines = path.read_bytes().split(b"\n")
    records, unreadable = [], []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if is_record(value) and value.keys() & KINDS:
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


class MetricsFile:
    """The metrics.jsonl that a run writes (rank 0)."""

    def __init__(self, path: Path):
        self.path = path
        self._unwritten = b""  # what did not fit on a full disk

    @classmethod
    def in_folder(cls, folder: Path) -> "MetricsFile":
        """Return the file in a run's output folder."""
        return cls(folder / FILE)

    def cut_at(self, step: int) -> None:
        """Remove the records after a checkpoint, because these steps are trained again.

        Lines that cannot be read are removed, too, with a notice.
        """
        records, unreadable = read_metrics(self.path) if self.path.is_file() else ([], [])
        if unreadable:
            console.warn(unreadable_lines(self.path, unreadable))
        # The checkpoint at the end of an epoch is saved before the epoch's evaluation, so a resumed
        # run repeats the evaluation of the checkpoint's own step.
        kept = [
            r
            for r in records
            if r["step"] < step or (r["step"] == step and not r.keys() & OF_EVALUATIONS)
        ]
        write_text(self.path, "".join(json.dumps(only_finite(record)) + "\n" for record in kept))

    def append(self, *records: dict) -> None:
        """Write records; if the disk is full, print a notice and keep them for the next call."""
        waiting = self._unwritten
        self._unwritten += b"".join(json.dumps(only_finite(r)).encode() + b"\n" for r in records)
        try:
            with open(self.path, "ab", buffering=0) as file:
                while self._unwritten:  # a nearly full disk may take a part of a line
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            if not waiting:
                console.warn(
                    f"{self.path} cannot be written ({error.strerror}): training continues, and "
                    "the missing lines are written as soon as there is space."
                )
