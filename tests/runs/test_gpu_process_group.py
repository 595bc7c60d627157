"""The process group and the loss scale of ranks on GPUs, shown on a machine without one."""

import json
import math
import sys

import pytest
import torch
from conftest import finish, start

from distributed_training.cli.parse import parse_arguments
from distributed_training.optimizers import GROWTH_INTERVAL
from distributed_training.strategies import gradients
from distributed_training.strategies.deepspeed.options import ModelSizes, complete_ds_config

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("strategy", "ranks", "torch_version", "bound"),
    [
        ("zero2", 2, "2.13.0", True),
        ("infinity", 8, "2.6.0+cu124", True),
        ("zero2", 2, "2.7.0+cu126", False),
        ("zero2", 1, "2.13.0", False),
        ("dp", 2, "2.13.0", False),
    ],
)
def test_group_that_deepspeed_clones_is_bound_to_the_gpu(
    monkeypatch, strategy, ranks, torch_version, bound
):
    monkeypatch.setattr(torch, "__version__", torch_version)
    configured = parse_arguments(["--strategy", strategy]).strategy
    options = configured.group_options("nccl", GPU, ranks)
    assert options == {"backend": "nccl", **({"device_id": GPU} if bound else {})}


def test_gradients_on_the_host_are_unscaled_clipped_and_measured(tmp_path, preloaded):
    """fp16 under FSDP with CPU offload; gloo stands for NCCL."""
    (tmp_path / "fsdp.json").write_text('{"fsdp_offload_params": true}')
    flags = ["--strategy", "fsdp", "--fsdp_config", str(tmp_path / "fsdp.json")]
    strategy = parse_arguments(flags).strategy
    backend = strategy.group_options("nccl", GPU, 2)["backend"]
    backend = {"nccl": "cuda:nccl"}.get(backend, backend)  # gloo alone would take all tensors
    program = [sys.executable, "-m", "tests.helpers.host_gradients"]
    command = [*program, backend.replace("nccl", "gloo"), tmp_path / "store"]
    if preloaded:
        command = preloaded.replace(command)
    ranks = [start(command, env={"RANK": rank}) for rank in (0, 1)]
    for out, err in [finish(rank, 60) for rank in ranks]:
        assert out, err
        # Parts (3, 4) and (0, 12), scaled by 8, on either rank; then an infinite one on rank 1.
        assert json.loads(out) == {"norm": 13.0, "clipped": 1.0, "found_inf": [0.0, 1.0]}


def test_scale_is_where_the_gradients_are():
    """fp16 under FSDP with CPU offload: the loss is on a GPU, for which the meta device stands."""
    scaler = gradients.loss_scaler(torch.device("cpu"), simulated=False, enabled=True)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, scale = torch.optim.SGD([weight], lr=1.0), scaler.get_scale()
    for gradient, expected in ((-2.0 * scale, 2.0), (math.inf, 2.0)):
        scaler.scale(torch.zeros((), device="meta"))
        weight.grad = torch.tensor([gradient])
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert weight.item() == expected
    assert scaler.get_scale() == scale / 2


def scales_of_deepspeed(overflows: list[bool], strategy: str, monkeypatch) -> list[float]:
    """The loss scale after each step, of the scaler that the engine makes from our configuration."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.precision_config import get_float16_config

    settings = parse_arguments(["--strategy", strategy])
    sizes = ModelSizes(256, 10**6, 10**5, tied=True)
    config = complete_ds_config(settings.strategy.config, "fp16", sizes, 2, "folder")
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)  # it wants to know who logs
    settings = get_float16_config(config)
    dynamic = settings.dynamic_loss_scale_args()
    scaler = CreateLossScaler(torch.half, settings.loss_scale, True, dynamic)
    scales = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    return scales


def scales_of_torch(overflows: list[bool]) -> list[float]:
    scaler = gradients.loss_scaler(torch.device("cpu"), simulated=False, enabled=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
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
