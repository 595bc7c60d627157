"""Context managers for a micro-batch: the precision of its forward pass, gradient reduction."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.cluster.context import DistContext
from support.model.weights import DTYPES
from support.unwrap import is_fsdp_module


def autocast(model: nn.Module, ctx: DistContext):
    """Return the autocast context for 16-bit computation with fp32 weights.

    It is disabled where the weights are converted anyway: by DeepSpeed's engine, and by FSDP2's
    mixed-precision policy in bf16.
    """
    by_fsdp = is_fsdp_module(model) and ctx.precision == "bf16"
    converted = by_fsdp or hasattr(model, "set_gradient_accumulation_boundary")
    return torch.autocast(
        ctx.device.type, DTYPES[ctx.precision], enabled=ctx.precision != "fp32" and not converted
    )


@contextlib.contextmanager
def gradient_sync(model: nn.Module, needed: bool):
    """Reduce the gradients over the ranks in this backward pass only if `needed`."""
    if is_fsdp_module(model):
        model.set_requires_gradient_sync(needed)
    skip_ddp_sync = isinstance(model, DistributedDataParallel) and not needed
    with model.no_sync() if skip_ddp_sync else contextlib.nullcontext():
        yield
