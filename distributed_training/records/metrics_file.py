"""metrics.jsonl, one JSON object for each optimizer step and evaluation."""

import json
from pathlib import Path

from distributed_training import console
from distributed_training.files.atomic import only_finite

FILE = "metrics.jsonl"
# Keys that only a record of an evaluation has, or of the texts generated after it.
OF_EVALUATIONS = {"eval_loss", "generated"}
# The phases of an optimizer step, whose seconds results.json and the figures have.
PHASES = ("data", "forward", "backward", "update")


class MetricsFile:
    """The metrics.jsonl that a run writes (rank 0)."""

    def __init__(self, path: Path):
        self.path = path
        self._unwritten = b""  # what did not fit on a full disk

    @classmethod
    def in_folder(cls, folder: Path) -> "MetricsFile":
        """Return the file in a run's output folder."""
        return cls(folder / FILE)

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
