"""Measured memory of a run: after each of its phases, and during one optimizer step.

Tensors that autograd saves for backward, and tensors that are freed within a step, cannot be
counted like those in live.py. They are derived from the allocator's statistics.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from distributed_training.memory import system
from distributed_training.memory.live import live_bytes, pinned_bytes
from distributed_training.memory.step_marks import StepMarks
from distributed_training.strategies.objects import TrainingObjects
from distributed_training.units import GB

# What a run does after each recorded phase. After backward comes the next micro-batch, or
# `StepMeter.after_backward`.
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


@dataclass
class DevicePeak:
    """Peak memory of PyTorch's allocator on a GPU, in bytes; 0 on a CPU."""

    device: torch.device
    highest: int = 0  # over all calls of `mark`
    last: int = 0  # between the last two calls

    def mark(self) -> None:
        """Set `last` to the peak since the previous call, and update `highest`."""
        if self.device.type == "cuda":
            self.last = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.highest = max(self.highest, self.last)


class MemoryByPhase:
    """Memory of this process after each phase of a run, in bytes."""

    def __init__(self, device: torch.device):
        self.device, self.peak = device, DevicePeak(device)
        self.noted: dict[str, dict[str, int | None]] = {}  # memory by phase
        self.doing = ""  # what the run does at present, for messages
        self.note("libraries_imported")

    def begin(self, doing: str) -> None:
        """Take note of what the run does next, for messages."""
        self.doing = doing

    def note(self, phase: str, mark: bool = True) -> None:
        """Record device memory, its peak since the last phase, and current and peak host memory.

        Args:
            mark: mark the device's peak; False if the caller has just done so.
        """
        self.begin(AFTER.get(phase, self.doing))
        if mark:
            self.peak.mark()
        resident, host_peak = system.host_bytes()
        allocated, reserved = system.allocator_bytes(self.device)
        self.noted[phase] = {
            "device_allocated": allocated,
            "device_reserved": reserved,
            "device_peak": self.peak.last if self.device.type == "cuda" else None,
            "host_resident": resident,
            "host_peak": host_peak,
        }

    def describe(self) -> list[str]:
        """Return lines on the memory in use, for a run that ran out of memory."""
        used, limit = system.allocator_bytes(self.device)[0], system.memory_limit(self.device)
        return [
            f"It happened in: {self.doing}. "
            f"This process used {used / GB:.2f} of {limit / GB:.1f} GB."
        ]

    def device_bytes(self) -> dict[str, int | None]:
        """Return memory of the training device in bytes: {allocated, reserved, peak}.

        On a CPU the peak is that of the process's resident memory.
        """
        self.peak.mark()
        allocated, reserved = system.allocator_bytes(self.device)
        peak = self.peak.highest if self.device.type == "cuda" else system.host_bytes()[1]
        return {"allocated": allocated, "reserved": reserved, "peak": peak}


class AllocatorMarks(StepMarks):
    """On a GPU: from the statistics of PyTorch's allocator."""

    def __init__(self, peak: DevicePeak):
        self.peak = peak
        self._marks: list[tuple[str, int, int]] = []

    def begin(self) -> None:
        """See the base class."""
        self.peak.mark()  # excludes earlier steps
        self.start = torch.cuda.memory_allocated(self.peak.device)

    def mark(self, phase: str) -> None:
        """See the base class; the caller has just marked the peak."""
        self._marks.append((phase, torch.cuda.memory_allocated(self.peak.device), self.peak.last))

    def end(self) -> list[tuple[str, int, int]]:
        """See the base class."""
        return self._marks


@dataclass
class StepMemory:
    """Memory during one optimizer step: live bytes at the end of each phase, and its peak.

    The phases are recorded on a GPU; on a CPU only if `detailed`, because it slows down the step.
    """

    objects: TrainingObjects
    peak: DevicePeak  # of the training device, shared by the whole run
    detailed: bool  # also record the phases of a step on a CPU
    kept_by_loss: Callable[[], int]  # bytes that the last micro-batch's loss keeps for backward
    # Results. `live` is that of `live_bytes`, after `end` with activations and logits.
    live: dict | None = None
    phases: dict[str, dict[str, int]] | None = None  # live and peak bytes; None if not recorded
    written: int = 0  # bytes that this process wrote to disks during the step

    def __post_init__(self) -> None:
        on_gpu = self.peak.device.type == "cuda"
        self.slows_down = self.detailed and not on_gpu
        self._marks: StepMarks
        if on_gpu:
            self._marks = AllocatorMarks(self.peak)
        elif self.detailed:
            from distributed_training.memory.allocation_profile import ProfilerMarks  # only then

            self._marks = ProfilerMarks()
        else:
            self._marks = StepMarks()
        self._gathered = self._written_before = 0

    def begin(self) -> None:
        """Start the measurement at the beginning of a step."""
        self._written_before = system.written_bytes()
        self._marks.begin()
        self.mark("data")

    def mark(self, phase: str) -> None:
        """Record the end of `phase`. On a GPU the caller has just marked the peak."""
        if phase == "forward":
            self._gathered = self.objects.gathered_bytes()
        self._marks.mark(phase)

    def after_backward(self) -> None:
        """Count live tensors at the end of backward, when all tensors of a step exist."""
        self.live = live_bytes(self.objects.live_states(), self.peak.device)

    def describe(self) -> list[str]:
        """Return lines on the memory in use by category, for a run that ran out of memory."""
        categories = live_bytes(self.objects.live_states(), self.peak.device)["categories"]
        shown = ", ".join(f"{kind} {size / GB:.2f}" for kind, size in categories.items() if size)
        return [f"Memory by category in GB: {shown}. Activations are not included."]

    def end(self) -> None:
        """Finish the measurement after the last mark of the step."""
        self.written = system.written_bytes() - self._written_before
        marks = self._marks.end()
        if not marks:
            return
        self.phases, previous, in_forward = {}, self._marks.start, None
        for phase, live, peak in marks:
            phase_bytes = self.phases.setdefault(phase, {"live": 0, "peak": 0})
            phase_bytes.update(live=live, peak=max(phase_bytes["peak"], peak))
            if phase == "forward":  # the last micro-batch determines the result
                in_forward = live - previous
            previous = live
        if self.live is None or in_forward is None:
            return
        logits = self.kept_by_loss()
        # Gathered parameters are not activations.
        activations = max(0, in_forward - self._gathered - logits)
        for sizes in (self.live["categories"], self.live["on_device"]):
            sizes.update(activations=activations, logits=logits)


def of_this_rank(
    memory_by_phase: MemoryByPhase, step: StepMemory, nvme_folder: str | None, is_node_leader: bool
) -> dict:
    """Return this rank's measurements for `over_ranks`, by keys of results.json."""
    live = step.live or dict.fromkeys(("categories", "on_device", "moments", "placement"))
    return {
        **{f"{kind}_bytes": size for kind, size in memory_by_phase.device_bytes().items()},
        "host_peak_bytes": system.host_bytes()[1],
        "pinned_bytes": pinned_bytes(),
        "nvme_bytes": system.folder_bytes(nvme_folder) if is_node_leader else 0,
        "nvme_written_bytes_per_step": step.written if nvme_folder else 0,
        "device_used": system.unseen_bytes(memory_by_phase.device),
        "categories_bytes_by_rank": live["categories"],
        "device_categories_bytes_by_rank": live["on_device"],
        "moments_bytes": live["moments"],
        "placement": live["placement"],
        "phases_bytes": memory_by_phase.noted,
        "step_bytes_by_rank": step.phases,
    }


def over_ranks(ranks: list[dict]) -> dict:
    """Return the "memory" entry of results.json; docs/OUTPUTS.md explains each key."""
    lists, largest = _by_key(ranks), None
    by_rank, phases = lists["categories_bytes_by_rank"], _by_key(lists["phases_bytes"])
    if None not in by_rank:  # every rank was measured
        sizes = _by_key(by_rank)
        largest = {kind: None if None in each else max(each) for kind, each in sizes.items()}
    return {
        **lists,
        **{key: sum(lists[key]) for key in ("nvme_bytes", "nvme_written_bytes_per_step")},
        "categories_bytes": largest,
        **{key: lists[key][0] for key in ("moments_bytes", "placement")},
        "phases_bytes": {phase: _by_key(of_phase) for phase, of_phase in phases.items()},
    }


def _by_key(ranks: list[dict]) -> dict[str, list]:
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}
