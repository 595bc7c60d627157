"""The arguments: typed, frozen, and described in one place."""

import os
import sys
from typing import get_args, get_type_hints

import pytest

from support import startup
from support.cli.arguments import Arguments, choose_seq_length
from support.cli.flags import DEFAULTS, FLAGS, build_parser, described_flags
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
    for name in ("lr", "seq_length", "a_new_one"):
        with pytest.raises(AttributeError):
            setattr(started, name, 1)
    assert started.lr == 1e-3


def test_replace_returns_a_frozen_copy(started):
    copy = started.replace(seq_length=64)
    assert (copy.seq_length, copy.lr, started.seq_length) == (64, 1e-3, None)
    with pytest.raises(TypeError, match="seq_lenght"):
        started.replace(seq_lenght=64)


def test_every_flag_is_described_and_its_default_has_the_type_of_the_field():
    described = {name for texts in described_flags().values() for name in texts}
    assert FLAGS.keys() - described == {"local_rank", "use_deepspeed", "use_fsdp"}
    hints = get_type_hints(Arguments)
    for name, default in DEFAULTS.items():
        kinds = get_args(hints[name]) or (hints[name],)
        assert default in (None, []) or isinstance(default, kinds), name


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


def test_a_run_as_model_names_the_model_in_it(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"--model {tmp_path}/hf"):
        startup.check_model_path(parse_arguments(["--model", str(tmp_path)]))


def test_a_checkpoint_that_is_missing_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match=f"--resume {tmp_path}/x: there is no such checkpoint"):
        startup.check_run(parse_arguments(["--resume", str(tmp_path / "x")]))
