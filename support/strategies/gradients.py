"""A gradient as a whole, on its way from backward to the update: its norm, and whether the loss it
came from was finite.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from support.cli.flags import GROWTH_INTERVAL, INITIAL_SCALE_POWER, NORM_CHUNK
from support.cluster.context import Run
from support.errors import TrainingError
from support.strategies.optimizer_shards import base_optimizer, local_part


def norm(model: nn.Module) -> torch.Tensor:
    """Norm of the whole gradient: a scalar, in fp64 on a CPU and in fp32 on a GPU.

    In fp32 PyTorch's norm on a CPU is off by 1e-5 for a million elements and 3e-3 for 38 million
    (GPT-2's embedding), which clipping would turn into another step. Its GPU kernels sum blocks in
    a tree, so that fp32 is enough there.
    """
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    on_host = [gradient for gradient in gradients if is_on_host(gradient)]  # FSDP may offload them
    on_gpu = [gradient for gradient in gradients if not is_on_host(gradient) and gradient.numel()]
    square = torch.zeros((), dtype=torch.float64, device=(on_gpu or gradients)[0].device)
    if on_host:
        square += _square_in_fp64(on_host)
    if on_gpu:
        # A few launches for all gradients; fp64 takes three for each of them, and a copy.
        square += nn.utils.get_total_norm(on_gpu).double() ** 2
    if isinstance(
        model, FSDPModule
    ):  # each rank has other parts; under HYBRID_SHARD each rank of a node
        mesh = next(model.parameters()).device_mesh
        square = square.to(mesh.device_type)
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
    # Clipping multiplies all gradients in one launch only by a scalar of their own type.
    return square.sqrt() if on_host else square.sqrt().float()


def is_on_host(gradient: torch.Tensor) -> bool:
    """Whether it is summed on the CPU."""
    return gradient.device.type == "cpu"


def _square_in_fp64(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares of tensors on the host.

    A part at a time: the fp64 copy of a whole embedding would be memory for nothing.
    """
    parts = [part for gradient in gradients for part in gradient.flatten().split(NORM_CHUNK)]
    norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
    return (norms**2).sum()


def hold_back_if_not_finite(
    optimizer,
    loss: torch.Tensor,
    held_back: torch.Tensor,
    run: Run,
    scaler=None,
    grad_norm: torch.Tensor | None = None,
) -> None:
    """Let the coming update do nothing if loss or gradients are not finite, now or before, without
    asking the GPU.

    `if not loss.isfinite()` would make the host wait for the GPU at every step. Torch's fused AdamW
    reads such a flag on the device instead (GradScaler's way); the run then ends where the loss is
    next logged, its weights unharmed.

    Args:
        optimizer: torch's, or DeepSpeed's wrapper around one.
        loss: of this step; the same on all ranks.
        held_back: a bool on the device that stays true after the first loss that was not finite.
        scaler: GradScaler of fp16, after `unscale_`. Where the loss is finite its own flag stays as
            it is: gradients that overflow are normal there, and only this one update is left out.
        grad_norm: of all gradients, where it is known before the update.
    Raises:
        TrainingError: one of them is not finite, and the optimizer cannot read the flag.
    """
    if run.simulated:  # what other ranks would have sent is missing in it
        return
    scaling = scaler is not None and scaler.is_enabled()
    held_back.logical_or_(~torch.isfinite(loss))
    if grad_norm is not None and not scaling:
        held_back.logical_or_(~torch.isfinite(grad_norm).to(held_back.device))
    base = base_optimizer(optimizer)
    held = next(
        (p for group in base.param_groups for p in group["params"]), held_back
    )  # DeepSpeed's stage 3 hides its own
    beside_it = held.device == held_back.device
    if not (isinstance(base, torch.optim.Optimizer) and base.defaults.get("fused") and beside_it):
        if held_back.item():  # an optimizer on the CPU waits for the GPU at every step anyway
            raise not_finite(loss.item())
    elif scaling:
        for found_inf in scaler._found_inf_per_device(
            base
        ).values():  # the optimizer gets their sum
            found_inf += held_back
    else:
        base.found_inf = held_back.float()


def not_finite(loss: float, step: int | None = None) -> TrainingError:
    """The error that ends a run whose loss, or else whose gradient, is not finite."""
    found = (
        f"The gradient of a loss of {loss:.4f} is not finite"
        if math.isfinite(loss)
        else f"The loss is {loss}"
    )
    where = "" if step is None else f" at step {step}"
    return TrainingError(
        f"{found}{where}: the run stops before that update. Try a lower --lr, --warmup_steps, or --precision "
        "fp32, and look at the data of that step."
    )


def loss_scaler(run: Run, enabled: bool) -> torch.amp.GradScaler:
    """The loss scaling of dp and fsdp, with the settings that DeepSpeed gets; does nothing unless
    `enabled`.
    """
    # Gradients of a simulation would overflow, and their updates be skipped.
    scale = 1.0 if run.simulated else 2.0**INITIAL_SCALE_POWER
    return torch.amp.GradScaler(
        run.device.type, scale, growth_interval=GROWTH_INTERVAL, enabled=enabled
    )
