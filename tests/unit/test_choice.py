"""The flags that may be auto, and --global_batch_size, on the command line."""

import pytest

from distributed_training.cli.parse import parse_arguments, read_command_line
from distributed_training.errors import UserError
from distributed_training.print_flags import print_flags


def test_a_global_batch_determines_the_accumulation(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    training = parse_arguments(["--batch_size", "3", "--global_batch_size", "24"]).training
    assert training.gradient_accumulation_steps == 4 and training.global_batch(2) == 24
    # Both flags are valid if they agree.
    same = ["--batch_size", "3", "--global_batch_size", "24", "--gradient_accumulation_steps", "4"]
    assert parse_arguments(same).training == training


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--global_batch_size 10 --batch_size 4", "not a multiple of --batch_size 4 × 1 rank"),
        ("--global_batch_size 8 --gradient_accumulation_steps 3", "makes 2 micro-batches"),
        ("--batch_size auto", "needs --global_batch_size"),
        ("--batch_size auto --global_batch_size 8 --gradient_accumulation_steps 2", "leave"),
        ("--batch_size auto --global_batch_size 8 --rank_shares 2,1", "equal shares"),
        ("--strategy auto --eval_only", "does not train"),
        ("--strategy auto --simulate_gpus 4", "real GPUs"),
        ("--global_batch_size 8 --ds_config ds_config_stage2.json", "set it there"),
        ("--strategy auto --prove", "all strategies"),
        ("--strategy auto --fsdp_config x.json", "leave --ds_config and --fsdp_config out"),
    ],
)
def test_what_auto_excludes(flags, said):
    with pytest.raises(UserError, match=said):
        read_command_line(flags.split())


def test_the_printed_flags_are_those_of_any_number_of_ranks(monkeypatch, capsys, tmp_path):
    """The accumulation follows from --global_batch_size."""
    line = read_command_line(["--batch_size", "2", "--global_batch_size", "8"])
    monkeypatch.setattr("distributed_training.process.check_output", lambda: None)
    with pytest.raises(SystemExit):
        print_flags(line, launch=None, choose=None)
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    for world_size, steps in ((1, 4), (2, 2), (4, 1)):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        training = parse_arguments(["--config", str(tmp_path / "run.yaml")]).training
        assert training.gradient_accumulation_steps == steps
