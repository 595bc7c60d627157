"""Live and peak bytes of a step on a CPU, from the allocations that PyTorch's profiler records."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from distributed_training.memory.live import all_tensors, count
from distributed_training.memory.step_marks import StepMarks

MARK = "memory after "  # names of the profiler's marks


class Allocation(NamedTuple):
    """An allocation in a profile, or with a negative size a release."""

    time: int
    address: int
    size: int


class ProfilerMarks(StepMarks):
    """On a CPU: PyTorch's profiler records each allocation, which slows down the step."""

    def __init__(self) -> None:
        self._profiler: torch.autograd.profiler.profile | None = None

    def begin(self) -> None:
        """See the base class."""
        self.start = sum(count(all_tensors(), set()).values())
        self._profiler = torch.autograd.profiler.profile(use_device=None, profile_memory=True)
        self._profiler.__enter__()

    def mark(self, phase: str) -> None:
        """See the base class."""
        with torch.profiler.record_function(f"{MARK}{phase}"):
            pass

    def end(self) -> list[tuple[str, int, int]]:
        """See the base class."""
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        addresses: set[int] = set()
        count(all_tensors(), addresses)
        profiler.__exit__(None, None, None)
        return marks_of_profile(profiler, self.start, addresses)


def marks_of_profile(profiler, start: int, at_end: set[int]) -> list[tuple[str, int, int]]:
    """Return (phase, live bytes at its end, peak bytes within it) for each mark in a profile.

    The profile does not record what a thread of gloo releases, and in some runs one of them has the
    last reference to the input of a collective. Such an allocation counts until the next one, or
    until its phase ends.

    Args:
        profiler: torch.autograd.profiler.profile with profile_memory.
        start: live bytes at the start of the profile, the release of which it does not record.
        at_end: addresses of the tensors that are live at the end of the profile.
    """

    def walk(tree) -> Iterator:
        for event in tree:
            yield event
            yield from walk(event.children)

    phases: list[tuple[str, list[Allocation]]] = []
    allocations: list[Allocation] = []
    events = walk(profiler.kineto_results.experimental_event_tree())
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.name.startswith(MARK):
            phases.append((event.name.removeprefix(MARK), allocations))
            allocations = []
        elif event.name == "[memory]":
            fields = event.typed[1]
            allocations.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size))
    lost = _released_elsewhere(phases, at_end)
    live, marks = start, []
    for phase, allocations in phases:
        peak, lost_bytes = live, 0
        for allocation in allocations:
            if allocation in lost:
                live -= lost_bytes
                lost_bytes = allocation.size
            live += allocation.size
            peak = max(peak, live)
        live -= lost_bytes
        marks.append((phase, live, peak))
    return marks


def _released_elsewhere(
    phases: list[tuple[str, list[Allocation]]], at_end: set[int]
) -> set[Allocation]:
    """Return the allocations whose address was allocated again, or has no tensor at the end.

    Those of a forward pass are left out: DDP keeps the buckets that it allocates in its second one.
    """
    lost: set[Allocation] = set()
    newest: dict[int, Allocation] = {}  # by address
    for phase, allocations in phases:
        for allocation in allocations:
            previous = newest.pop(allocation.address, None)
            if allocation.size > 0 and previous is not None:
                lost.add(previous)
            if allocation.size > 0 and phase != "forward":
                newest[allocation.address] = allocation
    return lost | {newest[address] for address in newest.keys() - at_end}
