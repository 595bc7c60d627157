"""Live tensors of this process: bytes by category, for every strategy.

Tensors that Python can access are counted. Tensors that autograd saves for backward, and tensors
that are freed within a step, are not accessible; see `StepMemory` in measure.py.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from distributed_training.model_parts import local_part
from distributed_training.strategies.live_states import LiveStates


def live_bytes(states: LiveStates, device: torch.device) -> dict:
    """Count live tensors by category.

    Every storage is counted once, in the first category that contains it. "optimizer" includes fp32
    master weights, "buffers" those of communication.

    Args:
        states: those that the strategy finds at the end of backward, before the update.
        device: the training device.
    Returns:
        {"categories": bytes by category, on any device, "on_device": bytes on the training device,
        "moments": bytes of Adam's moments alone (part of "optimizer"),
        "placement": "device", "host" or "nvme" for parameters, gradients and optimizer}.
    """
    seen: set[int] = set()
    counted = {
        "parameters": count(states.parameters, seen),
        "gradients": count(states.gradients, seen),
        "optimizer": count((*states.masters, *states.moments), seen),
        "buffers": count(states.buffers, seen),
        "other": count(all_tensors(), seen),
    }
    placement = states.placement
    if device.type == "cuda":  # FSDP with offload
        on_host = (name for name in placement if counted[name]["cpu"] > counted[name]["cuda"])
        placement |= {name: "host" for name in on_host if placement[name] == "device"}
    on_device = {name: sizes[device.type] for name, sizes in counted.items()}
    # On a CPU the device is the host. The strategy determines what would be on a GPU.
    if device.type == "cpu":
        on_device |= {name: 0 for name, place in placement.items() if place != "device"}
        if placement["parameters"] == "nvme":
            on_device["parameters"] = count(states.resident, set())[device.type]
    unknown = {"activations": None, "logits": None}
    return {
        "categories": {name: sum(sizes.values()) for name, sizes in counted.items()} | unknown,
        "on_device": on_device | unknown,
        "moments": sum(count(states.moments, set()).values()),
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


def pinned_bytes() -> int:
    """Return the bytes of host memory in pinned (page-locked) tensors; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    plain = (t for t in all_tensors() if type(t) in (torch.Tensor, torch.nn.Parameter))
    on_host = (t for t in plain if t.layout == torch.strided and t.device.type == "cpu")
    return sum(count((tensor for tensor in on_host if tensor.is_pinned()), set()).values())
