"""Lines that only a GPU runs, with torch.cuda's functions replaced: which of them are called, when,
and with what.

None of this shows that a GPU does what is asked for; benchmarks/gpu_check.sh does.
"""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from support.checkpoints import manager as checkpoint
from support.cluster import tuning as devices
from support.commands import check as checks
from support.data import batches as data
from support.errors import UserError
from support.memory import measure as memory
from support.memory import system
from support.report.step_meter import StepMeter
from support.units import PHASES

GPU = torch.device("cuda", 0)
GB = 2**30


class Memory:
    """What a GPU's allocator counts, in bytes."""

    def __init__(self, monkeypatch, total=80 * GB, outside=GB):
        self.held = self.peak = 0
        self.total, self.outside = total, outside
        for name, read in {
            "memory_allocated": lambda: self.held,
            "memory_reserved": lambda: self.held + 100,
            "max_memory_allocated": lambda: self.peak,
            "reset_peak_memory_stats": self.reset,
            "mem_get_info": lambda: (self.total - self.held - 100 - self.outside, self.total),
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda _device, read=read: read())

    def reset(self) -> None:
        self.peak = self.held

    def take(self, size: int, temporary: int = 0) -> None:
        """Hold `size` more (or less), after `temporary` more than that for a moment."""
        self.peak = max(self.peak, self.held + max(size, 0) + temporary)
        self.held += size


@pytest.fixture
def gpu_memory(monkeypatch):
    return Memory(monkeypatch)


def test_peak_of_a_part_and_of_the_run(gpu_memory):
    phases = memory.MemoryByPhase(GPU)
    gpu_memory.take(50, temporary=500)
    phases.note("model_loaded")
    gpu_memory.take(30, temporary=20)
    phases.note("wrapped")
    assert phases.noted["model_loaded"]["device_peak"] == 550
    assert phases.noted["wrapped"]["device_peak"] == 100
    assert phases.device_bytes() == {"allocated": 80, "reserved": 180, "peak": 550}


def test_what_the_device_holds_beside_the_allocator(gpu_memory):
    gpu_memory.take(50)
    assert system.unseen_bytes(GPU) == {"used": GB + 150, "total": 80 * GB, "unseen": GB}
    assert system.memory_limit(GPU) == 80 * GB


def test_memory_of_a_step_by_phase(gpu_memory, monkeypatch):
    monkeypatch.setattr(memory, "live_bytes", lambda *_: {"categories": {}, "on_device": {}})
    peak = memory.DevicePeak(GPU)
    gpu_memory.take(1000, temporary=9999)  # earlier steps, which are not measured
    step = memory.StepMemory(torch.nn.Linear(1, 1), None, peak, False, kept_by_loss=lambda: 40)
    peak.mark()  # as the meter does at each mark of this step
    step.begin()
    phases = (("forward", 300, 60), ("backward", -200, 400), ("update", -100, 50))
    for phase, size, temporary in phases:
        gpu_memory.take(size, temporary)
        peak.mark()
        step.mark(phase)
        if phase == "backward":
            step.after_backward()
    step.end()
    assert {name: (found["live"], found["peak"]) for name, found in step.phases.items()} == {
        "data": (1000, 1000),
        "forward": (1300, 1360),
        "backward": (1100, 1700),
        "update": (1000, 1150),
    }
    assert step.live["categories"] == {"activations": 260, "logits": 40}


class Event:
    """A CUDA event; `clock` is the GPU's time in milliseconds."""

    clock, waited = 0.0, 0

    def __init__(self, enable_timing=False):
        self.timed = enable_timing

    def record(self):
        self.at = Event.clock

    def synchronize(self):
        Event.waited += 1
        self.has_waited = True

    def elapsed_time(self, end):
        assert self.timed and end.timed
        return end.at - self.at


@pytest.fixture
def event(monkeypatch):
    Event.clock, Event.waited = 0.0, 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event


def test_phases_of_a_step_are_timed_by_the_gpu_without_waiting_for_it(event, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    memory = MagicMock(device=GPU)
    timer = StepMeter(memory, MagicMock(), MagicMock(), first_step=0, measured_step=9)
    timer.pause()
    for step in range(1, 4):
        for number, phase in enumerate(PHASES):
            event.clock += 1000 * step * (number + 1)
            timer.mark(phase)
        timer.end_step()
    assert waits == []
    timer.read()
    assert waits == [1]
    assert [list(step.values()) for step in timer.steps] == [
        [n, 2 * n, 3 * n, 4 * n] for n in (1, 2, 3)
    ]


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and must not be read there."""

    is_cuda = True
    # A copy on the host is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl

    def item(self):
        raise AssertionError("the host waits for the GPU")


def test_stop_is_answered_one_step_later_from_host_memory(event, monkeypatch):
    empty, locked = torch.empty, []

    def on_host(*args, pin_memory=False, **kwargs):
        locked.append(pin_memory)
        return empty(*args, **kwargs)

    flag = checkpoint.DelayedFlag()
    monkeypatch.setattr(torch, "empty", on_host)
    answers = []
    for asked in (0.0, 2.0, 0.0):
        answers.append(flag.read(torch.tensor(asked).as_subclass(OnGpu)))
        # The copy of this step's value is not complete yet.
        assert not hasattr(flag._previous[1], "has_waited")
    assert answers == [False, False, True]
    assert locked == [True] * 3 and event.waited == 2


def test_batches_are_locked_and_sent_without_waiting_one_ahead():
    sent = []

    class Batch:
        def pin_memory(self):
            self.locked = True
            return self

        def to(self, device, non_blocking):
            sent.append((device, self.locked, non_blocking))
            return self

    step_batches = [SimpleNamespace(micro_batches=[(Batch(), Batch())]) for _ in range(3)]
    for number, step_batch in enumerate(data.copy_ahead(iter(step_batches), GPU), 1):
        assert step_batch is step_batches[number - 1]
        assert len(sent) == 2 * min(number + 1, 3)
    assert set(sent) == {(GPU, True, True)}


@pytest.mark.parametrize(
    "capability, asked, chosen",
    [((7, 0), "auto", "fp16"), ((8, 0), "auto", "bf16"), ((7, 5), "bf16", None)],
)
def test_precision_on_a_gpu(monkeypatch, capability, asked, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    if chosen is None:
        with pytest.raises(UserError, match="Tesla T4"):
            devices.choose_precision(asked, GPU)
    else:
        assert devices.choose_precision(asked, GPU) == chosen


@pytest.mark.parametrize("others, status", [(GB, checks.OK), (30 * GB, checks.WARNING)])
def test_check_shows_the_gpu_and_who_holds_it(monkeypatch, others, status):
    Memory(monkeypatch, outside=others)
    gpu = SimpleNamespace(name="NVIDIA A100", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    line = checks._gpu(None, SimpleNamespace(device=GPU, precision="bf16"))
    assert line.status == status and "compute capability 8.0" in line.text
