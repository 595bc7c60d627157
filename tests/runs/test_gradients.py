"""The norm of a gradient, and updates that are left out, without making the host wait for a GPU."""

from types import SimpleNamespace

import pytest
import torch
from operations import Operations
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from support.strategies import gradients

RUN = SimpleNamespace(simulated=False)


def model_with_gradients(device="cpu") -> nn.Module:
    """20 parameters."""
    model = nn.Module()
    for number in range(20):
        parameter = nn.Parameter(torch.empty(64, 64, device=device))
        parameter.grad = torch.empty(64, 64, device=device)
        if device == "cpu":  # the fake tensors of another device have no values
            parameter.grad.copy_(torch.linspace(-number - 1, 1, 64))
        model.register_parameter(str(number), parameter)
    return model


def test_norm_on_a_gpu_copies_no_gradient_to_fp64():
    with FakeTensorMode():
        model = model_with_gradients("cuda")
        with Operations() as operations:
            norm = gradients.norm(model)
    assert (
        norm.device.type == "cuda" and norm.dtype == torch.float32
    )  # the type by which clipping multiplies at once
    assert set(operations.of_type(torch.float64)) == {1}
    assert "aten::_local_scalar_dense" not in operations.names


@pytest.mark.parametrize("on_gpu", [False, True])
def test_norm_is_that_of_all_gradients(monkeypatch, on_gpu):
    """The way of a GPU is taken with tensors of the host: they have the same operations."""
    model = model_with_gradients()
    expected = sum((p.grad.double() ** 2).sum() for p in model.parameters()).sqrt()
    empty = nn.Parameter(torch.zeros(0))  # a rank of FSDP may hold nothing of a parameter
    empty.grad = torch.zeros(0)
    model.register_parameter("empty", empty)
    if on_gpu:
        monkeypatch.setattr(gradients, "is_on_host", lambda gradient: False)
    with Operations() as operations:
        found = gradients.norm(model)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert found.dtype == (torch.float32 if on_gpu else torch.float64)
    if on_gpu:
        assert len(operations.names) < 10, operations.names  # for 20 gradients


def fp16_step(model, optimizer, scaler, held_back, loss_is, gradient_is) -> None:
    """The update of train_epoch_ddp with gradients that are given."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient_is) * scaler.get_scale()
    scaler.scale(torch.zeros(()))  # what creates the scale
    scaler.unscale_(optimizer)
    gradients.hold_back_if_not_finite(optimizer, torch.tensor(loss_is), held_back, RUN, scaler)
    scaler.step(optimizer)
    scaler.update()


def fp16_parts(fused=True):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", 2.0**8)
    scaler.scale(torch.zeros(()))
    return model, optimizer, scaler, torch.zeros((), dtype=torch.bool)


def weights_after(*steps, fused=True) -> list[torch.Tensor]:
    model, optimizer, scaler, held_back = fp16_parts(fused)
    weights = [model.weight.detach().clone()]
    for loss, gradient in steps:
        fp16_step(model, optimizer, scaler, held_back, loss, gradient)
        weights.append(model.weight.detach().clone())
    return weights


def test_fp16_leaves_out_an_update_that_overflowed_and_only_that():
    start, first, overflowed, next_one = weights_after((1.0, 0.5), (1.0, float("inf")), (1.0, 0.5))
    assert not start.equal(first) and first.equal(overflowed) and not overflowed.equal(next_one)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_fp16_updates_nothing_after_a_loss_that_is_not_finite(loss):
    start, first, bad, *later = weights_after((1.0, 0.5), (loss, 0.5), (1.0, 0.5), (1.0, 0.5))
    assert not start.equal(first)
    assert all(first.equal(weights) for weights in (bad, *later))


def test_fp16_asks_the_device_nothing(monkeypatch):
    model, optimizer, scaler, held_back = fp16_parts()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def asked(tensor):
        pytest.fail("the host waits for the device")

    for name in ("item", "__bool__", "__float__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, asked)
    scaler.unscale_(optimizer)
    gradients.hold_back_if_not_finite(optimizer, torch.ones(()), held_back, RUN, scaler)
    scaler.step(optimizer)
    scaler.update()


def test_an_optimizer_that_reads_no_flag_is_asked():
    with pytest.raises(gradients.TrainingError, match="The loss is nan"):
        weights_after((float("nan"), 0.5), fused=False)
