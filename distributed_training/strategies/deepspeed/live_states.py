"""The tensors of the model states that are in memory on this rank under DeepSpeed.

DeepSpeed has no public names for its buffers and gradients; these are of 0.17 to 0.19.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distributed_training.strategies.live_states import LiveStates, plain_states


def zero_states(model: nn.Module, optimizer: Any) -> LiveStates:
    """Return the states under any stage; call it at the end of backward, before the update."""
    plain = plain_states(model, optimizer)
    # The masters of stage 3 are in the optimizer's groups during the update only.
    masters = list(getattr(optimizer, "fp32_partitioned_groups_flat", ()))
    # The lists of gradients, of stages 1 and 2 and of stage 3; the bucket of stage 3.
    gradients = [master.grad for master in masters]
    for tensors in (getattr(optimizer, "averaged_gradients", None) or {}).values():
        gradients += tensors or ()
    gradients.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
    buffers: list[torch.Tensor | None] = []
    for bucket in (getattr(optimizer, "ipg_buckets", None) or {}).values():
        buffers += bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
    placement = _placement(optimizer)
    on_nvme = placement["parameters"] == "nvme"
    small = [p for p in model.parameters() if p.ds_persist] if on_nvme else []
    # ZeRO-3 replaces the data by an empty placeholder and keeps this rank's shard in ds_tensor.
    shards = [getattr(p, "ds_tensor", None) for p in model.parameters()]
    return LiveStates(
        parameters=[*plain.parameters, *shards],
        gradients=[*plain.gradients, *gradients],
        masters=[*plain.masters, *masters],
        moments=plain.moments,
        buffers=[*plain.buffers, *buffers],
        placement=placement,
        resident=[tensor for p in small for tensor in (p.ds_tensor, p.data)],
    )


def _placement(optimizer: Any) -> dict[str, str]:
    swaps = getattr(optimizer, "swap_optimizer", False)
    on_host = any(getattr(optimizer, name, False) for name in ("cpu_offload", "offload_optimizer"))
    return {
        # Shards that are too small for a separate file stay in host memory.
        "parameters": "nvme" if getattr(optimizer, "params_in_nvme_and_cpu", False) else "device",
        # Gradients are reduced to the device that computes the update.
        "gradients": "host" if on_host or swaps else "device",
        "optimizer": "nvme" if swaps else "host" if on_host else "device",
    }


def gathered_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that stage 3 has gathered, or is gathering, on this rank."""
    of_zero3 = [p for p in model.parameters() if hasattr(p, "ds_tensor") and not p.ds_persist]
    gathered = [p for p in of_zero3 if p.ds_status.name != "NOT_AVAILABLE"]
    # On a single rank a parameter's data is its shard.
    whole = [p for p in gathered if not p.numel() or p.data_ptr() != p.ds_tensor.data_ptr()]
    return sum(p.ds_numel * p.element_size() for p in whole)
