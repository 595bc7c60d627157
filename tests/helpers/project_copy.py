"""A copy of the project, for tests that build it or let commands write into its folder."""

import shutil
from pathlib import Path

from documents import PROJECT, tracked


def copy_project(target: Path) -> Path:
    """Copy the files that git tracks, or would track."""
    for name in tracked():
        if (PROJECT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, target / name)
    return target
