"""What a run really holds: bytes on the device, in host memory and on NVMe, and which kind of state they are."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import torch

from support.sharding import base_optimizer, local_part


def host_bytes() -> tuple[int, int]:
    """Resident memory of this process now and at its peak, in bytes."""
    now = psutil.Process().memory_info().rss
    try:  # VmHWM belongs to this program; ru_maxrss can be inherited from the process that started it
        status = Path("/proc/self/status").read_text()
        peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return now, peak


def device_bytes(device: torch.device) -> dict[str, int | None]:
    """Memory of the training device in bytes: {allocated, reserved, peak}.

    On a GPU these are PyTorch's allocator's; on a CPU the process is all there is: its resident memory and its peak,
    and nothing is reserved.
    """
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
        }
    now, peak = host_bytes()
    return {"allocated": now, "reserved": None, "peak": peak}


class Phases:
    """Memory of this process after each phase of a run, in bytes."""

    def __init__(self, device: torch.device):
        self.device = device
        self.noted: dict[str, dict[str, int]] = {}
        self.note("libraries_imported")

    def note(self, phase: str) -> None:
        """Record device memory allocated, and host memory now and at its peak so far."""
        now, peak = host_bytes()
        allocated = device_bytes(self.device)["allocated"]
        self.noted[phase] = {"device_allocated": allocated, "host_resident": now, "host_peak": peak}


def folder_bytes(folder: str | None) -> int:
    """Bytes of all files below a folder; 0 for None."""
    if folder is None:
        return 0
    return sum(os.path.getsize(os.path.join(top, name)) for top, _, names in os.walk(folder) for name in names)


def live_bytes(model: torch.nn.Module, optimizer, device: torch.device) -> dict:
    """Count live tensors by what they are for. Call it at the end of backward, before the update.

    Every storage is counted once, in the first category that holds it. Works for plain, FSDP2 (DTensor) and
    DeepSpeed-partitioned models; "optimizer" is the fp32 master weights, where there are any, and Adam's moments.

    Args:
        model: the unwrapped module.
        optimizer: torch's optimizer, or DeepSpeed's wrapper around one.
        device: the training device.
    Returns:
        {"categories": bytes by category, wherever they lie, "on_device": those on the device,
        "moments": bytes of Adam's moments alone (part of "optimizer"),
        "placement": "device", "host" or "nvme" for parameters, gradients and optimizer}.
    """
    base = base_optimizer(optimizer)
    seen: set[int] = set()
    moments = _count(_optimizer_moments(base), set())
    counted = {
        "parameters": _count(_parameters(model), seen),
        "gradients": _count(_gradients(model, optimizer, base), seen),
        "optimizer": _count(_optimizer_states(optimizer, base), seen),
        "buffers": _count(model.buffers(), seen),
        "other": _count((t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)), seen),
    }
    placement = _placement(model, optimizer)
    on_device = {name: found[device.type] for name, found in counted.items()}
    if device.type == "cpu":  # the host is the device, and only the strategy tells what would lie on a GPU
        on_device.update({name: 0 for name in ("gradients", "optimizer") if placement[name] != "device"})
    return {
        "categories": {**{name: sum(found.values()) for name, found in counted.items()}, "activations": None},
        "on_device": {**on_device, "activations": None},
        "moments": sum(moments.values()),
        "placement": placement,
    }


def _count(tensors: Iterable[torch.Tensor | None], seen: set[int]) -> Counter[str]:
    """Bytes of the storages not seen before, by type of device."""
    total: Counter[str] = Counter()
    for tensor in tensors:
        if tensor is None or tensor.device.type == "meta":
            continue
        try:
            storage = local_part(tensor).untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse tensors and the compiler's fake ones have no storage
            continue
        if size and address not in seen:
            seen.add(address)
            total[storage.device.type] += size
    return total


def _parameters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        # ZeRO-3 leaves an empty placeholder and keeps this rank's shard beside it.
        yield getattr(parameter, "ds_tensor", None)
        yield parameter.data


def _gradients(model: torch.nn.Module, optimizer, base) -> Iterator[torch.Tensor | None]:
    yield from (parameter.grad for parameter in model.parameters())
    yield from (parameter.grad for group in base.param_groups for parameter in group["params"])
    # DeepSpeed's own lists: stages 1 and 2, stage 3, and the fp32 gradients of an offloaded optimizer.
    for tensors in (getattr(optimizer, "averaged_gradients", None) or {}).values():
        yield from tensors or ()
    yield getattr(optimizer, "grad_partitions_flat_buffer", None)
    yield from (master.grad for master in getattr(optimizer, "fp32_partitioned_groups_flat", ()))


def _optimizer_states(optimizer, base) -> Iterator[torch.Tensor]:
    yield from (parameter for group in base.param_groups for parameter in group["params"])
    yield from getattr(optimizer, "fp32_partitioned_groups_flat", ())
    yield from _optimizer_moments(base)


def _optimizer_moments(base) -> Iterator[torch.Tensor]:
    for state in base.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _placement(model: torch.nn.Module, optimizer) -> dict[str, str]:
    """Where parameters and optimizer states live between steps, as DeepSpeed's optimizer reports it."""
    swaps = getattr(optimizer, "swap_optimizer", False)
    on_host = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    shards = [getattr(parameter, "ds_tensor", None) for parameter in model.parameters()]
    nvme = any(getattr(getattr(shard, "final_location", None), "name", "") == "nvme" for shard in shards if shard is not None)
    return {
        "parameters": "nvme" if nvme else "device",
        "gradients": "host" if on_host or swaps else "device",  # they are reduced to where the update happens
        "optimizer": "nvme" if swaps else "host" if on_host else "device",
    }
