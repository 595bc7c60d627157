"""What a run really holds: bytes on the device, in host memory and on NVMe, after each phase and by
kind of state.

Tensors that Python can see are counted as they are. What autograd keeps for the backward pass it
cannot see, and what comes and goes within a step it would miss; these are read off the allocator,
see `StepMemory`.
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

from support.strategies.optimizer_shards import base_optimizer, local_part

GB = 2**30


def host_bytes() -> tuple[int, int]:
    """Resident memory of this process now and at its peak, in bytes."""
    now = psutil.Process().memory_info().rss
    # VmHWM belongs to this program; ru_maxrss can be inherited from the process that started it
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
    """Bytes that this process may use of its device: a GPU's size, or the host's, a control group's
    or ulimit's.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [psutil.virtual_memory().total]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:  # it counts addresses, most of which hold nothing
        usage = psutil.Process().memory_info()
        limits.append(soft - (usage.vms - usage.rss))
    return min(*limits, *control_group_limits())


def control_group_limits() -> list[int]:
    """Bytes that the control groups of this process allow, as a scheduler or a container sets them
    (cgroup v2, or v1).
    """
    found = []
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
                with contextlib.suppress(OSError, ValueError):  # "max" is no number
                    found.append(int((group / name).read_text()))
    return found


class DevicePeak:
    """The most that PyTorch's allocator held on a GPU, in parts of the run and in all of it;
    nothing on a CPU.
    """

    def __init__(self, device: torch.device):
        self.device, self.highest, self.last = device, 0, 0

    def mark(self) -> None:
        """What was the most since the last call is `last` from now on, and the most of all
        `highest`.
        """
        if self.device.type == "cuda":
            self.last = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.highest = max(self.highest, self.last)


# What a run does after each phase that is noted. After backward comes the next micro-batch, or
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


class Phases:
    """Memory of this process after each phase of a run, in bytes."""

    def __init__(self, device: torch.device):
        self.device, self.peak = device, DevicePeak(device)
        self.noted: dict[str, dict[str, int | None]] = {}
        self.doing = ""
        self.note("libraries_imported")

    def note(self, phase: str, mark: bool = True) -> None:
        """Record what the device holds, its peak since the last phase, and host memory now and at
        its peak so far.

        With `mark` false the caller has marked the peak itself.
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
        """Where memory stood, for a run that ran out of it: lines."""
        held = (
            torch.cuda.memory_allocated(self.device)
            if self.device.type == "cuda"
            else host_bytes()[0]
        )
        limit = memory_limit(self.device)
        return [
            f"It happened in: {self.doing}. This process held {held / GB:.2f} of {limit / GB:.1f} GB."
        ]

    def device_bytes(self) -> dict[str, int | None]:
        """Memory of the training device in bytes: {allocated, reserved, peak}.

        On a GPU these are PyTorch's allocator's; on a CPU the process is all there is: its resident
        memory and its peak, and nothing is reserved.
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
    """The device's own view, as nvidia-smi has it; None on a CPU.

    Returns:
        {"used": bytes in use on the GPU by all processes, "total": its size, "unseen": those in use
        that PyTorch's allocator
        knows nothing of: the CUDA context and libraries' workspaces, NCCL's buffers, other
            processes}.
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
    """Host memory in tensors that are locked for transfers to a GPU."""
    if not torch.cuda.is_available():
        return 0
    return sum(_count(filter(_is_pinned, _all_tensors()), set()).values())


def _is_pinned(tensor: torch.Tensor) -> bool:
    try:
        return tensor.device.type == "cpu" and tensor.is_pinned()
    except (RuntimeError, NotImplementedError):  # some kinds of tensors have no such thing
        return False


def written_bytes() -> int:
    """Bytes that this process has had written to disks so far; 0 where the system does not count
    them.
    """
    try:
        return psutil.Process().io_counters().write_bytes
    except (AttributeError, psutil.Error):
        return 0


def folder_bytes(folder: str | None) -> int:
    """Bytes of all files below a folder; 0 for None."""
    if folder is None:
        return 0
    return sum(
        os.path.getsize(os.path.join(top, name))
        for top, _, names in os.walk(folder)
        for name in names
    )


class StepMemory:
    """Memory through one optimizer step: live at the end of each phase, and the most within it.

    On a GPU PyTorch's allocator keeps these numbers anyway. On a CPU its profiler sees each
    tensor's memory come and go; that slows the step down, so it is asked for only with `detailed`.

    Args:
        model: the unwrapped module.
        optimizer: torch's optimizer, or DeepSpeed's wrapper around one.
        peak: of the training device, which all of the run shares.
        detailed: follow the phases of a step on a CPU, too.
        kept_by_loss: tells the bytes that the loss of the last micro-batch kept for backward.
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
        """The step that is to be measured starts."""
        self._written_before = written_bytes()
        if not self._follows:
            return
        if self.device.type == "cuda":
            self._peak.mark()  # the steps before are over
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            self._start = sum(_count(_all_tensors(), set()).values())
            self._profiler = torch.autograd.profiler.profile(use_device=None, profile_memory=True)
            self._profiler.__enter__()
        self._marks = []
        self.mark("data")

    def mark(self, phase: str) -> None:
        """What came and went since the last mark belongs to `phase`; on a GPU the peak has just
        been marked.
        """
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
        """Count live tensors: everything that a step needs is there now."""
        self.live = live_bytes(self.model, self.optimizer, self.device)

    def describe(self) -> list[str]:
        """What is held by kind of state at this moment: lines."""
        found = live_bytes(self.model, self.optimizer, self.device)["categories"]
        shown = ", ".join(f"{kind} {size / GB:.2f}" for kind, size in found.items() if size)
        return [f"Held by kind, in GB: {shown}; activations are not among them."]

    def end(self) -> None:
        """The measured step is over, its last mark made."""
        self.written = written_bytes() - self._written_before
        if not self._follows:
            return
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._marks, self._profiler = marks_of_profile(self._profiler, self._start), None
        self.phases, before = {}, self._start
        for phase, live, peak in self._marks:
            found = self.phases.setdefault(phase, {"live": 0, "peak": 0})
            found.update(live=live, peak=max(found["peak"], peak))
            if (
                phase == "forward"
                # of the last micro-batch; on a GPU and on a CPU alike, what was gathered is not saved
            ):
                activations = live - before - self._gathered
            before = live
        logits = self.kept_by_loss()
        held = {"activations": max(0, activations - logits), "logits": logits}
        self.live["categories"].update(held)
        self.live["on_device"].update(held)


MARK = "memory after "


def marks_of_profile(profiler, start: int) -> list[tuple[str, int, int]]:
    """What a profiler saw between the marks: (phase, live bytes at its end, most bytes within it).

    Args:
        profiler: torch.autograd.profiler.profile with profile_memory.
        start: live bytes when it started. Releases of older tensors are not in its records.
    """
    events = [
        (event.start_ns(), event.name(), event.nbytes())
        for event in profiler.kineto_results.events()
        if event.name() == "[memory]" or event.name().startswith(MARK)
    ]
    live = peak = start
    found = []
    for _, name, size in sorted(events, key=lambda event: event[0]):
        if name.startswith(MARK):
            found.append((name.removeprefix(MARK), live, peak))
            peak = live
        else:
            live += size
            peak = max(peak, live)
    return found


def gathered_bytes(model: torch.nn.Module) -> int:
    """Parameters that are whole on this rank for the moment, or on their way, under a strategy that
    shards them.
    """
    parameters = list(model.parameters())
    if any(hasattr(p, "ds_tensor") for p in parameters):
        there = [
            p
            for p in parameters
            if not p.ds_persist and p.ds_status.name != "NOT_AVAILABLE" and not _is_its_shard(p)
        ]
        return sum(p.ds_numel * p.element_size() for p in there)
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return sum(p.nbytes for p in parameters if not hasattr(p, "to_local")) if sharded else 0


def _is_its_shard(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 has just shown this rank's shard in the parameter's place, as on a single
    rank.
    """
    return parameter.numel() > 0 and parameter.data_ptr() == parameter.ds_tensor.data_ptr()


def live_bytes(model: torch.nn.Module, optimizer, device: torch.device) -> dict:
    """Count live tensors by what they are for. Call it at the end of backward, before the update.

    Every storage is counted once, in the first category that holds it. Works for plain, FSDP2
    (DTensor) and DeepSpeed-partitioned models; "optimizer" is the fp32 master weights, where there
    are any, and Adam's moments; "buffers" are the model's own and those that communication keeps.

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
        "buffers": _count((*model.buffers(), *_communication_buffers(optimizer)), seen),
        "other": _count(_all_tensors(), seen),
    }
    placement = _placement(optimizer)
    on_device = {name: found[device.type] for name, found in counted.items()}
    if (
        device.type == "cpu"
    ):  # the host is the device, and only the strategy tells what would lie on a GPU
        on_device.update(
            {name: 0 for name in ("gradients", "optimizer") if placement[name] != "device"}
        )
        if placement["parameters"] == "nvme":
            on_device["parameters"] = _count(_kept_beside_nvme(model), set())[device.type]
    return {
        "categories": {
            **{name: sum(found.values()) for name, found in counted.items()},
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
    """DeepSpeed's buckets; between backward and update only stage 3 keeps one."""
    for bucket in (getattr(optimizer, "ipg_buckets", None) or {}).values():
        yield from bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]


def _count(tensors: Iterable[torch.Tensor | None], seen: set[int]) -> Counter[str]:
    """Bytes of the storages not seen before, by type of device."""
    total: Counter[str] = Counter()
    for tensor in tensors:
        if tensor is None or tensor.device.type == "meta":
            continue
        try:
            storage = local_part(tensor).untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (
            RuntimeError,
            NotImplementedError,
        ):  # sparse tensors and the compiler's fake ones have no storage
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


def _kept_beside_nvme(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Of infinity's parameters those that never leave the device: the small ones, whole and as this
    rank's shard.
    """
    for parameter in model.parameters():
        if parameter.ds_persist:
            yield from (parameter.ds_tensor, parameter.data)


def _gradients(model: torch.nn.Module, optimizer, base) -> Iterator[torch.Tensor | None]:
    yield from (parameter.grad for parameter in model.parameters())
    yield from (parameter.grad for group in base.param_groups for parameter in group["params"])
    # DeepSpeed's own lists: stages 1 and 2, stage 3, and the fp32 gradients of an offloaded
    # optimizer.
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
    """Where parameters and optimizer states live between steps, as DeepSpeed's optimizer reports
    it.
    """
    swaps = getattr(optimizer, "swap_optimizer", False)
    on_host = getattr(optimizer, "cpu_offload", False) or getattr(
        optimizer, "offload_optimizer", False
    )
    return {
        # Shards too small for a file of their own stay in host memory.
        "parameters": "nvme" if getattr(optimizer, "params_in_nvme_and_cpu", False) else "device",
        "gradients": "host"
        if on_host or swaps
        else "device",  # they are reduced to where the update happens
        "optimizer": "nvme" if swaps else "host" if on_host else "device",
    }


# --------------------------------------------------------------------------------- for results.json


def of_this_rank(
    footprint: Phases, step: StepMemory, nvme_folder: str | None, is_node_leader: bool
) -> dict:
    """What this rank measured; see `over_ranks`."""
    return {
        "device": footprint.device_bytes(),
        "host_peak": host_bytes()[1],
        "pinned": pinned_bytes(),
        "nvme": folder_bytes(nvme_folder) if is_node_leader else 0,
        "nvme_written": step.written if nvme_folder else 0,
        "unseen": unseen_bytes(footprint.device),
        "phases": footprint.noted,
        "step": step.phases,
        "live": step.live,
    }


def over_ranks(ranks: list[dict]) -> dict:
    """The "memory" of results.json; docs/REAL_MODELS_GUIDE.md explains each key."""
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
        "categories_bytes_by_rank": [found.get("categories") for found in live],
        "device_categories_bytes_by_rank": [found.get("on_device") for found in live],
        "moments_bytes": live[0].get("moments"),
        "placement": live[0].get("placement"),
        "phases_bytes": {
            phase: {kind: [rank["phases"][phase][kind] for rank in ranks] for kind in kinds}
            for phase, kinds in ranks[0]["phases"].items()
        },
        "step_bytes_by_rank": [rank["step"] for rank in ranks],
    }
