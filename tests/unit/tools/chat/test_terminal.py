"""What scripts/chat.py reads and prints."""

import io
import subprocess
import sys

import pytest
from conftest import PROJECT
from tokenizer_zoo import tokenizer_of

from distributed_training.errors import UserError
from tools.chat.speaker import Printer
from tools.chat.terminal import lines


def test_a_closed_input_has_no_lines():
    """Some programs start daemons so (`<&-`)."""
    program = "import sys; from distributed_training import process; process.protect_output()"
    shell = f'"$0" -c "{program}; print(sys.stdin.isatty(), [*sys.stdin])" <&-'
    run = subprocess.run(
        ["bash", "-c", shell, sys.executable], cwd=PROJECT, capture_output=True, text=True
    )
    assert (run.stdout, run.stderr) == ("False []\n", "")


def test_an_input_that_cannot_be_read(monkeypatch, tmp_path):
    """Under nohup it is open for writing only."""
    with open(tmp_path / "file", "wb") as file:
        unreadable = io.TextIOWrapper(io.BufferedReader(io.FileIO(file.fileno(), closefd=False)))
        monkeypatch.setattr(sys, "stdin", unreadable)
        with pytest.raises(UserError, match="Standard input cannot be read: Bad file"):
            [*lines(on_terminal=False)]


def test_an_answer_cannot_control_the_terminal(capsys):
    printer = Printer(tokenizer_of("gpt2"), skip_prompt=False)
    for part in ("\x1b]0;title\x07one\n", "\ttwo\u202e three"):
        printer.on_finalized_text(part)
    assert capsys.readouterr().out == "\\x1b]0;title\\x07one\n\ttwo\\u202e three"
    assert printer.text.startswith("\x1b]0;")  # the conversation keeps the exact text
