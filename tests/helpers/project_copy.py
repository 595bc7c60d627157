"""A copy of the project, for tests that build it or let commands write into its folder."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def project_files() -> list[str]:
    """Return the names of the files that git tracks, or would track, and that exist."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (PROJECT / name).exists()]


def copy_project(target: Path, names: Iterable[str] | None = None) -> Path:
    """Copy the files of the project; `names` are those of `project_files` if they are known."""
    for name in project_files() if names is None else names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, target / name)
    return target
