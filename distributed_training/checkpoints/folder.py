"""The folder of a run's checkpoints: which are added, removed or renamed, and two marks.

The files `latest` and `best` have the names of checkpoints. Only rank 0 calls what writes here.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from distributed_training import console
from distributed_training.checkpoints import format as files
from distributed_training.files import atomic


class CheckpointFolder(NamedTuple):
    """The folder of a run's checkpoints."""

    path: Path
    keep_last: int | None  # number of checkpoints to keep, besides the best; None: all
    is_shared: bool  # all nodes see the folder

    def of_step(self, step: int) -> Path:
        """Return the checkpoint of a step, which may not exist."""
        return files.step_folder(self.path, step)

    def mark(self, mark: str, step: int) -> None:
        """Write the name of a step's checkpoint to the file `mark`."""
        atomic.write_text(self.path / mark, f"{self.of_step(step).name}\n")

    def replace_best(self, step: int, keeps_old: bool) -> None:
        """Mark a step's checkpoint as the best one, and remove the old one unless it is kept.

        --keep_last did not remove it while it was the best.
        """
        old = files.marked(self.path, "best")
        self.mark("best", step)
        if old not in ("", files.marked(self.path, "best")) and not keeps_old:
            shutil.rmtree(self.path / old, ignore_errors=True)
        self._remove_old()

    def remove_leftovers(self) -> None:
        """Remove what killed runs have left."""
        atomic.remove_leftovers(self.path)

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps."""
        for path in files.list_checkpoints(self.path):
            if files.step_of(path) > step:
                atomic.set_aside(path, f"aside-{path.name}")

    def _remove_old(self) -> None:
        for old in files.list_checkpoints(self.path)[self.keep_last :] if self.keep_last else ():
            if old.name != files.marked(self.path, "best"):
                shutil.rmtree(old, ignore_errors=True)

    def add(self, unfinished: Path, final: Path) -> None:
        """Rename the folder of a complete checkpoint, and remove old ones (--keep_last)."""
        os.replace(unfinished, final)
        self._remove_old()
        try:  # the checkpoint is complete, also if the disk is full now
            atomic.sync(self.path)
            atomic.sync(self.path.parent)
            self.mark("latest", files.step_of(final))  # for users only
        except OSError as error:
            console.warn(f"checkpoints/latest cannot be written: {error.strerror}.")
