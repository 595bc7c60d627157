"""The arguments cannot be changed after parsing."""

import ast
import os
import sys

import pytest
from syntax import nodes_of

from support import PROJECT, startup
from support.cli.arguments import choose_seq_length
from support.cli.flags import build_parser
from support.cli.parse import parse_arguments
from support.errors import UserError


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The arguments with which the script calls main()."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(startup.process, "protect_output", lambda: None)
    args, _launch = startup.start(["--output_dir", str(tmp_path / "run"), "--lr", "1e-3"])
    return args


def test_started_run_has_frozen_arguments(started):
    for name in ("lr", "seq_length", "a_new_one"):
        with pytest.raises(AttributeError, match=f"args.{name} cannot be changed"):
            setattr(started, name, 1)
    with pytest.raises(AttributeError, match=r"args\.lr cannot be changed"):
        del started.lr
    assert started.lr == 1e-3


def test_replace_returns_a_frozen_copy(started):
    copy = started.replace(seq_length=64)
    assert (copy.seq_length, copy.lr, started.seq_length) == (64, 1e-3, None)
    with pytest.raises(AttributeError):
        copy.lr = 1
    with pytest.raises(AttributeError, match="seq_lenght"):
        started.replace(seq_lenght=64)


def test_no_code_assigns_to_the_arguments_after_parsing():
    files = [
        PROJECT / "real_model_example.py",
        *(PROJECT / "scripts").glob("*.py"),
        *(PROJECT / "support").rglob("*.py"),
    ]
    changes = [
        f"{file.relative_to(PROJECT)}:{node.lineno}"
        for file in files
        if file.parent != PROJECT / "support" / "cli"  # which parses them
        for node in nodes_of(file)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and isinstance(node.value, ast.Name)
        and node.value.id == "args"
    ]
    assert not changes


@pytest.mark.parametrize(
    "flags, positions, length",
    [
        ([], None, 256),
        (["--model", "gpt2"], 1024, 512),
        (["--model", "gpt2"], 128, 128),
        (["--seq_length", "64"], 128, 64),
    ],
)
def test_default_of_seq_length(flags, positions, length):
    assert choose_seq_length(parse_arguments(flags), positions) == length


def test_seq_length_above_the_positions():
    with pytest.raises(UserError, match="more than the 64 positions"):
        choose_seq_length(parse_arguments(["--seq_length", "65"]), 64)


PATHS = [
    *("--config", "--model", "--dataset", "--validation_file", "--chat_template", "--cache_dir"),
    *("--ds_config", "--fsdp_config", "--nvme_path", "--output_dir", "--resume", "--export_hf"),
    *("--logging_dir", "--memory_snapshot", "--profile"),
]


@pytest.mark.parametrize("flag", PATHS)
def test_home_folder_in_a_path(flag, monkeypatch):
    """Values of a run file never see a shell, and bash leaves --output_dir=~/x as it is."""
    monkeypatch.setenv("HOME", "/home/somebody")
    args, _ = build_parser().parse_known_args([f"{flag}=~/x"])
    path = "/home/somebody/x"
    assert getattr(args, flag[2:]) == ([path] if flag == "--dataset" else path)


def test_home_folder_in_a_run_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/somebody")
    (tmp_path / "run.yaml").write_text("output_dir: ~/runs\ntext_column: ~x\n")
    args = parse_arguments(["--config", str(tmp_path / "run.yaml")])
    assert (args.output_dir, args.text_column) == ("/home/somebody/runs", "~x")
