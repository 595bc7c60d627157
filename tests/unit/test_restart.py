"""--auto_micro_batch: which micro-batch comes next, and that the global batch stays."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import process
from support.cli.parse import parse_arguments
from support.cluster.restart import continue_restarted, restart_values


@pytest.mark.parametrize(
    "batch_size, accumulation, new",
    [(8, 1, (4, 2)), (8, 3, (4, 6)), (5, 1, (1, 5)), (5, 2, (2, 5))],
)
def test_the_micro_batch_is_halved_and_the_global_batch_stays(batch_size, accumulation, new):
    args = SimpleNamespace(
        auto_micro_batch=True, batch_size=batch_size, gradient_accumulation_steps=accumulation
    )
    values = restart_values(args, Path("out"))
    assert (values["batch_size"], values["gradient_accumulation_steps"]) == new
    assert new[0] * new[1] == batch_size * accumulation


def test_a_restart_changes_flags_and_the_deepspeed_file_together(monkeypatch):
    args = parse_arguments(["--strategy", "zero2", "--batch_size", "8", "--auto_micro_batch"])
    values = restart_values(args, Path("out"))
    monkeypatch.setenv(process.RESTARTED, json.dumps(values))
    changed = continue_restarted(args)
    config = changed.ds_config_dict
    assert (changed.batch_size, changed.gradient_accumulation_steps) == (4, 2)
    assert (changed.output_dir, changed.given) == ("out", args.given)
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 2
    assert config["train_batch_size"] == args.ds_config_dict["train_batch_size"]
