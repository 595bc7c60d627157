"""The hang report: which rank the others wait for, and ranks that exchange their stacks."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from support.cluster import hang
from support.cluster.launch import Launch
from support.cluster.peers import Silence
from support.console import Console
from support.train_state import TrainState


def states(*collectives: tuple[int, str], step: int | None = 1) -> dict[int, dict]:
    keys = ("number", "collective")
    return {
        rank: {**dict(zip(keys, one, strict=True)), "step": step}
        for rank, one in enumerate(collectives)
    }


@pytest.mark.parametrize(
    "states, slow, says",
    [
        (
            states((7, "all_reduce"), (6, "all_gather"), (7, "all_reduce")),
            False,
            "Rank 1 has not started collective 7 (all_reduce), in which ranks 0, 2 wait",
        ),
        (
            states((6, "a"), (7, "b"), (5, "a")),
            True,
            "Ranks 0, 2 have not started collective 7 (b), in which rank 1 waits",
        ),
        (states((7, "a"), (7, "b")), True, "differ in collective 7: rank 0 in a, rank 1 in b"),
        (states((7, "a"), (7, "a")), False, "All ranks have started collective 7"),
        (states((7, "a"), (7, "a")), True, ""),  # a slow step
        (states((7, "a"), (7, "a"), step=None), False, ""),  # a rank prepares the data
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(states, slow, says):
    found = hang.diagnosis(states, slow)
    assert says in found and bool(says) == bool(found)


def test_rank_names():
    assert hang.rank_names([3]) == "rank 3"
    assert hang.rank_names({7, 0, 1, 2, 5, 6}) == "ranks 0-2, 5-7"


def test_the_main_thread_is_shown_and_threads_that_wait_are_not():
    ended = threading.Event()
    waiting = threading.Thread(target=ended.wait, name="one that waits")
    working = threading.Thread(target=lambda: time.sleep(0.5), name="one that works")
    waiting.start(), working.start()
    found = hang.stacks()
    ended.set()
    assert found.startswith("  MainThread\n    stacks (support/cluster/hang.py:")
    assert "one that works" in found and "one that waits" not in found


class Ranks:
    """Monitors of several ranks in this process, which share a store."""

    def __init__(self, folder, world_size: int):
        self.store = dist.HashStore()
        self.monitors, self.now = [], 0.0
        for rank in range(world_size):
            launch = Launch("torchrun", rank, rank, world_size, world_size, 0, "", 0)
            monitor = hang.HangMonitor(launch, Console(rank == 0))
            monitor.folder, monitor.state = folder, TrainState(10, 10)
            monitor._store, monitor._seconds = self.store, 2
            monitor._silence = Silence(lambda: self.now)
            self.monitors.append(monitor)

    def rounds(self, count: int, ranks, signaled=()) -> None:
        """Let these ranks make rounds at the same time; each takes a second of their clock."""
        for number in range(count):
            self.now += 1
            for rank in ranks:
                monitor = self.monitors[rank]
                size = monitor._signals_seen + (rank in signaled and number == 0)
                monitor._signal_bytes = lambda size=size: size
            with ThreadPoolExecutor(len(ranks)) as pool:
                list(pool.map(lambda rank: self.monitors[rank]._round(), ranks))


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(hang, "ANSWER_SECONDS", 0.3)
    return Ranks(tmp_path, 3)


def reports(folder) -> list[str]:
    file = folder / hang.FILE_NAME
    return file.read_text().split("Hang report of ")[1:] if file.exists() else []


def test_one_rank_reports_a_collective_that_waits(ranks, tmp_path, capsys):
    for monitor, number in zip(ranks.monitors, (5, 5, 4), strict=True):
        monitor.traffic.number = number
    ranks.rounds(2, [0, 1, 2])
    assert reports(tmp_path) == []  # within the 2 s that are allowed
    ranks.rounds(6, [0, 1, 2])
    [report] = reports(tmp_path)
    assert "Rank 2 has not started collective 5" in report and "ranks 0-1 wait" in report
    assert capsys.readouterr().out.count("Rank 2 has not started") == 1
    ranks.monitors[2].traffic.number = 5  # it continues, and the next collective waits, too
    ranks.rounds(1, [0, 1, 2])
    ranks.monitors[0].traffic.number = 6
    ranks.rounds(5, [0, 1, 2])
    assert len(reports(tmp_path)) == 2


def test_a_rank_that_does_not_answer_is_named_with_what_it_published(ranks, tmp_path):
    ranks.monitors[1].state.step = 3
    ranks.rounds(1, [0, 1, 2])
    ranks.monitors[0].traffic.number = ranks.monitors[2].traffic.number = 1
    ranks.rounds(4, [0, 2])
    [report] = reports(tmp_path)
    assert "rank 1 does not answer" in report.splitlines()[1]
    assert f"process {os.getpid()} on {socket.gethostname()}" in report
    assert next(line for line in report.splitlines() if line.startswith("1 ")).split()[3] == "4"


def test_signals_to_all_ranks_start_one_report(ranks, tmp_path):
    for monitor in ranks.monitors:
        monitor._seconds = 100
    ranks.rounds(3, [0, 1, 2], signaled=(0, 1, 2))
    assert len(reports(tmp_path)) == 1
    ranks.rounds(3, [0, 1, 2], signaled=(1,))
    assert len(reports(tmp_path)) == 2


def test_without_a_store_each_rank_writes_its_part(ranks, tmp_path):
    monitor = ranks.monitors[1]
    monitor.write_alone()
    assert reports(tmp_path) == []  # all ranks answer
    monitor.lost = "Rank 0 does not answer"
    monitor.write_alone()
    assert "rank 1:\n  MainThread" in reports(tmp_path)[0]


def test_the_signal_is_seen_without_the_main_thread(ranks):
    monitor = ranks.monitors[0]
    monitor.handle_signal()
    before = monitor._signal_bytes()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert monitor._signal_bytes() > before


def test_a_signal_to_a_thread_without_a_python_stack_is_seen(ranks):
    """faulthandler writes nothing then; the Python handler runs in any case."""
    monitor = ranks.monitors[0]
    monitor.handle_signal()
    os.kill(os.getpid(), signal.SIGUSR2)
    before = monitor._signal_bytes()
    assert monitor._signal_bytes() == before and monitor._not_written == 0  # seen once
    signal.getsignal(signal.SIGUSR2)(signal.SIGUSR2, None)
    assert monitor._signal_bytes() == before + 1


def test_a_rank_that_has_not_seen_a_request_does_not_start_another(ranks, tmp_path):
    ranks.store.set(hang.REQUEST, "1 hang 0")
    ranks.monitors[1]._report("hang", "late")
    assert reports(tmp_path) == []


@pytest.mark.parametrize("failures, kept", [(hang.MOST_FAILURES - 1, True), (5, False)])
def test_the_store_counts_as_ended_after_several_failures(ranks, monkeypatch, failures, kept):
    monitor = ranks.monitors[0]
    rounds = iter(
        [RuntimeError("refused")] * failures + [None, RuntimeError("refused"), SystemExit]
    )

    def one_round():
        if error := next(rounds):
            raise error

    monitor._round = one_round
    monkeypatch.setattr(hang, "PERIOD_SECONDS", 0)
    with pytest.raises(SystemExit):
        monitor._run()
    assert (monitor._store is not None) == kept
