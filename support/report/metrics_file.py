"""metrics.jsonl: one JSON object per line, for each optimizer step and each evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from support import console
from support.files.atomic import only_finite, write_text


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
            record = json.loads(line)
            is_record = record.keys() & {"loss", "eval_loss"} and type(record["step"]) is int
        except (ValueError, AttributeError, KeyError, RecursionError):
            is_record = False
        if is_record:
            records.append(record)
        elif number < len(lines):
            unreadable.append(number)
    return records, unreadable


class MetricsFile:
    """The metrics.jsonl that a run writes (rank 0)."""

    def __init__(self, path: Path):
        self.path = path
        self._unwritten = b""  # what did not fit on a full disk
        self._warned = False

    def cut_at(self, step: int) -> None:
        """Remove the records after a checkpoint, because these steps are trained again."""
        records = read_metrics(self.path)[0] if self.path.is_file() else []
        # The checkpoint at the end of an epoch is saved before the epoch's evaluation, so a resumed
        # run repeats the evaluation of the checkpoint's own step.
        kept = [r for r in records if r["step"] < step or (r["step"] == step and "loss" in r)]
        write_text(self.path, "".join(json.dumps(only_finite(record)) + "\n" for record in kept))

    def append(self, *records: dict) -> None:
        """Write records; if the disk is full, print a notice and keep them for the next call."""
        self._unwritten += b"".join(json.dumps(only_finite(r)).encode() + b"\n" for r in records)
        try:
            with open(self.path, "ab", buffering=0) as file:
                while self._unwritten:  # a nearly full disk may take a part of a line
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
            self._warned = False
        except OSError as error:
            if not self._warned:
                console.warn(
                    f"{self.path} cannot be written ({error.strerror}): training continues, and "
                    "the missing lines are written as soon as there is space."
                )
            self._warned = True
