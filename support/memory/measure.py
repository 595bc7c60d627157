"""Measured memory of a run: bytes on the device, in host memory and on NVMe, by phase and category.

Tensors that Python can access are counted directly. Tensors that autograd saves for backward, and
tensors that are freed within a step, are not accessible. They are derived from the allocator's
statistics; see `StepMemory`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import torch
from torch.distributed.fsdp import FSDPModule

from support.units import GB
from support.unwrap import base_optimizer, is_dtensor, local_part


def host_bytes() -> tuple[int, int]:
    """Return (current, peak) resident memory of this process in bytes."""
    now = psutil.Process().memory_info().rss
    # VmHWM starts with this program; ru_maxrss can be inherited from the parent process.
    try:
        status = Path("/proc/self/status").read_text()
        peak = (
            int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
            * 1024
        )
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    return now, peak


def memory_limit(device: torch.device) -> int:
    """Return the bytes that this process may use of its device.

    On a GPU this is the size of its memory. On a CPU it is the smallest of host memory, the limits
    of control groups (cgroups) and RLIMIT_AS (ulimit -v).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [psutil.virtual_memory().total]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:  # it limits virtual memory, most of which is not resident
        usage = psutil.Process().memory_info()
        limits.append(soft - (usage.vms - usage.rss))
    return min(*limits, *control_group_limits())


def control_group_limits() -> list[int]:
    """Return the memory limits in bytes of this process's control groups (cgroup v2 or v1).

    A scheduler or a container sets them.
    """
    limits = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, name = Path("/sys/fs/cgroup"), "memory.max"
            if "memory" in controllers.split(","):
                root, name = root / "memory", "memory.limit_in_bytes"
            elif controllers:
                continue
            folder = root / path.lstrip("/")
            for group in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                    limits.append(int((group / name).read_text()))
    return limits


class DevicePeak:
    """Peak memory of PyTorch's allocator on a GPU; 0 on a CPU.

    Attributes:
        last: peak in bytes between the last two calls of `mark`.
        highest: peak in bytes over all calls.
    """

    def __init__(self, device: torch.device):
        self.device, self.highest, self.last = device, 0, 0

    def mark(self) -> None:
        """Set `last` to the peak since the previous call, and update `highest`."""
        if self.device.type == "cuda":
            self.last = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.highest = max(self.highest, self.last)


# What a run does after each recorded phase. After backward comes the next micro-batch, or
# `Meter.after_backward`.
AFTER = {
    "libraries_imported": "loading model and data",
    "model_loaded": "handing the model to the strategy",
    "wrapped": "preparing the first step",
    "data": "forward",
    "forward": "backward",
    "backward": "forward",
    "optimizer_step": "between two steps",
    "trained": "the end of the run",
}


class MemoryByPhase:
    """Memory of this process after each phase of a run, in bytes.

    Attributes:
        noted: memory by phase.
        doing: what the run does at present, for messages.
    """

    def __init__(self, device: torch.device):
        self.device, self.peak = device, DevicePeak(device)
        self.noted: dict[str, dict[str, int | None]] = {}
        self.doing = ""
        self.note("libraries_imported")

    def note(self, phase: str, mark: bool = True) -> None:
        """Record device memory, its peak since the last phase, and current and peak host memory.

        Args:
            phase: name of the phase that has ended.
            mark: mark the device's peak; False if the caller has just done so.
        """
        self.doing = AFTER.get(phase, self.doing)
        if mark:
            self.peak.mark()
        now, peak = host_bytes()
        on_gpu = self.device.type == "cuda"
        self.noted[phase] = {
            "device_allocated": torch.cuda.memory_allocated(self.device) if on_gpu else now,
            "device_reserved": torch.cuda.memory_reserved(self.device) if on_gpu else None,
            "device_peak": self.peak.last if on_gpu else None,
            "host_resident": now,
            "host_peak": peak,
        }

    def describe(self) -> list[str]:
        """Return lines on the memory in use, for a run that ran out of memory."""
        used = (
            torch.cuda.memory_allocated(self.device)
            if self.device.type == "cuda"
            else host_bytes()[0]
        )
        limit = memory_limit(self.device)
        return [
            f"It happened in: {self.doing}. "
            f"This process held {used / GB:.2f} of {limit / GB:.1f} GB."
        ]

    def device_bytes(self) -> dict[str, int | None]:
        """Return memory of the training device in bytes: {allocated, reserved, peak}.

        On a GPU these are the numbers of PyTorch's allocator. On a CPU they are current and peak
        resident memory of the process, and `reserved` is None.
        """
        if self.device.type == "cuda":
            self.peak.mark()
            allocated, reserved = (
                torch.cuda.memory_allocated(self.device),
                torch.cuda.memory_reserved(self.device),
            )
            return {"allocated": allocated, "reserved": reserved, "peak": self.peak.highest}
        now, peak = host_bytes()
        return {"allocated": now, "reserved": None, "peak": peak}


def unseen_bytes(device: torch.device) -> dict[str, int] | None:
    """Return the memory in use according to the device, as nvidia-smi reports it; None on a CPU.

    Returns:
        {"used": bytes in use on the GPU by all processes, "total": its size, "unseen": bytes in use
        outside of PyTorch's allocator (the CUDA context, workspaces of libraries, NCCL's buffers,
        other processes)}.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return {
        "used": total - free,
        "total": total,
        "unseen": total - free - torch.cuda.memory_reserved(device),
    }


def pinned_bytes() -> int:
    """Return the bytes of host memory in pinned (page-locked) tensors; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    return sum(_count(filter(_is_pinned, _all_tensors()), set()).values())


def _is_pinned(tensor: torch.Tensor) -> bool:
    try:
        return tensor.device.type == "cpu" and tensor.is_pinned()
    except (RuntimeError, NotImplementedError):  # some tensor types do not support it
        return False


def written_bytes() -> int:
    """Return the bytes that this process has written to disks so far.

    0 on systems that do not count them.
    """
    try:
        return psutil.Process().io_counters().write_bytes
    except (AttributeError, psutil.Error):
        return 0


def folder_bytes(folder: str | None) -> int:
    """Return the bytes of all files in a folder and its subfolders; 0 for None."""
    if folder is None:
        return 0
    return sum(
        os.path.getsize(os.path.join(top, name))
        for top, _, names in os.walk(folder)
        for name in names
    )


class StepMemory:
    """Memory during one optimizer step: live bytes at the end of each phase, and its peak.

    On a GPU PyTorch's allocator provides these numbers. On a CPU PyTorch's profiler records each
    allocation. That slows down the step, so it is done only if `detailed`.

    Args:
        model: the unwrapped module.
        optimizer: PyTorch's optimizer, or DeepSpeed's wrapper around one.
        peak: of the training device, shared by the whole run.
        detailed: also record the phases of a step on a CPU.
        kept_by_loss: returns the bytes that the loss of the last micro-batch kept for backward.
    Attributes:
        live: result of `live_bytes`, with activations and logits after `end`; None before
            `after_backward`.
        phases: {"live": bytes, "peak": bytes} by phase after `end`; None if not recorded.
        slows_down: the measurement slows down the step.
        written: bytes that this process wrote to disks during the step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer,
        peak: DevicePeak,
        detailed: bool,
        kept_by_loss: Callable[[], int],
    ):
        self.model, self.optimizer, self.device, self.kept_by_loss = (
            model,
            optimizer,
            peak.device,
            kept_by_loss,
        )
        self._peak = peak
        self.live: dict | None = None
        self.phases: dict[str, dict[str, int]] | None = None
        self.slows_down = detailed and self.device.type == "cpu"
        self._follows = detailed or self.device.type == "cuda"
        self._profiler, self._marks, self._gathered, self._written_before = None, [], 0, 0
        self.written = 0

    def begin(self) -> None:
        """Start the measurement at the beginning of a step."""
        self._written_before = written_bytes()
        if not self._follows:
            return
        if self.device.type == "cuda":
            self._peak.mark()  # excludes earlier steps
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            self._start = sum(_count(_all_tensors(), set()).values())
            self._profiler = torch.autograd.profiler.profile(use_device=None, profile_memory=True)
            self._profiler.__enter__()
        self._marks = []
        self.mark("data")

    def mark(self, phase: str) -> None:
        """Record the end of `phase`. On a GPU the caller has just marked the peak."""
        if not self._follows:
            return
        if phase == "forward":
            self._gathered = gathered_bytes(self.model)
        if self.device.type == "cuda":
            self._marks.append((phase, torch.cuda.memory_allocated(self.device), self._peak.last))
        else:
            with torch.profiler.record_function(f"{MARK}{phase}"):
                pass

    def after_backward(self) -> None:
        """Count live tensors at the end of backward, when all tensors of a step exist."""
        self.live = live_bytes(self.model, self.optimizer, self.device)

    def describe(self) -> list[str]:
        """Return lines on the memory in use by category."""
        categories = live_bytes(self.model, self.optimizer, self.device)["categories"]
        shown = ", ".join(f"{kind} {size / GB:.2f}" for kind, size in categories.items() if size)
        return [f"Held by kind, in GB: {shown}; activations are not among them."]

    def end(self) -> None:
        """Finish the measurement after the last mark of the step."""
        self.written = written_bytes() - self._written_before
        if not self._follows:
            return
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._marks, self._profiler = marks_of_profile(self._profiler, self._start), None
        self.phases, previous = {}, self._start
        for phase, live, peak in self._marks:
            phase_bytes = self.phases.setdefault(phase, {"live": 0, "peak": 0})
            phase_bytes.update(live=live, peak=max(phase_bytes["peak"], peak))
            # The last micro-batch determines the result. Gathered parameters are not activations.
            if phase == "forward":
                activations = live - previous - self._gathered
            previous = live
        logits = self.kept_by_loss()
        saved = {"activations": max(0, activations - logits), "logits": logits}
        self.live["categories"].update(saved)
        self.live["on_device"].update(saved)


MARK = "memory after "


def marks_of_profile(profiler, start: int) -> list[tuple[str, int, int]]:
    """Return (phase, live bytes at its end, peak bytes within it) for each mark in a profile.

    Args:
        profiler: torch.autograd.profiler.profile with profile_memory.
        start: live bytes at the start of the profile. The profile does not record the
            release of tensors that existed before.
    """
    events = [
        (event.start_ns(), event.name(), event.nbytes())
        for event in profiler.kineto_results.events()
        if event.name() == "[memory]" or event.name().startswith(MARK)
    ]
    live = peak = start
    phases = []
    for _, name, size in sorted(events, key=lambda event: event[0]):
        if name.startswith(MARK):
            phases.append((name.removeprefix(MARK), live, peak))
            peak = live
        else:
            live += size
            peak = max(peak, live)
    return phases


def gathered_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of parameters that are gathered at present, or being gathered, on this rank.

    0 under strategies that do not shard parameters.
    """
    parameters = list(model.parameters())
    if any(hasattr(p, "ds_tensor") for p in parameters):
        gathered = [
            p
            for p in parameters
            if not p.ds_persist and p.ds_status.name != "NOT_AVAILABLE" and not _is_its_shard(p)
        ]
        return sum(p.ds_numel * p.element_size() for p in gathered)
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return sum(p.nbytes for p in parameters if not is_dtensor(p)) if sharded else 0


def _is_its_shard(parameter: torch.Tensor) -> bool:
    """Return whether the parameter's data is this rank's ZeRO-3 shard, as on a single rank."""
    return parameter.numel() > 0 and parameter.data_ptr() == parameter.ds_tensor.data_ptr()


def live_bytes(model: torch.nn.Module, optimizer, device: torch.device) -> dict:
    """Count live tensors by category. Call it at the end of backward, before the update.

    Every storage is counted once, in the first category that contains it. The function supports
    plain, FSDP2 (DTensor) and DeepSpeed-partitioned models. "optimizer" contains the fp32 master
    weights, if any, and Adam's moments. "buffers" contains the model's own and the communication
    buffers.

    Args:
        model: the unwrapped module.
        optimizer: PyTorch's optimizer, or DeepSpeed's wrapper around one.
        device: the training device.
    Returns:
        {"categories": bytes by category, on any device, "on_device": bytes on the training device,
        "moments": bytes of Adam's moments alone (part of "optimizer"),
        "placement": "device", "host" or "nvme" for parameters, gradients and optimizer}.
    """
    base = base_optimizer(optimizer)
    addresses: set[int] = set()
    moments = _count(_optimizer_moments(base), set())
    counted = {
        "parameters": _count(_parameters(model), addresses),
        "gradients": _count(_gradients(model, optimizer, base), addresses),
        "optimizer": _count(_optimizer_states(optimizer, base), addresses),
        "buffers": _count((*model.buffers(), *_communication_buffers(optimizer)), addresses),
        "other": _count(_all_tensors(), addresses),
    }
    placement = _placement(optimizer)
    on_device = {name: sizes[device.type] for name, sizes in counted.items()}
    # On a CPU the device is the host. The strategy determines what would be on a GPU.
    if device.type == "cpu":
        on_device.update(
            {name: 0 for name in ("gradients", "optimizer") if placement[name] != "device"}
        )
        if placement["parameters"] == "nvme":
            on_device["parameters"] = _count(_kept_beside_nvme(model), set())[device.type]
    return {
        "categories": {
            **{name: sum(sizes.values()) for name, sizes in counted.items()},
            "activations": None,
            "logits": None,
        },
        "on_device": {**on_device, "activations": None, "logits": None},
        "moments": sum(moments.values()),
        "placement": placement,
    }


def _all_tensors() -> Iterator[torch.Tensor]:
    return (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def _communication_buffers(optimizer) -> Iterator[torch.Tensor | None]:
    """Yield DeepSpeed's buckets; between backward and update only stage 3 has one."""
    for bucket in (getattr(optimizer, "ipg_buckets", None) or {}).values():
        yield from bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]


def _count(tensors: Iterable[torch.Tensor | None], seen: set[int]) -> Counter[str]:
    """Return the bytes of the tensors' storages by type of device, without those in `seen`.

    Args:
        tensors: tensors to count; None is skipped.
        seen: addresses of storages counted so far; the new ones are added.
    """
    total: Counter[str] = Counter()
    for tensor in tensors:
        if tensor is None or tensor.device.type == "meta":
            continue
        try:
            storage = local_part(tensor).untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            continue  # sparse tensors and the compiler's fake tensors have no storage
        if size and address not in seen:
            seen.add(address)
            total[storage.device.type] += size
    return total


def _parameters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        # ZeRO-3 replaces the data by an empty placeholder and keeps this rank's shard in ds_tensor.
        yield getattr(parameter, "ds_tensor", None)
        yield parameter.data


def _kept_beside_nvme(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield those of infinity's parameters that stay on the device.

    These are the small ones, as whole parameters and as this rank's shards.
    """
    for parameter in model.parameters():
        if parameter.ds_persist:
            yield from (parameter.ds_tensor, parameter.data)


def _gradients(model: torch.nn.Module, optimizer, base) -> Iterator[torch.Tensor | None]:
    yield from (parameter.grad for parameter in model.parameters())
    yield from (parameter.grad for group in base.param_groups for parameter in group["params"])
    # DeepSpeed's own lists: for stages 1 and 2, for stage 3, and for the fp32 gradients of an
    # offloaded optimizer.
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


def _placement(optimizer) -> dict[str, str]:
    """Return where parameters, gradients and optimizer states are stored between steps.

    The source is DeepSpeed's optimizer.
    """
    swaps = getattr(optimizer, "swap_optimizer", False)
    on_host = getattr(optimizer, "cpu_offload", False) or getattr(
        optimizer, "offload_optimizer", False
    )
    return {
        # Shards that are too small for a separate file stay in host memory.
        "parameters": "nvme" if getattr(optimizer, "params_in_nvme_and_cpu", False) else "device",
        # Gradients are reduced to the device that computes the update.
        "gradients": "host" if on_host or swaps else "device",
        "optimizer": "nvme" if swaps else "host" if on_host else "device",
    }


# ------------------------------------------------------------------------------------- results.json


def of_this_rank(
    memory_by_phase: MemoryByPhase, step: StepMemory, nvme_folder: str | None, is_node_leader: bool
) -> dict:
    """Return this rank's measurements for `over_ranks`."""
    return {
        "device": memory_by_phase.device_bytes(),
        "host_peak": host_bytes()[1],
        "pinned": pinned_bytes(),
        "nvme": folder_bytes(nvme_folder) if is_node_leader else 0,
        "nvme_written": step.written if nvme_folder else 0,
        "unseen": unseen_bytes(memory_by_phase.device),
        "phases": memory_by_phase.noted,
        "step": step.phases,
        "live": step.live,
    }


def over_ranks(ranks: list[dict]) -> dict:
    """Return the "memory" entry of results.json; docs/REAL_MODELS_GUIDE.md explains each key.

    Args:
        ranks: result of `of_this_rank` for each rank.
    """
    live = [rank["live"] or {} for rank in ranks]
    return {
        **{
            f"{kind}_bytes": [rank["device"][kind] for rank in ranks]
            for kind in ("allocated", "reserved", "peak")
        },
        "host_peak_bytes": [rank["host_peak"] for rank in ranks],
        "pinned_bytes": [rank["pinned"] for rank in ranks],
        "nvme_bytes": sum(rank["nvme"] for rank in ranks),
        "nvme_written_bytes_per_step": sum(rank["nvme_written"] for rank in ranks),
        "device_used": [rank["unseen"] for rank in ranks],
        "categories_bytes": live[0].get("categories"),
        "categories_bytes_by_rank": [rank_bytes.get("categories") for rank_bytes in live],
        "device_categories_bytes_by_rank": [rank_bytes.get("on_device") for rank_bytes in live],
        "moments_bytes": live[0].get("moments"),
        "placement": live[0].get("placement"),
        "phases_bytes": {
            phase: {kind: [rank["phases"][phase][kind] for rank in ranks] for kind in kinds}
            for phase, kinds in ranks[0]["phases"].items()
        },
        "step_bytes_by_rank": [rank["step"] for rank in ranks],
    }
