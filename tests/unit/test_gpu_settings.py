"""Loss scale, overlap and devices of a run on GPUs, on a machine without one."""

import pytest

from support.cli.ds_config import ModelSizes, complete_ds_config
from support.cli.parse import parse_arguments


def completed(strategy: str, precision: str, world_size: int, **sections) -> dict:
    """The project's DeepSpeed configuration of a strategy, with other values in some sections."""
    config = parse_arguments(["--strategy", strategy]).ds_config_dict
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return complete_ds_config(
        config, precision, ModelSizes(256, 10**6, 10**5, tied=True), world_size, "folder"
    )


def test_loss_scaling_of_a_users_file_is_kept():
    own = {"hysteresis": 4, "loss_scale_window": 100, "initial_scale_power": 8}
    kept = completed("zero2", "fp16", 2, fp16=own)["fp16"]
    assert kept == {"enabled": True, **own}


@pytest.mark.parametrize(
    ("strategy", "ranks", "overlaps"),
    [("zero2", 1, False), ("zero2", 2, True), ("zero3", 1, True), ("offload", 1, True)],
)
def test_reductions_overlap_where_there_is_something_to_overlap(strategy, ranks, overlaps):
    """Stage 3 and offload also overlap copies, on one rank too."""
    assert completed(strategy, "bf16", ranks)["zero_optimization"]["overlap_comm"] is overlaps


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "offload"])
def test_bf16_gradients_are_not_searched_for_infinities(strategy):
    """Stage 3 has no such setting: it searches in fp16 only (stage3.py)."""
    assert completed(strategy, "bf16", 2)["bf16"] == {"enabled": True, "check_grad_overflow": False}
