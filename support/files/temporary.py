"""Temporary folders and files that a process removes at the latest when it exits."""

from __future__ import annotations

import contextlib
from pathlib import Path

from support.files.atomic import remove


class TemporaryPaths(list[str]):
    """Paths of temporary folders and files of this process."""

    def clean_up(self, *paths: str) -> None:
        """Remove the given folders and files; without arguments all of them."""
        for path in [entry for entry in self if not paths or entry in paths]:
            with contextlib.suppress(ValueError):  # two threads may clean up at the same time
                self.remove(path)
            remove(Path(path))
