"""What is inside the wrappers of DDP, FSDP2 and DeepSpeed; plain objects are unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP or DeepSpeed's engine."""
    return getattr(model, "module", model)


def base_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer inside DeepSpeed's."""
    return getattr(optimizer, "optimizer", optimizer)


def is_fsdp_module(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether FSDP2 shards the parameters of a module, without an import of FSDP."""
    return hasattr(module, "set_requires_gradient_sync")
