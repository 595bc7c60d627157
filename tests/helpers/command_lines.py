"""Rows about command lines and files of scripts that run in this process, in milliseconds.

tests/conftest.py loads this module as a plugin, so its fixtures are at hand in every test.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from attacks import Attack
from conftest import PROJECT, Run

from support.programs import exit_code_of

# For anything that runs in this process; a loop over a number of the user would take hours.
SPARE_SECONDS = 20
GPT2_FILE = {
    **{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2},
    **{"vocab_size": 100, "n_positions": 64},
}


def flag(*args, says: str) -> Attack:
    """A row about flags alone."""
    shown = " ".join(args)
    return Attack(shown if len(shown) < 60 else shown[:40] + "…", args=args, says=says)


def written(name: str, content: str, *, says: str) -> Attack:
    """A row about a file, "mine" in the row's folder."""

    def prepare(folder: Path) -> None:
        (folder / "mine").write_text(content)

    return replace(flag(says=says), name=name, prepare=prepare)


@pytest.fixture
def main_of(capsys, monkeypatch):
    """main_of(module, *argv): run a script's main() in this process, as a `Run`."""
    monkeypatch.syspath_prepend(str(PROJECT / "scripts"))

    def run(module: str, *argv) -> Run:
        import importlib

        monkeypatch.setattr(sys, "argv", [module, *map(str, argv)])
        started = time.monotonic()
        code = exit_code_of(importlib.import_module(module).main) or 0
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
