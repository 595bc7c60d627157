"""FSDP: over which ranks it shards, in which precision it computes, and where the shards are."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from support.cli.arguments import Arguments
from support.cluster.context import DistContext


def sharding_options(args: Arguments, ctx: DistContext) -> dict[str, Any]:
    """Return keyword arguments of `fully_shard`: `mesh`, `mp_policy` and `offload_policy`.

    In bf16 the model computes in bf16, but the shards are kept and the gradients are reduced in
    fp32. fp16 is left to autocast (support/strategies/contexts.py).
    """
    dtype = torch.bfloat16 if ctx.precision == "bf16" else None
    on_cpu = CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda")
    return {
        "mesh": ctx.mesh(args.fsdp.hybrid),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": on_cpu if args.fsdp.offload else OffloadPolicy(),
    }
