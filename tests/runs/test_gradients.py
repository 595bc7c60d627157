"""The norm of a gradient, and updates that are left out, without making the host wait for a GPU."""

import pytest
import torch
from torch import nn

from distributed_training.errors import NotFinite
from distributed_training.strategies import gradients
from distributed_training.strategies.objects import TrainingObjects
from distributed_training.strategies.table import STRATEGIES


def weights_after(*steps, fused=True) -> list[torch.Tensor]:
    """The weights before and after updates of train_epoch_ddp, each with a loss and a gradient."""
    model, found_inf = nn.Linear(4, 4), torch.zeros((), dtype=torch.bool)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", 2.0**8)
    scaler.scale(torch.zeros(()))  # what creates the scale
    objects = TrainingObjects(STRATEGIES["dp"], model, optimizer, scaler, found_inf)
    weights = [model.weight.detach().clone()]
    for loss, gradient in steps:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient) * scaler.get_scale()
        scaler.unscale_(optimizer)
        gradients.block_update_if_not_finite(objects, torch.tensor(loss), None, simulated=False)
        scaler.step(optimizer)
        scaler.update()
        weights.append(model.weight.detach().clone())
    return weights


def test_fp16_leaves_out_an_update_that_overflowed_and_only_that():
    start, first, overflowed, next_one = weights_after((1.0, 0.5), (1.0, float("inf")), (1.0, 0.5))
    assert not start.equal(first) and first.equal(overflowed) and not overflowed.equal(next_one)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_fp16_updates_nothing_after_a_loss_that_is_not_finite(loss):
    start, first, *later = weights_after((1.0, 0.5), (loss, 0.5), (1.0, 0.5), (1.0, 0.5))
    assert not start.equal(first) and all(first.equal(weights) for weights in later)


def test_the_flag_is_not_read_where_the_host_would_wait_for_it():
    """Reading a tensor of the meta device fails, as reading one of a GPU would wait."""
    model = nn.Linear(4, 4, device="meta")
    optimizer = torch.optim.SGD(model.parameters())  # not fused, as under FSDP
    objects = TrainingObjects(STRATEGIES["dp"], model, optimizer)
    loss = torch.zeros((), device="meta")
    gradients.block_update_if_not_finite(objects, loss, loss, simulated=False)
    on_host = torch.optim.SGD(nn.Linear(4, 4).parameters())  # FSDP offloads
    objects = TrainingObjects(STRATEGIES["dp"], model, on_host)
    with pytest.raises(RuntimeError, match="meta"):
        gradients.block_update_if_not_finite(objects, loss, loss, simulated=False)


def test_a_non_finite_loss_is_an_error_if_the_optimizer_cannot_skip_updates():
    with pytest.raises(NotFinite, match="The loss is nan"):
        weights_after((float("nan"), 0.5), fused=False)
