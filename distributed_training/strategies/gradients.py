"""Gradients between backward and the update: norm, check for non-finite values, loss scaling."""

import math

import torch
import torch.distributed as dist
from torch import nn

from distributed_training.errors import NotFinite
from distributed_training.model_parts import local_part
from distributed_training.optimizers import GROWTH_INTERVAL, INITIAL_SCALE_POWER
from distributed_training.strategies.objects import TrainingObjects
from distributed_training.strategies.wrapped import base_optimizer, is_fsdp_module

NORM_CHUNK = 2**16  # elements of a gradient whose squares are summed in fp32 for the norm


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Return the norm of the whole gradient, a scalar: in fp64 if one is in host memory, else fp32.

    On a CPU, PyTorch's norm in fp32 has a relative error of 3e-3 for 38 million elements (GPT-2's
    embedding). PyTorch's GPU kernels sum in a tree, for which fp32 is sufficient.
    """
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    on_host = gradients[0].device.type == "cpu"  # FSDP may offload them
    if on_host:
        # PyTorch's norm with dtype=float64 converts each element in scalar code, which takes ten
        # times as long. Only the sums of NORM_CHUNK squares are in fp32.
        parts = [part.float() for g in gradients for part in g.flatten().split(NORM_CHUNK)]
        square = torch.stack([torch.dot(part, part) for part in parts]).sum(dtype=torch.float64)
    else:
        # A few kernel launches for all; in fp64 each gradient would need a copy and three.
        square = nn.utils.get_total_norm([g for g in gradients if g.numel()]).double() ** 2
    # Each rank has different shards; under HYBRID_SHARD each rank of a node.
    if is_fsdp_module(model):
        mesh = next(model.parameters()).device_mesh
        square = square.to(mesh.device_type)
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
    # Clipping uses one kernel for all gradients only if the scalar has their dtype.
    return square.sqrt() if on_host else square.sqrt().float()


def block_update_if_not_finite(
    objects: TrainingObjects, loss: torch.Tensor, grad_norm: torch.Tensor | None, simulated: bool
) -> None:
    """Skip the update, on the device, from the first non-finite loss or gradient norm on.

    `if not loss.isfinite()` would make the host wait for the GPU at every step. PyTorch's fused
    AdamW reads a flag on the device instead. The run then stops when the loss is next logged, which
    comes before each save. Optimizers without fused kernels update the weights on a GPU until
    then. DeepSpeed computes the norm inside its update, so with a finite loss a non-finite gradient
    reaches the weights of stages 1 and 2 in bf16. No checkpoint contains such updates.

    Args:
        objects: the optimizer, its flag, and the GradScaler after `unscale_`. In fp16
            gradients may overflow, and the scaler skips that update; only the loss is checked.
        loss: of this step; the same on all ranks.
        grad_norm: of all gradients; None for DeepSpeed.
        simulated: with --simulate_gpus nothing is checked.
    Raises:
        NotFinite: one of them is not finite, the optimizer cannot read the flag, and the host does
            not wait for a GPU because of it: on a CPU, and where the update waits anyway.
    """
    if simulated:  # the loss lacks the contributions of the other ranks
        return
    scaler, found_inf = objects.scaler, objects.not_finite_flag(loss.device)
    scaling = scaler.is_enabled()
    found_inf.logical_or_(~torch.isfinite(loss))
    if grad_norm is not None and not scaling:
        found_inf.logical_or_(~torch.isfinite(grad_norm).to(found_inf.device))
    base = base_optimizer(objects.optimizer)
    # DeepSpeed's stage 3 has no parameters in its groups at this point.
    first = next((p for group in base.param_groups for p in group["params"]), found_inf)
    same_device = first.device == found_inf.device
    if not (isinstance(base, torch.optim.Optimizer) and base.defaults.get("fused") and same_device):
        # GradScaler reads its own flags, and an update in host memory follows copies to the host.
        waits_anyway = scaling or not same_device or first.device.type == "cpu"
        if waits_anyway and found_inf.item():
            raise not_finite(loss.item())
    elif scaling:
        # The optimizer gets the sum of these flags.
        for overflow in scaler._found_inf_per_device(base).values():
            overflow += found_inf
    else:
        base.found_inf = found_inf.float()


def not_finite(loss: float, step: int | None = None) -> NotFinite:
    """Return the error for a loss, or for the gradient of a finite loss, that is not finite."""
    message = f"The loss is {loss}"
    if math.isfinite(loss):
        message = f"The gradient of a loss of {loss:.4f} is not finite"
    location = "" if step is None else f" at step {step}"
    return NotFinite(
        f"{message}{location}: the run stops, and no checkpoint contains that update. "
        "Try a lower --lr, --warmup_steps, or --precision fp32. --replay shows that step's data."
    )


def loss_scaler(device: torch.device, simulated: bool, enabled: bool) -> torch.amp.GradScaler:
    """Return the GradScaler of dp and fsdp, with the same settings as DeepSpeed's loss scaling.

    Args:
        device: of the gradients; FSDP may offload them to host memory.
        simulated: with --simulate_gpus, where scaled gradients would overflow.
        enabled: False: the scaler does nothing.
    """
    scale = 1.0 if simulated else 2.0**INITIAL_SCALE_POWER
    scaler = torch.amp.GradScaler(
        device.type, scale, growth_interval=GROWTH_INTERVAL, enabled=enabled
    )
    # Creates the scale where the gradients are. By default it is created with the loss. If that is
    # on a GPU and the gradients are in host memory, torch 2.13 copies the scale and the flag of an
    # overflow to them with non_blocking=True, and the CPU reads them before they have arrived.
    scaler.scale(torch.zeros((), device=device))
    return scaler


# Attributes of DeepSpeed's dynamic loss scaler that are saved.
DEEPSPEED_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scaler_state(scaler: torch.amp.GradScaler, optimizer) -> dict:
    """Return the state of PyTorch's or DeepSpeed's loss scaler; {} for all but fp16."""
    if scaler.is_enabled():
        return scaler.state_dict()
    ds_scaler = _deepspeed_scaler(optimizer)
    return {name: getattr(ds_scaler, name) for name in DEEPSPEED_SCALER_STATE if ds_scaler}


def load_scaler_state(saved: dict, scaler: torch.amp.GradScaler, optimizer) -> None:
    """Restore what `scaler_state` returned; of the other library's scaler only the scale."""
    scale = saved.get("scale", saved.get("cur_scale"))
    if scale is None:
        return
    ds_scaler = _deepspeed_scaler(optimizer)
    if scaler.is_enabled():
        state = saved if "scale" in saved else {"scale": scale}
        scaler.load_state_dict({**scaler.state_dict(), **state})
    elif ds_scaler:
        for name in DEEPSPEED_SCALER_STATE if "cur_scale" in saved else ():
            setattr(ds_scaler, name, saved.get(name, getattr(ds_scaler, name)))
        ds_scaler.cur_scale = scale


def _deepspeed_scaler(optimizer):
    """Return DeepSpeed's dynamic loss scaler, or None."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler if hasattr(scaler, "last_overflow_iter") else None
