"""A gradient as a whole, on its way from backward to the update: its norm, and whether the loss it came from was finite."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from support.config import NORM_CHUNK
from support.distributed import Run
from support.errors import TrainingError
from support.sharding import base_optimizer, local_part


def norm(model: nn.Module) -> torch.Tensor:
    """Norm of the whole gradient, a scalar; summed in fp64 as DeepSpeed does.

    In fp32 PyTorch's norm on a CPU is off by 1e-5 for a million elements and 3e-3 for 38 million (GPT-2's embedding), which
    clipping would turn into another step. A part at a time: the fp64 copy of a whole embedding would be memory for nothing.
    """
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    parts = [part for gradient in gradients for part in gradient.flatten().split(NORM_CHUNK)]
    square = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) ** 2 for part in parts]).sum()
    if isinstance(model, FSDPModule):  # each rank has other parts; under HYBRID_SHARD each rank of a node
        mesh = next(model.parameters()).device_mesh
        square = square.to(mesh.device_type)
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
    return square.sqrt()


def hold_back_if_not_finite(optimizer, loss: torch.Tensor, held_back: torch.Tensor, run: Run, scaler=None) -> None:
    """Let the coming update do nothing if the loss is not finite, now or before, without asking the GPU.

    `if not loss.isfinite()` would make the host wait for the GPU at every step. Torch's fused AdamW reads such a flag
    on the device instead (GradScaler's way); the run then ends where the loss is next logged, its weights unharmed.
    """
    if run.simulated:  # what other ranks would have sent is missing in it
        return
    held_back.logical_or_(~torch.isfinite(loss))
    base = base_optimizer(optimizer)
    scaling = scaler is not None and scaler.is_enabled()
    held = next((p for group in base.param_groups for p in group["params"]), held_back)  # DeepSpeed's stage 3 hides its own
    beside_it = held.device == held_back.device
    if isinstance(base, torch.optim.Optimizer) and base.defaults.get("fused") and beside_it and not scaling:
        base.found_inf = held_back.float()
    elif held_back.item():
        # GradScaler and an optimizer on the CPU wait for the GPU at every step anyway, so there is nothing to save.
        raise TrainingError(f"The loss is {loss.item()}: the run stops before that update. Try a lower --lr.")
