"""What a step's time includes: everything between two updates except saves, evaluations, and measuring memory."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from support import metering

STEPS, COMPUTE, LOG, PAUSE = 12, 1.0, 0.5, 100.0  # steps, and seconds


class Clock:
    """A clock that only work moves."""

    def __init__(self):
        self.now = 0.0

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    read = lambda: clock.now  # noqa: E731
    monkeypatch.setattr(metering, "time", SimpleNamespace(perf_counter=read, time=read))
    monkeypatch.setattr(metering, "Traffic", MagicMock())
    return clock


def open_meter(tmp_path, clock, bar=False, **flags) -> metering.Meter:
    """One of `STEPS` steps in an epoch, whose tracker takes `LOG` seconds for a record, and StepMemory `PAUSE`."""
    args = SimpleNamespace(early_stopping_patience=None, seq_length=8, batch_size=2, gradient_accumulation_steps=1,
                           logging_steps=1, eval=True, eval_every=None, streaming=False, **flags)  # fmt: skip
    run = SimpleNamespace(device=torch.device("cpu"), is_main=True, simulated=False, world_size=1, say=lambda text: None,
                          gather=lambda value: [value], bar=lambda *a, **k: MagicMock(active=bar))  # fmt: skip
    before = {"step": 0, "samples": 0, "tokens": 0, "training_seconds": 0.0}
    before |= dict.fromkeys(("best", "first_loss", "last_loss"))
    step_memory = MagicMock(slows_down=False)
    for name in ("begin", "mark", "after_backward", "end"):
        getattr(step_memory, name).side_effect = lambda *_: clock.work(PAUSE)
    footprint = MagicMock()
    footprint.device_bytes.return_value = {"allocated": 2**30}
    meter = metering.Meter(args, run, tmp_path, STEPS, 2 * STEPS, before, footprint, step_memory)
    meter.trackers = MagicMock(active=False)
    meter.trackers.log.side_effect = lambda record: clock.work(LOG)
    return meter


def train(meter, clock, steps: int) -> None:
    for _ in range(steps):
        for phase in metering.PHASES:
            clock.work(COMPUTE / 4)
            meter.mark(phase)
            if phase == "backward":
                meter.after_backward()
        meter.end_step(torch.ones(()), 0.1, None, torch.tensor(16))


def test_throughput_includes_the_log_and_excludes_pauses(tmp_path, clock):
    """The last step is the one whose memory is measured; its log is in no step."""
    meter = open_meter(tmp_path, clock)
    meter.start_epoch(1)
    train(meter, clock, 7)
    clock.work(PAUSE)  # a save
    meter.restart_clock()
    train(meter, clock, 2)
    meter.counters()  # a checkpoint asks for them
    clock.work(PAUSE)  # an evaluation in the middle of an epoch
    meter.start_epoch(1)
    train(meter, clock, STEPS - 9)
    each = [COMPUTE] + [COMPUTE + LOG] * (STEPS - 1)  # nothing was logged before the first
    assert [sum(step.values()) for step in meter.timer.steps] == pytest.approx(each)
    speed = meter.speed()
    assert speed["warmup_steps_excluded"] == 3
    assert speed["tokens_per_second"] == pytest.approx(16 / (COMPUTE + LOG))
    assert speed["step_seconds"]["median"] == pytest.approx(COMPUTE + LOG)
    assert sum(speed["step_phases_seconds"].values()) == pytest.approx(COMPUTE + LOG)
    assert speed["step_phases_seconds"]["data"] == pytest.approx(COMPUTE / 4 + LOG)
    assert meter.counters()["training_seconds"] == pytest.approx(sum(each))


def test_a_trace_is_no_part_of_a_step(tmp_path, clock):
    meter = open_meter(tmp_path, clock)
    meter.trace = MagicMock()
    meter.trace.end_step.side_effect = lambda: clock.work(PAUSE)
    meter.start_epoch(1)
    train(meter, clock, 4)
    assert [sum(step.values()) for step in meter.timer.steps] == pytest.approx([COMPUTE] + [COMPUTE + LOG] * 3)


def test_memory_is_read_where_a_line_is_logged(tmp_path, clock):
    meter = open_meter(tmp_path, clock, bar=True)
    meter.args.logging_steps = 5
    meter.start_epoch(1)
    train(meter, clock, STEPS)
    assert meter.footprint.device_bytes.call_count == 4  # after the steps 1, 6, 11, and the last
    shown = [call.args[0] for call in meter._bar.show.call_args_list]
    assert len(shown) == STEPS and all("1.00 GB" in text for text in shown)
