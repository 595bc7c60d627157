"""The norm of a gradient, without making the host wait for a GPU."""

import torch
from operations import Operations
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from support.strategies import gradients


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
            norm = gradients.gradient_norm(model)
    assert norm.device.type == "cuda"
    assert norm.dtype == torch.float32  # the type by which clipping multiplies at once
    assert set(operations.of_type(torch.float64)) == {1}
    assert "aten::_local_scalar_dense" not in operations.names


def test_norm_is_that_of_all_gradients():
    model = model_with_gradients()
    expected = sum((p.grad.double() ** 2).sum() for p in model.parameters()).sqrt()
    empty = nn.Parameter(torch.zeros(0))  # a rank of FSDP may hold nothing of a parameter
    empty.grad = torch.zeros(0)
    model.register_parameter("empty", empty)
    found = gradients.gradient_norm(model)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
