"""ZeRO 3: whole blocks are gathered at once, and one rank trains without sharding."""

import pytest
from conftest import PROJECT
from small_models import CONFIGS
from torch import nn
from transformers import AutoModelForCausalLM

from distributed_training.cli.parse import parse_arguments
from distributed_training.strategies.deepspeed import patches
from distributed_training.strategies.table import STRATEGIES


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(patches, "reduce_gradients_of_blocks", lambda: None)
    return AutoModelForCausalLM.from_config(CONFIGS["llama"])


def marked(strategy, model) -> list[nn.Module]:
    strategy.mark_blocks(model)
    return [module for module in model.modules() if getattr(module, "_z3_leaf", False)]


def test_blocks_are_gathered_at_once(model):
    assert marked(STRATEGIES["zero3"], model) == [*model.model.layers]


def test_a_block_that_shares_a_parameter_is_not(model):
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    assert not marked(STRATEGIES["zero3"], model)


def test_own_files_and_nvme_gather_layers(model, tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    own = parse_arguments(["--ds_config", str(file)]).strategy
    for strategy in (own, STRATEGIES["infinity"], STRATEGIES["zero2"]):
        assert not marked(strategy, model)
        assert strategy.gathers_single_layers == (strategy.stage == 3)
        assert strategy.on_ranks(1) is strategy


def test_a_copy_of_this_projects_file_gathers_blocks(model, tmp_path):
    file = tmp_path / "copy.json"
    file.write_text((PROJECT / "ds_config_stage3.json").read_text())
    own = parse_arguments(["--ds_config", str(file)]).strategy
    assert marked(own, model) == [*model.model.layers]


def test_one_rank_trains_with_stage_2():
    strategy = parse_arguments(["--strategy", "zero3"]).strategy
    assert strategy.on_ranks(2) is strategy
    alone = strategy.on_ranks(1)
    assert (alone.stage, alone.sharded) == (2, STRATEGIES["zero2"].sharded)
    assert alone.config["zero_optimization"]["stage"] == 2
    assert strategy.config["zero_optimization"]["stage"] == 3  # of the original
    assert STRATEGIES["fsdp"].on_ranks(1) is STRATEGIES["fsdp"]
