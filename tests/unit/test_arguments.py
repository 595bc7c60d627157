"""The arguments: typed, frozen, and described in one place."""

import os
import sys
from typing import get_args, get_type_hints

import pytest

from support import startup
from support.cli.arguments import Arguments, choose_seq_length
from support.cli.flags import DEFAULTS, FLAGS, GROUPS
from support.cli.parse import parse_arguments
from support.errors import UserError


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The arguments with which the script calls main()."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(startup.process, "protect_output", lambda: None)
    monkeypatch.setattr(startup.process, "catch_signals", lambda numbers: None)
    args, _launch = startup.start(["--output_dir", str(tmp_path / "run"), "--lr", "1e-3"])
    return args


def test_started_run_has_frozen_arguments(started):
    with pytest.raises(AttributeError):
        started.lr = 1
    copy = started.replace(seq_length=64)
    assert (copy.seq_length, copy.lr, started.seq_length) == (64, 1e-3, None)


def test_every_flag_is_described_and_its_default_has_the_type_of_the_field():
    described = {name for texts in GROUPS.values() for name in texts}
    assert FLAGS.keys() == described
    hints = get_type_hints(Arguments)
    for name, default in DEFAULTS.items():
        kinds = get_args(hints[name]) or (hints[name],)
        assert default in (None, []) or isinstance(default, kinds), name


def test_default_of_seq_length():
    gpt2 = parse_arguments(["--model", "gpt2"])
    assert choose_seq_length(parse_arguments([]), None) == 256
    assert choose_seq_length(gpt2, 1024) == 512 and choose_seq_length(gpt2, 128) == 128
    with pytest.raises(UserError, match="more than the 64 positions"):
        choose_seq_length(parse_arguments(["--seq_length", "65"]), 64)


def test_home_folder_in_a_path(monkeypatch, tmp_path):
    """Values of a run file never see a shell."""
    monkeypatch.setenv("HOME", "/home/somebody")
    (tmp_path / "run.yaml").write_text("output_dir: ~/runs\ntext_column: ~x\n")
    args = parse_arguments(["--config", str(tmp_path / "run.yaml"), "--cache_dir=~/x"])
    assert args.cache_dir == "/home/somebody/x"  # bash leaves --cache_dir=~/x as it is
    assert (args.output_dir, args.text_column) == ("/home/somebody/runs", "~x")


def test_a_folder_without_a_model_or_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        startup.check_model_path(parse_arguments(["--model", str(tmp_path)]))
    with pytest.raises(UserError, match=f"--resume {tmp_path}/x: there is no such checkpoint"):
        startup.check_run(parse_arguments(["--resume", str(tmp_path / "x")]))
