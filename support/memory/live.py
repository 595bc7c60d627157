"""Live tensors of this process: bytes by category, for every strategy.

Tensors that Python can access are counted. Tensors that autograd saves for backward, and tensors
that are freed within a step, are not accessible; see `StepMemory` in measure.py.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from support.train_state import base_optimizer, is_dtensor, is_fsdp_module, local_part


def gathered_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of parameters that are gathered at present, or being gathered, on this rank.

    0 under strategies that do not shard parameters.
    """
    if any(is_fsdp_module(module) for module in model.modules()):
        return sum(p.nbytes for p in model.parameters() if not is_dtensor(p))
    of_zero3 = [p for p in model.parameters() if hasattr(p, "ds_tensor") and not p.ds_persist]
    gathered = [p for p in of_zero3 if p.ds_status.name != "NOT_AVAILABLE"]
    # On a single rank a parameter's data is its shard.
    whole = [p for p in gathered if not p.numel() or p.data_ptr() != p.ds_tensor.data_ptr()]
    return sum(p.ds_numel * p.element_size() for p in whole)


def live_bytes(model: torch.nn.Module, optimizer, device: torch.device) -> dict:
    """Count live tensors by category. Call it at the end of backward, before the update.

    Every storage is counted once, in the first category that contains it. "optimizer" includes fp32
    master weights, "buffers" those of communication.

    Returns:
        {"categories": bytes by category, on any device, "on_device": bytes on the training device,
        "moments": bytes of Adam's moments alone (part of "optimizer"),
        "placement": "device", "host" or "nvme" for parameters, gradients and optimizer}.
    """
    base = base_optimizer(optimizer)
    updated = [parameter for group in base.param_groups for parameter in group["params"]]
    masters = list(getattr(optimizer, "fp32_partitioned_groups_flat", ()))  # of ZeRO 3
    states = [value for state in base.state.values() for value in state.values()]
    moments = [state for state in states if isinstance(state, torch.Tensor)]
    gradients = [p.grad for p in (*model.parameters(), *updated, *masters)]
    # DeepSpeed's lists of gradients, of stages 1 and 2 and of stage 3; the bucket of stage 3.
    for tensors in (getattr(optimizer, "averaged_gradients", None) or {}).values():
        gradients += tensors or ()
    gradients.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
    buffers = [*model.buffers()]
    for bucket in (getattr(optimizer, "ipg_buckets", None) or {}).values():
        buffers += bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
    seen: set[int] = set()
    counted = {
        "parameters": count(_parameters(model), seen),
        "gradients": count(gradients, seen),
        "optimizer": count((*updated, *masters, *moments), seen),
        "buffers": count(buffers, seen),
        "other": count(all_tensors(), seen),
    }
    placement = _placement(optimizer)
    if device.type == "cuda":  # FSDP with offload
        on_host = (name for name in placement if counted[name]["cpu"] > counted[name]["cuda"])
        placement |= {name: "host" for name in on_host if placement[name] == "device"}
    on_device = {name: sizes[device.type] for name, sizes in counted.items()}
    # On a CPU the device is the host. The strategy determines what would be on a GPU.
    if device.type == "cpu":
        on_device |= {name: 0 for name, place in placement.items() if place != "device"}
        if placement["parameters"] == "nvme":  # only the small ones stay
            small = [p for p in model.parameters() if p.ds_persist]
            tensors = (tensor for p in small for tensor in (p.ds_tensor, p.data))
            on_device["parameters"] = count(tensors, set())[device.type]
    unknown = {"activations": None, "logits": None}
    return {
        "categories": {name: sum(sizes.values()) for name, sizes in counted.items()} | unknown,
        "on_device": on_device | unknown,
        "moments": sum(count(moments, set()).values()),
        "placement": placement,
    }


def all_tensors() -> Iterator[torch.Tensor]:
    """Yield all tensors that Python's garbage collector knows."""
    return (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def count(tensors: Iterable[torch.Tensor | None], seen: set[int]) -> Counter[str]:
    """Return the bytes of the tensors' storages by type of device, without those in `seen`.

    Args:
        tensors: tensors to count; None is skipped.
        seen: addresses of storages counted so far; the new ones are added.
    """
    total: Counter[str] = Counter()
    for tensor in tensors:
        try:
            if tensor is None or tensor.device.type == "meta":
                continue
            storage = local_part(tensor).untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            # Sparse tensors and the compiler's fake tensors have no storage, and a tensor that
            # another thread is creating has not even a device.
            continue
        if size and address not in seen:
            seen.add(address)
            total[storage.device.type] += size
    return total


def _parameters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        # ZeRO-3 replaces the data by an empty placeholder and keeps this rank's shard in ds_tensor.
        yield getattr(parameter, "ds_tensor", None)
        yield parameter.data
        # bitsandbytes' scales and tables of a parameter in 4 bits; the scales are quantized too.
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
            state = state.state2


def _placement(optimizer) -> dict[str, str]:
    """Return where DeepSpeed stores model states between steps; "device" without it."""
    swaps = getattr(optimizer, "swap_optimizer", False)
    on_host = any(getattr(optimizer, name, False) for name in ("cpu_offload", "offload_optimizer"))
    return {
        # Shards that are too small for a separate file stay in host memory.
        "parameters": "nvme" if getattr(optimizer, "params_in_nvme_and_cpu", False) else "device",
        # Gradients are reduced to the device that computes the update.
        "gradients": "host" if on_host or swaps else "device",
        "optimizer": "nvme" if swaps else "host" if on_host else "device",
    }


def pinned_bytes() -> int:
    """Return the bytes of host memory in pinned (page-locked) tensors; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    plain = (t for t in all_tensors() if type(t) in (torch.Tensor, torch.nn.Parameter))
    on_host = (t for t in plain if t.layout == torch.strided and t.device.type == "cpu")
    return sum(count((tensor for tensor in on_host if tensor.is_pinned()), set()).values())
