"""Communication hooks: what DDP does with a full bucket of gradients instead of an all-reduce."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)


def reduce_in_bf16(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Call PyTorch's hook: DDP accepts it by its own name with NCCL only, and gloo reduces bf16."""
    return bf16_compress_hook(group, bucket)


# A hook converts the bucket to 16 bits, averages this copy over the ranks, and converts the result
# back to fp32.
COMPRESSION = {"bf16": reduce_in_bf16, "fp16": fp16_compress_hook}


def communication_hook(reduce_dtype: str | None, simulated: bool) -> Callable[..., Any] | None:
    """Return the hook for --reduce_dtype; None for fp32, in which DDP reduces by itself.

    Args:
        simulated: with --simulate_gpus, where nothing is reduced: DDP's reducer fails on the result
            of the fake backend.
    """
    return noop_hook if simulated else COMPRESSION.get(reduce_dtype or "fp32")
