"""Ranks that do not answer, and signals, with a simulated clock."""

import os
import signal
import socket
import threading
import time

import psutil
import pytest

from support import process
from support.cluster import failures, peers
from support.errors import StoppedBySignal, TrainingError, explain


class FakeStore:
    """The store as FailureMonitor uses it, with a clock that the test moves."""

    def __init__(self):
        self.now, self.alive, self.failed, self.gone = 0.0, {0: 1, 1: 1}, False, False
        self.place = "elsewhere 1"

    def set(self, *_):
        pass

    def get(self, _key):
        return self.place.encode()

    def check(self, _keys):
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return self.failed

    def add(self, key, by):
        self.alive[int(key[-1])] += by
        return self.alive[int(key[-1])]


def watch(
    seconds: float, store: FakeStore, monitor, period=1.0, asks=True, neighbor=True
) -> str | None:
    """Let time pass for rank 0; returns what the monitor reports at last."""
    found = None
    for _ in range(round(seconds / period)):
        store.now += period
        store.alive[1] += neighbor
        if asks:
            monitor.ask()
        found = monitor.look()
        if found is not None:
            break
    return found


@pytest.fixture
def watched():
    store = FakeStore()
    return store, peers.PeerMonitor(store, 0, 2, clock=lambda: store.now)


def test_healthy_ranks_are_left_alone(watched):
    store, monitor = watched
    assert watch(10_000, store, monitor) is None


@pytest.mark.parametrize("seconds", [21, 3_600, 86_400])
def test_a_suspended_run_continues(watched, seconds):
    store, monitor = watched
    watch(5, store, monitor)
    store.now += seconds  # SIGSTOP on all ranks; this one continues first
    assert watch(10, store, monitor, neighbor=False) is None
    assert watch(100, store, monitor) is None


def test_a_rank_that_stops_answering_is_reported_in_time(watched):
    store, monitor = watched
    watch(5, store, monitor)
    assert watch(16, store, monitor, neighbor=False) is None
    assert "Rank 1" in watch(4, store, monitor, neighbor=False)


def test_a_neighbor_that_computes_has_more_time(watched, monkeypatch):
    """Its main thread may hold Python's lock for minutes; one that is stopped or waits has no such
    excuse.
    """
    store, monitor = watched
    store.place = f"{socket.gethostname()} {os.getpid()}"
    watch(5, store, monitor)
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_RUNNING)
    assert watch(300, store, monitor, neighbor=False) is None
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_STOPPED)
    assert "Rank 1" in watch(2, store, monitor, neighbor=False)


def test_a_neighbor_that_computes_without_end_is_reported(watched, monkeypatch):
    store, monitor = watched
    store.place = f"{socket.gethostname()} {os.getpid()}"
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_RUNNING)
    watch(5, store, monitor)
    assert "Rank 1" in watch(700, store, monitor, neighbor=False)


def test_a_rank_that_never_answers_is_reported(watched):
    store, monitor = watched
    store.alive[1] = 0
    assert watch(50, store, monitor, neighbor=False) is None
    assert "Rank 1" in watch(20, store, monitor, neighbor=False)


def test_a_store_that_blocks_is_reported_in_time(watched):
    store, monitor = watched
    watch(5, store, monitor)
    assert watch(16, store, monitor, asks=False) is None
    assert "Rank 0 does not answer" in watch(4, store, monitor, asks=False)


def test_a_slow_machine_still_finds_the_dead(watched):
    store, monitor = watched
    watch(10, store, monitor, period=5)
    assert "Rank 1" in watch(60, store, monitor, period=5, neighbor=False)


def test_a_store_that_ended_is_reported_at_once(watched):
    store, monitor = watched
    watch(5, store, monitor)
    store.gone = True
    assert "Rank 0 ended" in watch(2, store, monitor)
    assert monitor.lost


def test_an_error_of_another_rank_is_its_own_to_report(watched):
    store, monitor = watched
    store.failed = True
    assert watch(2, store, monitor) == ""


def test_a_call_that_blocks_is_given_up():
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        peers.in_time(lambda: threading.Event().wait(60), 0.2)
    assert time.monotonic() - started < 5
    assert peers.in_time(lambda: 3, 5) == 3
    with pytest.raises(KeyError):
        peers.in_time(lambda: {}["nothing"], 5)


@pytest.fixture
def stop():
    """A StopSignal whose handlers are removed afterwards."""
    from support.cluster.stop_signal import StopSignal

    before = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    signals = StopSignal()
    signals.install()
    yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_disk_that_hangs_hides_no_message(stop, monkeypatch, capfd):
    from support.cluster.launch import Launch
    from support.console import Console

    monkeypatch.setattr(failures, "DISK_SECONDS", 0.1)
    launch = Launch("python", 0, 0, 1, 1, 0, "", 0)
    monitor = failures.FailureMonitor(launch, Console(True), stop)
    monitor.on_failure.append(lambda _: time.sleep(20))
    started = time.monotonic()
    monitor._report(TrainingError("the first error"))
    assert "the first error" in capfd.readouterr().err and time.monotonic() - started < 15


def test_no_library_can_swallow_a_signal(stop):
    with pytest.raises(StoppedBySignal) as found:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except Exception:
            pytest.fail("swallowed")
    shown = explain(found.value)
    assert isinstance(shown, TrainingError) and "SIGTERM" in str(shown)


def test_a_signal_that_was_swallowed_ends_the_run_later(stop):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    except BaseException:
        pass
    os.kill(
        os.getpid(), signal.SIGTERM
    )  # the launcher's repetition does not disturb what `finally` does
    with pytest.raises(StoppedBySignal):
        stop.defer()


def test_a_deferred_signal_only_asks(stop):
    stop.defer()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested
    stop._first -= 10
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
