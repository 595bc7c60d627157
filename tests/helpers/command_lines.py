"""Runs the main() of a script in this process, in milliseconds.

tests/conftest.py loads this module as a plugin, so its fixtures are at hand in every test.
"""

import sys
import time
from pathlib import Path

import pytest
import script_mains
from conftest import Run

from distributed_training.programs import exit_code_of

# For anything that runs in this process; a loop over a number of the user would take hours.
SPARE_SECONDS = 20


@pytest.fixture
def main_of(capsys, monkeypatch):
    """main_of(name, *argv): run main() of scripts/NAME.py in this process, as a `Run`."""

    def run(name: str, *argv) -> Run:
        monkeypatch.setattr(sys, "argv", [name, *map(str, argv)])
        started = time.monotonic()
        code = exit_code_of(script_mains.main_of(f"scripts/{name}.py")) or 0
        out, err = capsys.readouterr()
        assert time.monotonic() - started < SPARE_SECONDS
        return Run(code, out, err, 0, Path())

    return run


@pytest.fixture
def convert(main_of):
    """convert(*args) runs the converter in this process; returns exit code and output."""

    def run(*args):
        done = main_of("convert_checkpoint", *args)
        return done.code, done.out + done.err

    return run
