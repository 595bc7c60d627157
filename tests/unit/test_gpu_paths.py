"""Lines that only a GPU runs, with torch.cuda's functions replaced: which of them are called, when,
and with what.

None of this shows that a GPU does what is asked for; benchmarks/gpu_check.sh does.
"""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from support.cluster.tuning import choose_precision
from support.data.batches import copy_ahead
from support.errors import UserError
from support.report.step_meter import StepMeter
from support.units import PHASES

GPU = torch.device("cuda", 0)


def test_phases_of_a_step_are_timed_by_the_gpu_without_waiting_for_it(monkeypatch):
    clock, waits = SimpleNamespace(milliseconds=0.0), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.milliseconds

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    timer = StepMeter(MagicMock(device=GPU), MagicMock(), MagicMock(), 0, measured_step=9)
    timer.pause()
    for step in range(1, 4):
        for number, phase in enumerate(PHASES, 1):
            clock.milliseconds += 1000 * step * number
            timer.mark(phase)
        timer.end_step()
    assert waits == []
    timer.read()
    assert waits == [1]
    seconds = [list(step.values()) for step in timer.steps]
    assert seconds == [[n, 2 * n, 3 * n, 4 * n] for n in (1, 2, 3)]


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
    for number, step_batch in enumerate(copy_ahead(iter(step_batches), GPU), 1):
        assert step_batch is step_batches[number - 1]
        assert len(sent) == 2 * min(number + 1, 3)
    assert set(sent) == {(GPU, True, True)}


def test_precision_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    for capability, chosen in (((7, 5), "fp16"), ((8, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        assert choose_precision("auto", GPU) == chosen
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(UserError, match="Tesla T4"):
        choose_precision("bf16", GPU)
