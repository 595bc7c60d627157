"""Rows about command lines and files that the parser reads in this process, in milliseconds.

tests/conftest.py loads this module as a plugin, so its fixtures are at hand in every test.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from attacks import Attack
from conftest import PROJECT, Run

from support.cli.parse import parse_arguments
from support.errors import UserError
from support.process import exit_code_of

LONG = "a" * 5000

DIGITS = "9" * 5000

DEEP = 100_000

SPARE_SECONDS = (
    20  # for anything that runs in this process; a loop over a number of the user would take hours
)


def parsed(argv: list) -> Run:
    """What the parser makes of a command line, as a `Run`; its output is the resolved settings."""
    started = time.monotonic()
    try:
        args = parse_arguments([str(argument) for argument in argv])
        code, out, err = 0, json.dumps(vars(args), default=str), ""
    except UserError as error:
        code, out, err = error.exit_code, "", f"❌ {error}\n"
    assert time.monotonic() - started < SPARE_SECONDS
    assert len(err) < 1000 and err.count("\n") < 2, "one line, and not as long as what was typed"
    return Run(code, out, err, 0, Path())


def settings(run: Run) -> dict:
    return json.loads(run.out)


def flag(*args, says: str | None = None, **settled) -> Attack:
    """A row about flags alone; `settled` are settings that must come of them."""

    def holds(_folder, run):
        found = settings(run)
        assert {name: found[name] for name in settled} == settled

    shown = " ".join(args)
    shown = shown if len(shown) < 60 else shown[:40] + "…"
    return Attack(
        shown, args=args, code=2 if says else 0, says=says, holds=holds if settled else None
    )


def written(name: str, content: str | bytes, *args, says: str | None = None, **settled) -> Attack:
    """A row about a file; args has "FILE" where its path goes."""

    def prepare(folder: Path) -> list:
        file = folder / "mine"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return [file if argument == "FILE" else argument for argument in args]

    return replace(flag(says=says, **settled), name=name, prepare=prepare)


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
def convert(capsys, monkeypatch):
    """convert(*args) runs the converter in this process; returns exit code and output."""
    import convert_checkpoint

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *map(str, args)])
        code = exit_code_of(convert_checkpoint.main) or 0
        out, err = capsys.readouterr()
        return code, out + err

    return run


GPT2_FILE = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 100,
    "n_positions": 64,
}
