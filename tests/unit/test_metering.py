"""What a step's time includes (no saves, evaluations, or measuring memory); where it is logged; the
peak rates of devices.
"""

import resource
import time
from resource import RLIMIT_FSIZE as FSIZE
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from conftest import PROJECT
from torch.utils._python_dispatch import TorchDispatchMode

from distributed_training import process
from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.records.metrics_file import PHASES, MetricsFile
from distributed_training.records.metrics_reader import cut_at, read_metrics
from distributed_training.run import step_meter
from distributed_training.run.step_log import LogOptions, StepLog
from distributed_training.run.step_meter import StepMeter
from distributed_training.run.trackers import Tracker, Trackers
from distributed_training.train_state import TrainState
from distributed_training.workload.peak_flops import PEAKS, find, find_by_short_name, peak_flops

STEPS, COMPUTE, LOG, PAUSE = 12, 1.0, 0.5, 100.0  # steps, and seconds


class Clock:
    """A clock that only work moves."""

    now = 0.0

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    read = lambda: clock.now  # noqa: E731
    monkeypatch.setattr(step_meter, "time", SimpleNamespace(perf_counter=read))
    return clock


def open_log(tmp_path, clock, device="cpu", logging_steps=1) -> StepLog:
    """The log of `STEPS` steps whose tracker takes `LOG` seconds a record, and StepMemory `PAUSE`."""
    place = SimpleNamespace(type=device)
    ctx = SimpleNamespace(device=place, is_main=True, simulated=False, precision="fp32")
    step_memory, trackers = MagicMock(slows_down=False), MagicMock()
    for name in ("begin", "mark", "after_backward", "end"):
        getattr(step_memory, name).side_effect = lambda *_: clock.work(PAUSE)
    trackers.log.side_effect = lambda record: clock.work(LOG)
    memory = MagicMock(device=torch.device("cpu"))
    return StepLog(
        ctx,
        state=TrainState(total_steps=STEPS, num_sequences=2 * STEPS, global_batch=2),
        meter=StepMeter(memory, step_memory, MagicMock(), 0, STEPS),
        file=MetricsFile(tmp_path / "metrics.jsonl"),
        trackers=trackers,
        trace=None,
        draw_losses=None,
        at_end=[],
        options=LogOptions(logging_steps, streaming=False, targets=None),
    )


def train(log, clock, steps: int) -> None:
    for _ in range(steps):
        for phase in PHASES:
            clock.work(COMPUTE / 4)
            log.meter.mark(phase)
            if phase == "backward":
                log.meter.after_backward()
        log.state.advance()
        log.log_step(torch.ones(()), 0.1, None, torch.tensor(16))


def test_throughput_includes_the_log_and_excludes_pauses(tmp_path, clock):
    """The last step is the one whose memory is measured; its log is in no step."""
    log = open_log(tmp_path, clock)
    log.start_epoch()
    train(log, clock, 7)
    clock.work(PAUSE)  # a save
    log.meter.pause()
    train(log, clock, 2)
    log.flush()  # a checkpoint asks for them
    clock.work(PAUSE)  # an evaluation in the middle of an epoch
    log.start_epoch()
    train(log, clock, STEPS - 9)
    each = [COMPUTE] + [COMPUTE + LOG] * (STEPS - 1)  # nothing was logged before the first
    assert [sum(step.values()) for step in log.meter.steps] == pytest.approx(each)
    speed = log.meter.speed([(2, 16)] * STEPS)
    assert speed["warmup_steps_excluded"] == 3
    assert speed["tokens_per_second"] == pytest.approx(16 / (COMPUTE + LOG))
    assert speed["step_seconds"]["median"] == pytest.approx(COMPUTE + LOG)
    assert sum(speed["step_phases_seconds"].values()) == pytest.approx(COMPUTE + LOG)
    assert speed["step_phases_seconds"]["data"] == pytest.approx(COMPUTE / 4 + LOG)
    assert log.state.training_seconds == pytest.approx(sum(each))


def test_the_time_to_the_first_step_ends_with_it(tmp_path, clock, monkeypatch):
    """The steps are read together, 2 s and a half after the start of the first one."""
    monkeypatch.setattr(process, "age", lambda: 100 + clock.now)
    log = open_log(tmp_path, clock, logging_steps=STEPS)
    log.start_epoch()
    train(log, clock, 3)
    log.flush()
    assert log.meter.seconds_to_first_step == pytest.approx(101, abs=LOG)


def test_the_age_of_a_process_does_not_depend_on_the_clock(monkeypatch):
    expected = time.time() - psutil.Process().create_time()
    monkeypatch.setattr(time, "time", lambda: 0)
    assert process.age() == pytest.approx(expected, abs=2)
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert 0 < process.age() < expected + 2


def test_no_duration_is_of_a_clock_that_can_be_set():
    """One name of a folder has the time of day."""
    files = [*(PROJECT / "distributed_training").rglob("*.py"), *(PROJECT / "tools").rglob("*.py")]
    files.append(PROJECT / "real_model_example.py")
    found = {file.name for file in files if "time.time()" in file.read_text(encoding="utf-8")}
    assert found == {"export.py"}


class Reads(TorchDispatchMode):
    """Counts the operations that make the host wait for a number on the device."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_numbers_of_the_steps_are_read_together(tmp_path, clock):
    """Ten steps are logged at once, with a norm as PyTorch computes it or as DeepSpeed returns it."""
    log = open_log(tmp_path, clock, "cuda", logging_steps=10)  # on a CPU each step is read
    log.start_epoch()
    norms = [torch.tensor(0.1, dtype=torch.float64), torch.tensor([2.0]), 3.0, None]
    with Reads() as reads:
        for step in range(11):
            for phase in PHASES:
                log.meter.mark(phase)
            log.state.advance()
            norm = norms[step % len(norms)]
            log.log_step(torch.tensor(0.1 * step), 0.1, norm, torch.tensor(16.0))
        log.flush()
    assert reads.number == 0
    records, _ = read_metrics(log.file.path)
    assert [record["loss"] for record in records] == [
        torch.tensor(0.1 * n).item() for n in range(11)
    ]
    assert [record["grad_norm"] for record in records[:4]] == [0.1, 2.0, 3.0, None]
    assert log.state.tokens == 11 * 16


@pytest.mark.parametrize(
    "name, precision, fp32_in, tflops",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", "high", 989.4),
        ("NVIDIA A100 80GB PCIe", "fp32", "high", 156),
        ("NVIDIA A100-SXM4-80GB", "fp32", "highest", 19.5),  # without TF32
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", "high", None),
        ("AMD Instinct MI250X", "bf16", "high", 191.5),
        (None, "fp32", "high", None),  # a CPU
    ],
)
def test_peak_of_a_device(monkeypatch, name, precision, fp32_in, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: fp32_in)
    found = peak_flops(torch.device("cuda" if name else "cpu"), precision)
    assert found == (tflops and pytest.approx(tflops * 1e12))


def test_steps_before_an_evaluation_are_logged_before_it(tmp_path, clock):
    """A GPU's losses wait for a logged line, and trackers drop a step that comes too late."""
    log = open_log(tmp_path, clock, "cuda", logging_steps=10)
    log.start_epoch()
    train(log, clock, steps=4)
    log.start_evaluation()
    log.log_evaluation(1.0)
    train(log, clock, steps=2)
    log.flush()
    logged = [call.args[0] for call in log.trackers.log.call_args_list]
    assert [record["step"] for record in logged] == [1, 2, 3, 4, 4, 5, 6]
    assert "eval_loss" in logged[4]


def test_lines_that_do_not_fit_on_a_full_disk_are_written_later(tmp_path, capsys):
    """Also a line of which a part was written; a file-size limit stands in for a full disk."""
    file, no_limit = MetricsFile(tmp_path / "metrics.jsonl"), resource.getrlimit(FSIZE)
    try:
        resource.setrlimit(FSIZE, (30, no_limit[1]))
        for number in range(1, 5):
            file.append({"step": number, "loss": 1.0})
    finally:
        resource.setrlimit(FSIZE, no_limit)
    assert capsys.readouterr().out.count("cannot be written") == 1
    assert read_metrics(file.path) == ([{"step": 1, "loss": 1.0}], [])
    file.append({"step": 5, "loss": 1.0})
    assert [record["step"] for record in read_metrics(file.path)[0]] == [1, 2, 3, 4, 5]


def test_a_tracker_that_cannot_start_on_a_full_disk_ends_nothing(capsys, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distributed_training.run.trackers.tensorboard", fail)
    settings = parse_arguments(["--report_to", "tensorboard"])
    trackers = Trackers(settings.output, settings.flags(), tmp_path, step=0)
    trackers.log({"step": 1, "loss": 2.0})
    trackers.close()
    assert capsys.readouterr().out.count("No space left") == 1


def test_tensorboard_shows_a_repeated_evaluation_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings, file = parse_arguments(["--report_to", "tensorboard"]), tmp_path / "metrics.jsonl"

    def run(start, *records):
        trackers = Trackers(settings.output, settings.flags(), tmp_path, step=start)
        for record in records:
            trackers.log(record)
            MetricsFile(file).append(record)
        trackers.close()

    steps = [{"step": step, "loss": 1.0 + step, "lr": 0.5} for step in range(1, 5)]
    run(0, *steps[:2], {"step": 2, "eval_loss": 9.0}, steps[2])
    cut_at(file, 2)
    run(2, {"step": 2, "eval_loss": 9.0}, *steps[2:])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for curve, expected in (("eval/loss", [2]), ("train/loss", [1, 2, 3, 4])):
        assert [event.step for event in events.Scalars(curve)] == expected


def test_a_resume_hides_tensorboards_points_of_discarded_steps(tmp_path):
    """Also in its default loader, in which only a point removes the later ones of its curve."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    settings, file = parse_arguments(["--report_to", "tensorboard"]), tmp_path / "metrics.jsonl"

    def run(start, *records):
        trackers = Trackers(settings.output, settings.flags(), tmp_path, step=start)
        for record in records:
            trackers.log(record)
            MetricsFile(file).append(record)
        trackers.close()

    steps = [{"step": step, "loss": 1.0 + step} for step in range(1, 6)]
    evaluated = [{"step": step, "eval_loss": 9.0} for step in (2, 3, 5)]
    run(0, *steps[:2], evaluated[0], steps[2], evaluated[1], *steps[3:], evaluated[2])
    run(3)  # repeats the evaluation of step 3 later
    folder, default = tmp_path / "tensorboard", {}
    for path in sorted(folder.iterdir(), key=lambda path: path.name.rsplit(".")[-1]):
        for event in loader.LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                kept = [step for step in default.get(value.tag, []) if step < event.step]
                default[value.tag] = [*kept, event.step]
    events = accumulator.EventAccumulator(str(folder)).Reload()
    for curve, expected in (("eval/loss", [2]), ("train/loss", [1, 2, 3])):
        assert [event.step for event in events.Scalars(curve)] == expected == default[curve]


def test_generated_texts_are_logged_without_secrets(tmp_path, clock, monkeypatch):
    monkeypatch.setenv("MY_KEY", "the-canary-of-my-key")
    log = open_log(tmp_path, clock)
    log.log_generated([{"prompt": "The", "text": "The the-canary-of-my-key"}])
    [record], _ = read_metrics(tmp_path / "metrics.jsonl")
    assert record == {"step": 0, "generated": [{"prompt": "The", "text": "The ***"}]}
    log.trackers.log.assert_called_once_with(record)
    texts = []
    settings = parse_arguments([])
    trackers = Trackers(settings.output, settings.flags(), tmp_path, step=0)
    trackers.started["working"] = Tracker(None, lambda *entry: texts.append(entry), None)
    trackers.log(record)
    assert texts == [(0, record["generated"])]


def test_a_resume_repeats_an_evaluation_and_its_texts(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    kept = [{"step": 1, "eval_loss": 2.0}, {"step": 1, "generated": []}, {"step": 2, "loss": 2.0}]
    file.append(*kept, {"step": 2, "eval_loss": 2.0}, {"step": 2, "generated": []})
    cut_at(file.path, 2)
    assert read_metrics(file.path) == (kept, [])


def test_a_failing_tracker_is_dropped_with_one_notice(capsys, tmp_path):
    points = []

    def fail(*_):
        raise OSError(28, "No space left on device")

    settings = parse_arguments([])
    trackers = Trackers(settings.output, settings.flags(), tmp_path, step=0)
    trackers.started["broken"] = Tracker(fail, fail, fail)
    trackers.started["working"] = Tracker(lambda *point: points.append(point), fail, fail)
    for step in (1, 2):
        trackers.log({"step": step, "loss": 2.0})
    assert points == [(1, {"train/loss": 2.0}), (2, {"train/loss": 2.0})]
    assert capsys.readouterr().out.count("No space left") == 1


@pytest.mark.parametrize(
    "name, half, tf32, fp32",
    [
        # The same as NVIDIA's whitepapers say of these cards.
        ("NVIDIA GeForce RTX 3070", 40.6, 20.3, 20.3),
        ("NVIDIA GeForce RTX 4080", 97.5, 48.7, 48.7),
        ("NVIDIA GeForce RTX 4070 Ti", 80.2, 40.1, 40.1),
        ("NVIDIA GeForce RTX 5080", 112.6, 56.3, 56.3),
        ("NVIDIA GeForce RTX 5070", 61.7, 30.9, 30.9),
        ("NVIDIA GeForce RTX 2080", 40.3, None, 10.1),
        ("NVIDIA RTX A5000", 111.1, 55.6, 27.8),
        ("NVIDIA RTX A2000 12GB", 32, 16, 8),
        ("NVIDIA RTX 5000 Ada Generation", 261.1, 130.6, 65.3),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9, 219.4, 110),
        ("NVIDIA B300 SXM6 AC", 2250, 1125, 75),
        ("NVIDIA GB200", 2500, 1250, 80),
        ("NVIDIA H20", 148, 74, 44),
        # Several numbers of cores, other clocks, or a part of a GPU.
        ("NVIDIA GeForce RTX 3080", None, None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, None),
        ("NVIDIA GeForce RTX 4090 D", None, None, None),
        ("NVIDIA H20 MIG 1g.12gb", None, None, None),
    ],
)
def test_peak_rates_of_more_devices(name, half, tf32, fp32):
    peak = find(name)
    found = (peak.half, peak.tf32, peak.fp32) if peak else ()
    assert [rate or 0 for rate in found] == pytest.approx(
        [rate or 0 for rate in (half, tf32, fp32) if half], rel=5e-3
    )


def test_each_name_of_a_device_has_one_entry():
    names = [peak.name for peak in PEAKS]
    assert len({*names}) == len(names)


def test_devices_by_their_short_names():
    names = {"a100": 312, "A100-SXM4-80GB": 312, "rtx 4090": 165.2, "MI250X": 191.5}
    for name, half in names.items():
        assert find_by_short_name(name).half == pytest.approx(half)
    for name, known in {"H100": "H100 PCIe", "Z80": "A100", "V100": "V100S"}.items():
        with pytest.raises(UserError, match=f"{name}.*{known}"):
            find_by_short_name(name)
