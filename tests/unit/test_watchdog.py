"""The watchdog, hang reports, the meeting of the ranks, stop signals."""

import contextlib
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch.distributed as dist
from one_rank import one_rank

from distributed_training import process
from distributed_training.errors import (
    OutOfMemory,
    Stopped,
    StoppedBySignal,
    TrainingError,
    UserError,
    explain,
)
from distributed_training.ranks import (
    comm_volume,
    failures,
    meeting,
    process_group,
    rank_states,
    watchdog,
)
from distributed_training.ranks.failures import FailureMonitor
from distributed_training.ranks.hang_report import diagnosis
from distributed_training.ranks.launch import Launch
from distributed_training.ranks.restart import Restart
from distributed_training.ranks.stop import StopSignal
from distributed_training.train_state import TrainState


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """The watchdogs of two ranks in this process, which share a store."""
    # torch registers the functions that count collectives once in a process, and not per rank.
    monkeypatch.setattr(comm_volume.Traffic, "start", lambda self: None)
    store = dist.HashStore()
    dogs = [watchdog.Watchdog(rank, 2, store) for rank in (0, 1)]
    for dog in dogs:
        dog.start(hang_seconds=60)
        dog.files.write_to(tmp_path)
    yield dogs
    for dog in dogs:
        dog.files.close()


def rounds(dogs, number: int) -> bool:
    """Let ranks look `number` times; return whether one of them found an error."""
    found = [dog.look() for _ in range(number) for dog in dogs]
    return any(found)


@pytest.mark.parametrize("status", [psutil.STATUS_STOPPED, psutil.STATUS_RUNNING])
def test_a_rank_that_stops_answering_is_reported_in_time(ranks, monkeypatch, status):
    """Unless it computes: its main thread may hold Python's lock for minutes."""
    monkeypatch.setattr(psutil.Process, "status", lambda _: status)
    assert not rounds(ranks, 100)
    assert not rounds(ranks[:1], rank_states.SILENT_ROUNDS)
    if status == psutil.STATUS_RUNNING:
        assert not rounds(ranks[:1], 100)
    else:
        with pytest.raises(TrainingError, match="Rank 1 ended without"):
            rounds(ranks[:1], 2)


def test_ranks_that_do_not_answer_while_this_one_stops(ranks):
    rounds(ranks, 1)
    assert ranks[0].states.silent_ranks(0.2) == [1]
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ranks[0].states.silent_ranks, 5)
        time.sleep(0.2)
        rounds(ranks[1:], 1)
        assert answer.result() == []
    assert ranks[1].states.silent_ranks(5) == []  # rank 0 stops


def test_a_store_that_has_ended_is_reported(ranks, monkeypatch):
    def end(*_):
        raise dist.DistStoreError("Connection reset")

    monkeypatch.setattr(ranks[1].states, "store", SimpleNamespace(set=end))
    with pytest.raises(TrainingError, match="Rank 0 ended without reporting"):
        ranks[1].look()


def test_an_error_of_another_rank_is_its_own_to_report(ranks):
    ranks[0].states.store.set("failure", "an error")
    assert rounds(ranks[:1], 1)


# ------------------------------------------------------------------------------ the hang report


def states(*collectives: tuple[int, str], step: int | None = 1) -> dict[int, dict]:
    return {
        rank: {"number": number, "collective": name, "step": step}
        for rank, (number, name) in enumerate(collectives)
    }


@pytest.mark.parametrize(
    "states, says",
    [
        (states((6, "a"), (7, "b"), (5, "a")), "Ranks 0, 2 did not start collective 7 (b)"),
        (states((7, "a"), (7, "b")), "differ in collective 7: rank 0 in a, rank 1 in b"),
        (states((7, "a"), (7, "a")), "wait in collective 7"),
        (states((7, "a"), (7, "a"), step=None), ""),  # a rank prepares the data
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(states, says):
    found = diagnosis(states)
    assert says in found and bool(says) == bool(found)


def reports(folder) -> list[str]:
    file = folder / "hang" / "report.txt"
    return file.read_text().split("Hang report of ")[1:] if file.exists() else []


def test_one_rank_reports_a_collective_that_waits(ranks, tmp_path, monkeypatch, capsys):
    for dog, number in zip(ranks, (5, 4), strict=True):
        dog.traffic.number = number
        dog.expect_steps(TrainState(10, 10, step=3))
    rounds(ranks, 2)
    assert reports(tmp_path) == []  # within the 60 seconds that are allowed
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 61, strftime=time.strftime)
    monkeypatch.setattr(watchdog, "time", later)
    rounds(ranks, 3)
    [report] = reports(tmp_path)
    assert "Rank 1 did not start collective 5" in report and f" {os.getpid()} " in report
    assert capsys.readouterr().out.count("Rank 1 did not start") == 1


# ---------------------------------------------------------------------- the meeting of the ranks


def test_missing_ranks_are_named(monkeypatch, capsys):
    """After some seconds by a line; at the end by the error of the first of the others."""

    monkeypatch.setattr(meeting, "NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(meeting, "exit_now", sys.exit)
    store = dist.HashStore()

    def meet(rank: int) -> BaseException | None:
        launch = Launch("torchrun", rank, rank, 4, 4, 0, "a", 29500)
        return meeting.meet(store, launch, 0.5, meeting.RankDevice("cpu"))

    monkeypatch.setattr(meeting.time, "sleep", lambda seconds, wait=time.sleep: wait(0.05))
    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(meet, rank) for rank in (0, 2)]
        assert "2 of 4 ranks have not arrived (ranks 1, 3)" in str(first.exception())
        assert isinstance(second.exception(), SystemExit)
    assert capsys.readouterr().out.count("missing: ranks 1, 3") == 1


def test_the_ranks_of_a_new_start_meet_in_the_store_of_an_earlier_one():
    """As after an elastic restart: rank 1 of the first start has joined, and died."""
    store = dist.HashStore()

    def meet(rank: int) -> str:
        launch = Launch("torchrun", rank, rank, 2, 2, 0, "a", 29500)
        return meeting.meet(store, launch, 5, meeting.RankDevice("cpu"))

    starts = []
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(meet, (1, 0))
        assert first == second
        starts.append(first)
    assert starts[0] != starts[1]


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (("cpu",), r"Rank 1 on \S+ would train on cpu, and rank 0 on \S+ on cuda: "),
        (("cpu", "", 0, "This machine has"), r"Rank 1 on \S+: This machine has$"),
        (("cuda", "GPU-0", 1), r"Ranks 0 and 1 on \S+ use the same GPU: 3 .* each sees 1 GPU"),
    ],
)
def test_a_rank_without_the_device_of_the_others_is_named(monkeypatch, own, says):
    """At once by rank 0; the other ranks exit."""
    monkeypatch.setattr(meeting, "exit_now", sys.exit)
    monkeypatch.setattr(meeting.time, "sleep", lambda seconds, wait=time.sleep: wait(0.05))
    store, device = dist.HashStore(), meeting.RankDevice(*own)

    def meet(rank: int) -> BaseException | None:
        launch = Launch("torchrun", rank, rank, 3, 3, 0, "a", 29500)
        own = device if rank == 1 else meeting.RankDevice("cuda", f"GPU-{rank}", 2)
        return meeting.meet(store, launch, 60, own)

    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(meet, rank) for rank in range(3)]
        errors = [rank.exception(timeout=20) for rank in ranks]
    assert isinstance(errors[0], UserError) and errors[0].exit_code == 2
    assert re.search(says, str(errors[0]))
    assert all(isinstance(error, SystemExit) for error in errors[1:])


def test_a_rank_without_a_device_reports_to_rank_0(monkeypatch):
    """And raises its own error if rank 0 does not arrive."""
    told = []

    def fail(launch):
        raise UserError("only 1 GPU")

    monkeypatch.setattr(process_group, "choose_device", fail)
    monkeypatch.setattr(meeting, "connect", lambda *_: None)
    monkeypatch.setattr(meeting, "meet", lambda *args: told.append(args[-1].problem))
    for rank in (0, 1):
        launch = Launch("torchrun", rank, rank, 2, 2, 0, "a", 29500)
        with pytest.raises(UserError, match="only 1 GPU"):
            process_group.device_of_rank(launch, may_fail=True)
    assert told == ["only 1 GPU"]


def test_two_processes_of_one_rank_are_refused():
    store = dist.HashStore()
    launch = Launch("torchrun", 1, 1, 3, 3, 0, "a", 29500)
    store.set("meeting/3", "start/x")
    with ThreadPoolExecutor(2) as pool:
        # A process waits 5 seconds longer, for the error of rank 0.
        device = meeting.RankDevice("cpu")
        two = [pool.submit(meeting.meet, store, launch, -4.5, device) for _ in range(2)]
        assert any("has rank 1, too" in str(each.exception()) for each in two)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_without_an_address_ends_the_run(rank):
    """Also of the rank that hosts the store: torch would wait for the name until its timeout."""
    launch = Launch("python", rank, rank, 2, 2, 0, "no-such-host.invalid", 29500)
    with pytest.raises(TrainingError, match=r"no-such-host\.invalid:29500 \(.*an address here"):
        meeting.connect(launch, 0.1)


# ------------------------------------------------------------------------ signals and reporting


@pytest.fixture
def stop():
    """A StopSignal whose handlers are removed afterwards."""
    before = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    signals = StopSignal()
    signals.install()
    yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


def test_no_library_can_swallow_a_signal(stop):
    with pytest.raises(StoppedBySignal) as found:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except Exception:
            pytest.fail("swallowed")
    shown = explain(found.value)
    assert (shown.exit_code, shown.status) == (75, "preempted") and "SIGTERM" in str(shown)
    os.kill(os.getpid(), signal.SIGTERM)  # the launcher's repetition does not disturb `finally`
    with pytest.raises(StoppedBySignal):  # a destructor may have swallowed the first one
        stop.end_if_requested()
    with pytest.raises(StoppedBySignal) as found:
        stop.defer(saves=False)
    shown = explain(found.value)  # steps are lost
    assert (shown.exit_code, shown.status) == (1, "failed") and "SIGTERM" in str(shown)


@pytest.mark.parametrize(
    "first, own, status, code",
    [
        (UserError("no such file"), "connection closed", "failed", 1),
        (OutOfMemory("out of memory"), "connection closed", "oom", 1),
        (Stopped.by("SIGTERM"), "connection closed", "preempted", 75),
        (TrainingError("failed"), StoppedBySignal("SIGTERM", loses_steps=False), "failed", 1),
    ],
)
def test_the_first_failure_is_recorded_and_the_others_end_because_of_it(
    stop, monkeypatch, capfd, first, own, status, code
):
    """By rank 0, too, because the rank that failed may be on a host that does not share the disk."""
    store, ended, recorded = dist.HashStore(), [], []
    for rank, error in enumerate((own, first)[::-1]):
        monitor = FailureMonitor(stop)
        monitor.rank, monitor.watchdog.states.store = 1 - rank, store
        monitor.record_with(lambda error: recorded.append((error.status, str(error))) or True)
        monkeypatch.setattr(monitor, "_leave", ended.append)
        monkeypatch.setattr(monitor, "_exit_at_latest", lambda *_: None)
        monitor.end_failed(RuntimeError(error) if isinstance(error, str) else error)
    assert recorded == [(status, str(first))] * 2 and ended == [first.exit_code, code]
    assert capfd.readouterr().err.count(str(first)) == 1


def test_an_error_after_a_stop_signal_is_its_consequence(stop, monkeypatch, capfd):
    """A signal to the process group also kills the compiler that a library waits for."""
    monitor, codes = FailureMonitor(stop), []
    monkeypatch.setattr(monitor, "_leave", codes.append)
    monkeypatch.setattr(monitor, "_exit_at_latest", lambda *_: None)
    with contextlib.suppress(StoppedBySignal):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(5)
    monitor.end_failed(RuntimeError("Error building extension 'cpu_adam'"))
    err = capfd.readouterr().err
    assert codes == [75] and "SIGUSR1" in err and "cpu_adam" not in err


def test_a_stop_signal_while_the_ranks_restart_is_not_lost(stop, monkeypatch):
    """It arrives in the main thread, while another one replaces the program."""
    ended, recorded = [], []
    monitor = FailureMonitor(stop)
    monitor.watchdog.states.store.set("failure", "restart of rank 1")
    monitor.record_with(lambda error: recorded.append(error.status) or True)
    monkeypatch.setattr(monitor, "_leave", ended.append)
    restart = Restart({}, bool)
    monkeypatch.setattr(restart, "replace_program", lambda: ended.append("replaced"))
    monitor.training_starts(TrainState(total_steps=1, num_sequences=1), restart)
    stop.only_record()
    os.kill(os.getpid(), signal.SIGTERM)
    monitor._restart_if_agreed()
    assert ended[0] == 75 and recorded == ["preempted"]


def test_a_first_stop_signal_requests_a_save_and_a_later_one_interrupts(stop, monkeypatch):
    stop.defer(saves=True)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested
    monkeypatch.setattr("distributed_training.ranks.stop.SAME_REQUEST_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_a_hang_report_on_a_full_disk_ends_nothing(ranks, tmp_path, capfd):
    """/dev/full accepts an open and refuses each write; the report is printed instead."""
    (tmp_path / "hang").mkdir()
    for name in ("report.txt", "rank-0.txt", "rank-1.txt"):
        (tmp_path / "hang" / name).symlink_to("/dev/full")
    rounds(ranks, 1)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert not rounds(ranks, 3)
    out, err = capfd.readouterr()
    assert "No space left on device" in out and "SIGUSR2" in err and "rank" in err


def test_a_stopped_run_exits_although_the_store_does_not_answer(monkeypatch):
    exited, codes = Event(), []
    leave = lambda code: (codes.append(code), exited.set())  # noqa: E731
    monkeypatch.setattr(FailureMonitor._exit_at_latest, "__defaults__", ("", 0.05))
    monkeypatch.setattr(failures.os, "_exit", leave)
    monkeypatch.setattr(failures.os, "write", lambda *_: None)
    monkeypatch.setattr(failures, "exit_now", lambda code: None)
    monitor = FailureMonitor(MagicMock(ended_start=False))  # ignores no signals of the tests
    monkeypatch.setattr(monitor, "ranks", 2)
    waited = []
    silent = lambda seconds: waited.append(exited.wait(2)) or []  # noqa: E731
    monkeypatch.setattr(monitor.watchdog.states, "silent_ranks", silent)
    monitor.end_failed(Stopped.by("SIGTERM"))
    assert codes[:1] == [75] and waited == [True]


def test_complete_run_exits_although_a_library_does_not_end(monkeypatch):
    exited, codes = Event(), []
    leave = lambda code: (codes.append(code), exited.set())  # noqa: E731
    monkeypatch.setattr(failures, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(failures.os, "_exit", leave)
    monkeypatch.setattr(failures, "exit_now", lambda code: None)  # after the engine has ended
    engine = SimpleNamespace(destroy=lambda: exited.wait(10))
    with one_rank():
        FailureMonitor(MagicMock()).end_together(engine, 75)
    assert codes == [75]
