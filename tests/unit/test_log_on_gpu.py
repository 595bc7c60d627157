"""The log of a run on a GPU: when the host waits for the numbers of a step, and what it then logs.

A stand-in for CUDA counts kernels, events and copies in the order of their launch. It shows when
the host waits, not that a GPU is never idle; tools/benchmarks/gpu_check.sh does.
"""

import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import real_model_example as program
from distributed_training import process
from distributed_training.checkpoints.manager import CheckpointManager
from distributed_training.errors import NotFinite
from distributed_training.pending_copy import PendingCopy
from distributed_training.records.metrics_file import PHASES, MetricsFile
from distributed_training.records.metrics_reader import read_metrics
from distributed_training.run import step_log, step_meter
from distributed_training.run.step_log import LogOptions, StepLog
from distributed_training.run.step_meter import StepMeter
from distributed_training.train_state import TrainState

EPOCH, TOTAL, LOGGED = 8, 12, 3  # steps of an epoch, of the run, and between two lines


class Stream:
    """What the host has launched, and how far the GPU has come; `seconds` are those of its work."""

    def __init__(self):
        self.launched, self.ended, self.seconds = 0, 0, 0.0
        self.waits = []  # for each wait, the number of what had to end

    def launch(self) -> int:
        self.launched += 1
        return self.launched

    def wait(self, number: int) -> None:
        self.waits.append(number)
        self.ended = max(self.ended, number)


@pytest.fixture
def gpu(monkeypatch):
    stream = Stream()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.number, self.at = stream.launch(), stream.seconds

        def synchronize(self):
            stream.wait(self.number)

        def elapsed_time(self, end):
            assert end.number <= stream.ended, "CUDA raises an error: the event is not complete"
            return 1000 * (end.at - self.at)

    class Copy:
        def __init__(self, tensor):
            self.number, self.tensor = stream.launch(), tensor.clone()

        def read(self):
            stream.wait(self.number)
            return self.tensor

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("waits for the whole GPU"))
    monkeypatch.setattr(step_log, "PendingCopy", Copy)
    on_cpu = SimpleNamespace(perf_counter=lambda: stream.seconds)
    monkeypatch.setattr(step_meter, "time", on_cpu)
    return stream


def open_log(folder, device) -> StepLog:
    folder.mkdir()
    ctx = SimpleNamespace(device=torch.device(device), is_main=True, simulated=False)
    ctx.precision, memory = "fp32", MagicMock(device=torch.device(device))
    log = StepLog(
        ctx,
        state=TrainState(total_steps=TOTAL, num_sequences=2 * EPOCH, global_batch=2),
        meter=StepMeter(memory, MagicMock(slows_down=False), MagicMock(), 0, TOTAL),
        file=MetricsFile(folder / "metrics.jsonl"),
        trackers=None,
        trace=None,
        draw_losses=None,
        at_end=[],
        options=LogOptions(LOGGED, streaming=False, targets=None),
    )
    log.cut()  # an empty metrics.jsonl
    return log


def make_step(log, gpu, loss=None) -> None:
    """Train a step, each with a loss, a rate, a norm, tokens and seconds of its own."""
    state = log.state
    for number, phase in enumerate(PHASES, 1):
        gpu.launch()
        gpu.seconds += 0.25 * (state.step + number)
        log.meter.mark(phase)
    state.advance()
    loss = torch.tensor(loss or 1 / state.step)
    norm = (torch.tensor(0.5 + state.step), 2.5, None)[state.step % 3]
    log.log_step(loss, 0.1 / state.step, norm, torch.tensor(10.0 + state.step))


def steps_in(log) -> list[int]:
    return [record["step"] for record in read_metrics(log.file.path)[0]]


def lines_of(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line]


def test_a_line_is_copied_at_its_step_and_read_behind_the_next_one(tmp_path, gpu, capsys):
    """Steps 1, 4 and 7 are logged, and with step 8 the epoch is complete."""
    log = open_log(tmp_path / "run", "cuda")
    log.start_epoch()
    logged, ends = [], [0]
    for step in range(1, EPOCH + 1):
        gpu.waits.clear()
        make_step(log, gpu)
        if step == EPOCH:
            break
        ends.append(gpu.launched)
        # Nothing of the step whose kernels were launched last, at which the GPU still computes.
        assert all(number <= ends[step - 1] for number in gpu.waits)
        assert bool(gpu.waits) == (step % LOGGED == 2)  # not at the steps 1, 4 and 7 themselves
        logged.append(steps_in(log))
    of_1, of_4 = [1], [1, 2, 3, 4]
    assert logged == [[], of_1, of_1, of_1, of_4, of_4, of_4]
    assert steps_in(log) == [*range(1, EPOCH + 1)]
    shown = [line for line in lines_of(capsys) if "Batch" in line]
    assert [line.split(" | ")[1] for line in shown] == [f"Batch {n}/8" for n in (0, 3, 6, 7)]
    assert "Loss: 0.2500 | LR: 2.50e-02" in shown[1]  # those of step 4, although read at step 5


def skip(log) -> None:
    log.state.skip()
    log.log_skipped()


COMPLETING = {
    "a save": lambda log: log.flush(),
    "an evaluation": lambda log: log.start_evaluation(),
    "an evaluation without sequences": lambda log: log.say_nothing_to_evaluate(),
    "other shares": lambda log: log.log_shares({"step": log.state.step}, "shares"),
    "a skipped step": skip,
}


@pytest.mark.parametrize("steps", [1, 3, 4, 5])
@pytest.mark.parametrize("case", COMPLETING)
def test_what_needs_complete_counters_completes_them(tmp_path, gpu, capsys, case, steps):
    """Whether the numbers of the last line are on their way, and whether steps follow it."""
    log = open_log(tmp_path / "run", "cuda")
    log.start_epoch()
    for _ in range(steps):
        make_step(log, gpu)
    COMPLETING[case](log)
    assert [*dict.fromkeys(steps_in(log))] == [*range(1, steps + 1)]
    assert log.state.last_loss == pytest.approx(1 / steps)
    assert log.state.tokens == sum(10 + step for step in range(1, steps + 1))
    assert len(log.meter.steps) == len(log.work) == steps
    lines = lines_of(capsys)
    assert sum("Batch" in line for line in lines) == 1 + (steps > LOGGED)
    if case not in ("a save", "an evaluation"):  # which print a line of their own
        assert "Batch" not in lines[-1]


def run_on(device, folder, gpu, monkeypatch) -> tuple[StepLog, list[dict]]:
    """Train 12 steps with an evaluation, a change of the shares, a skipped step and a pause."""
    gpu.seconds = 0.0
    monkeypatch.setattr(process, "age", lambda: 100 + gpu.seconds)
    log = open_log(folder, device)
    gpu.seconds += 40  # loads the model
    log.start_epoch()
    while not log.state.finished:
        make_step(log, gpu)
        if log.state.step == 4:
            log.log_shares({"step": 4, "rank_sequences": [3, 1]}, "shares")
        if log.state.step == 5:
            skip(log)
        if log.state.step in (7, EPOCH):
            log.start_evaluation()
            gpu.seconds += 1000
            log.log_evaluation(0.5)
            log.start_epoch()
        if log.state.step == 10:
            log.say_nothing_to_evaluate()
            log.start_epoch()
    log.flush()
    return log, read_metrics(log.file.path)[0]


def test_a_run_on_a_gpu_logs_what_it_would_log_at_once(tmp_path, gpu, capsys, monkeypatch):
    on_cpu, expected = run_on("cpu", tmp_path / "cpu", gpu, monkeypatch)
    lines = lines_of(capsys)
    on_gpu, records = run_on("cuda", tmp_path / "gpu", gpu, monkeypatch)
    assert len(records) == TOTAL - 1 + 3  # one step was skipped
    assert records == expected
    assert lines_of(capsys) == lines
    assert on_gpu.state == on_cpu.state
    assert on_gpu.meter.steps == on_cpu.meter.steps
    assert on_gpu.meter.seconds_to_first_step == on_cpu.meter.seconds_to_first_step == 142.5
    assert on_gpu.work == on_cpu.work
    assert on_gpu.meter.speed(on_gpu.work) == on_cpu.meter.speed(on_cpu.work)


@pytest.mark.parametrize("wrong", [1, 4, EPOCH])
def test_a_loss_that_is_not_finite_ends_the_run_one_step_after_its_line(tmp_path, gpu, wrong):
    """At once in the last step of an epoch, behind which an evaluation may come."""
    log = open_log(tmp_path / "run", "cuda")
    log.start_epoch()
    for _ in range(1, wrong):
        make_step(log, gpu)
    if wrong < EPOCH:
        make_step(log, gpu, loss=math.nan)
    with pytest.raises(NotFinite, match=f"nan at step {wrong}:"):
        make_step(log, gpu, loss=math.nan)
    assert steps_in(log) == [*range(1, wrong)]


@pytest.mark.parametrize("ending", ["save", "stop"])
@pytest.mark.parametrize("wrong", [4, 5])
def test_no_checkpoint_contains_the_update_of_a_loss_that_is_not_finite(
    tmp_path, gpu, wrong, ending
):
    """Neither of a step with a line nor of one without; the save is that of the same step."""
    log = open_log(tmp_path / "run", "cuda")
    log.start_epoch()
    for step in range(1, wrong + 1):
        make_step(log, gpu, loss=math.nan if step == wrong else None)
    run = MagicMock(log=log, state=log.state, meter=log.meter)
    run.manager.is_due.return_value = ending == "save"
    run.stop = lambda: program.Run.stop(run)
    with pytest.raises(NotFinite, match=f"at step {wrong}:"):
        program.save_or_stop(run, torch.ones(()))
    assert not run.manager.save.called and not run.manager.save_before_stop.called


# ------------------------------------------------------------------------------ copies to the host


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def stream(monkeypatch):
    """The stream of copies to pinned memory, which have arrived when their event is waited for."""
    stream = Stream()

    class Pinned:
        def copy_(self, source, non_blocking):
            assert non_blocking
            self.number, self.value = stream.launch(), source.as_subclass(torch.Tensor).clone()

        def item(self):
            assert self.number <= stream.ended, "the copy has not arrived"
            return self.value.item()

    def new(tensor, device, pin_memory):
        assert device == "cpu" and pin_memory
        return Pinned()

    def record():
        number = stream.launch()
        return SimpleNamespace(synchronize=lambda: stream.wait(number))

    monkeypatch.setattr(torch, "empty_like", new)
    on_device = SimpleNamespace(record_event=record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: on_device)
    return stream


def scalar(value: float, on_gpu: bool = True) -> torch.Tensor:
    tensor = torch.tensor(value)
    return tensor.as_subclass(OnGpu) if on_gpu else tensor


def test_the_host_waits_for_a_copy_only_when_it_reads_it(stream):
    first, second = PendingCopy(scalar(3.0)), PendingCopy(scalar(4.0))
    assert stream.waits == []
    assert first.read().item() == 3.0
    assert stream.waits == [2]  # its own event, not that of the second copy
    assert second.read().item() == 4.0
    on_cpu = scalar(5.0, on_gpu=False)
    assert PendingCopy(on_cpu).read() is on_cpu


def new_manager(may_save: bool) -> CheckpointManager:
    output = SimpleNamespace(no_save=not may_save)
    return CheckpointManager(MagicMock(), MagicMock(), MagicMock(), output, False, {})


def test_a_stop_is_seen_one_step_later_on_a_gpu(stream):
    requests = [0.0, 2.0, 0.0]
    manager = new_manager(may_save=True)
    assert manager.may_save
    assert [manager.stop_requested(scalar(n)) for n in requests] == [False, False, True]
    assert stream.waits == [2, 4]  # for the event of each step but the last
    manager = new_manager(may_save=True)
    found = [manager.stop_requested(scalar(n, on_gpu=False)) for n in requests]
    assert found == [False, True, False]
    launched, manager = stream.launched, new_manager(may_save=False)
    assert not any(manager.stop_requested(scalar(n)) for n in (2.0, 2.0))
    assert stream.launched == launched  # nothing is copied
