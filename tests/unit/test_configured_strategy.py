"""Where a user's DeepSpeed file keeps the model states decides what the run needs."""

import json

import pytest

from support.cli.ds_config import configured_strategy
from support.cli.parse import parse_arguments
from support.errors import UserError
from support.strategies import ops
from support.strategy import STRATEGIES


def arguments(tmp_path, zero: dict):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    return parse_arguments(["--ds_config", str(file)])


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_project_s_files_are_as_the_table_says(name):
    assert configured_strategy(parse_arguments(["--strategy", name])) == STRATEGIES[name]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_in_host_memory_needs_cpu_adam(tmp_path, stage):
    args = arguments(tmp_path, {"stage": stage, "offload_optimizer": {"device": "cpu"}})
    strategy = configured_strategy(args)
    assert args.strategy == f"zero{stage}" and strategy.optimizer_on == "host"
    assert strategy.offloads and not STRATEGIES[args.strategy].offloads
    assert "cpu_adam" in ops.needed_ops(strategy)
    assert "cpu_adam" not in ops.needed_ops(STRATEGIES[args.strategy])


def test_parameters_in_host_memory(tmp_path):
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    strategy = configured_strategy(arguments(tmp_path, zero))
    assert strategy.parameters_on == "host" and not strategy.uses_nvme


def test_parameters_on_nvme_without_the_optimizer_are_refused(tmp_path):
    with pytest.raises(UserError, match="--strategy infinity"):
        arguments(tmp_path, {"stage": 3, "offload_param": {"device": "nvme"}})


@pytest.mark.parametrize(
    "optimizer, flags, reason",
    [
        ({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}, ["--optim", "sgd"], "remove"),
        ({"type": "AdamW"}, ["--optim", "adamw_8bit"], "remove"),
        ({"type": "SGD", "params": {"lr": 0.01}}, ["--adam_beta2", "0.95"], "--adam_beta2"),
    ],
)
def test_an_optimizer_of_the_file_and_flags_of_another_are_refused(
    tmp_path, optimizer, flags, reason
):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": optimizer}))
    with pytest.raises(UserError, match=reason):
        parse_arguments(["--ds_config", str(file), *flags])


def test_adam_of_a_deepspeed_file_is_adamw(tmp_path):
    file = tmp_path / "ds.json"
    optimizer = {"type": "Adam", "params": {"lr": 0.01}}
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": optimizer}))
    assert parse_arguments(["--ds_config", str(file), "--optim", "adamw"]).optim == "adamw"
