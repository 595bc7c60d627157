"""Precision of the forward pass, reduction of gradients, and how FSDP shards."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.cli.arguments import Arguments
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


def sharding_options(args: Arguments, ctx: DistContext) -> dict[str, Any]:
    """Return keyword arguments of `fully_shard`: over which ranks, in which precision, and where.

    In bf16 the model computes in bf16, but the shards are kept and the gradients are reduced in
    fp32. fp16 is left to autocast.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    dtype = torch.bfloat16 if ctx.precision == "bf16" else None
    on_cpu = CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda")
    return {
        "mesh": ctx.mesh(args.fsdp.hybrid),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": on_cpu if args.fsdp.offload else OffloadPolicy(),
    }
