"""The loss scale of fp16 under DeepSpeed is that of torch's GradScaler at every step."""

import math
from types import SimpleNamespace

import pytest
import torch

from support.cli.ds_config import ModelSizes, complete_ds_config
from support.cli.parse import parse_arguments
from support.strategies import gradients
from support.tables import GROWTH_INTERVAL


def scales_of_deepspeed(overflows: list[bool], strategy: str, monkeypatch) -> list[float]:
    """The loss scale after each step, of the scaler that the engine makes from our configuration."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.precision_config import get_float16_config

    config = parse_arguments(["--strategy", strategy]).ds_config_dict
    config = complete_ds_config(
        config, "fp16", ModelSizes(256, 10**6, 10**5, tied=True), 2, "folder"
    )
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)  # it wants to know who logs
    settings = get_float16_config(config)
    scaler = CreateLossScaler(
        torch.half, settings.loss_scale, True, settings.dynamic_loss_scale_args()
    )
    scales = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    return scales


def scales_of_torch(overflows: list[bool]) -> list[float]:
    cpu_run = SimpleNamespace(simulated=False, device=torch.device("cpu"))
    scaler = gradients.loss_scaler(cpu_run, enabled=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(weight.detach())  # sets the scale
    scales = []
    for overflow in overflows:
        weight.grad = torch.full((1,), math.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_loss_scale_is_that_of_torch_at_every_step(strategy, monkeypatch):
    """fp16: overflows at the start, in a row and apart, and at the step after the scale has grown."""
    grows, calm = [False] * GROWTH_INTERVAL, [False] * 3
    overflows = [True, True, *calm, True, *grows, True, *grows, *calm]
    scales = scales_of_torch(overflows)
    assert scales[0] == 2.0**15 and scales[-1] == 2.0**14  # 16 - 3 + 1 - 1 + 1
    assert scales_of_deepspeed(overflows, strategy, monkeypatch) == scales
