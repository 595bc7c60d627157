"""The watchdog with a simulated clock, hang reports, the meeting of the ranks, stop signals."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from support import process
from support.cluster import comm_volume, process_group, watchdog
from support.cluster.failures import FailureMonitor
from support.cluster.launch import Launch
from support.cluster.stop_signal import StopSignal
from support.console import Console
from support.errors import StoppedBySignal, TrainingError, explain
from support.train_state import TrainState


def launch_of(rank: int, size: int) -> Launch:
    return Launch("torchrun", rank, rank, size, size, 0, "a", 29500)


@pytest.fixture(autouse=True)
def uncounted(monkeypatch):
    """torch registers the functions that count collectives once in a process, and not per rank."""
    monkeypatch.setattr(comm_volume.Traffic, "start", lambda self: None)


class Ranks:
    """The watchdogs of two ranks in this process, which share a store."""

    def __init__(self, folder):
        self.store, self.dogs, self.signals = dist.HashStore(), [], set()
        for rank in range(2):
            stop = StopSignal()
            stop.arrived_signals = lambda: self.signals
            dog = watchdog.Watchdog(launch_of(rank, 2), Console(rank == 0), stop)
            dog.store, dog.folder = self.store, folder
            self.dogs.append(dog)

    def rounds(self, number: int, asking=(0, 1)) -> bool:
        """Let the first rank look `number` times; before each look these ranks ask the store."""
        found = False
        for _ in range(number):
            for rank in asking:
                self.dogs[rank].exchange()
            found = self.dogs[0].look()
        return found


@pytest.fixture
def ranks(tmp_path):
    ranks = Ranks(tmp_path)
    yield ranks
    for dog in ranks.dogs:
        dog.close()


def test_healthy_ranks_are_left_alone(ranks):
    assert not ranks.rounds(1000)


@pytest.mark.parametrize("status", [psutil.STATUS_STOPPED, psutil.STATUS_RUNNING])
def test_a_rank_that_stops_answering_is_reported_in_time(ranks, monkeypatch, status):
    """Unless it computes: its main thread may hold Python's lock for minutes."""
    monkeypatch.setattr(psutil.Process, "status", lambda _: status)
    ranks.rounds(5)
    assert not ranks.rounds(watchdog.SILENT_ROUNDS, asking=[0])
    if status == psutil.STATUS_RUNNING:
        assert not ranks.rounds(300, asking=[0])
    else:
        with pytest.raises(TrainingError, match="Rank 1 ended without reporting"):
            ranks.rounds(2, asking=[0])


def test_a_rank_that_never_answers_is_reported(ranks):
    assert not ranks.rounds(watchdog.STARTING_ROUNDS, asking=[0])
    with pytest.raises(TrainingError, match="Rank 1"):
        ranks.rounds(2, asking=[0])


def test_a_store_that_blocks_is_reported_in_time(ranks):
    ranks.rounds(5)
    assert not ranks.rounds(watchdog.SILENT_ROUNDS, asking=[])
    with pytest.raises(TrainingError, match="Rank 0 does not answer"):
        ranks.rounds(2, asking=[])


@pytest.mark.parametrize("of_the_store", [True, False])
def test_an_error_of_the_exchange(ranks, monkeypatch, of_the_store):
    """Only an error of the store means that rank 0, which hosts it, has ended."""

    def fail(*_):
        raise dist.DistStoreError("Connection reset") if of_the_store else RuntimeError("a mistake")

    monkeypatch.setattr(watchdog, "ROUND_SECONDS", 0)
    broken = ("store", SimpleNamespace(set=fail)) if of_the_store else ("doing", fail)
    monkeypatch.setattr(ranks.dogs[0], *broken)
    ranks.dogs[0].exchange_until(threading.Event())
    shown = "Rank 0 ended without reporting" if of_the_store else "^a mistake"
    with pytest.raises(RuntimeError if not of_the_store else TrainingError, match=shown):
        ranks.dogs[0].look()


def test_an_error_of_another_rank_is_its_own_to_report(ranks):
    ranks.store.set("failure", "an error")
    assert ranks.rounds(1)


# ------------------------------------------------------------------------------ the hang report


def states(*collectives: tuple[int, str], step: int | None = 1) -> dict[int, dict]:
    return {
        rank: {"number": number, "collective": name, "step": step}
        for rank, (number, name) in enumerate(collectives)
    }


@pytest.mark.parametrize(
    "states, says",
    [
        (
            states((7, "all_reduce"), (6, "all_gather"), (7, "all_reduce")),
            "Rank 1 has not started collective 7 (all_reduce), in which ranks 0, 2 wait",
        ),
        (
            states((6, "a"), (7, "b"), (5, "a")),
            "Ranks 0, 2 have not started collective 7 (b), in which rank 1 waits",
        ),
        (states((7, "a"), (7, "b")), "differ in collective 7: rank 0 in a, rank 1 in b"),
        (states((7, "a"), (7, "a")), "wait in collective 7"),
        (states((7, "a"), (7, "a"), step=None), ""),  # a rank prepares the data
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(states, says):
    found = watchdog.diagnosis(states)
    assert says in found and bool(says) == bool(found)


def test_rank_names():
    assert watchdog.rank_names([3]) == "rank 3"
    assert watchdog.rank_names({7, 0, 1, 2, 5, 6}) == "ranks 0-2, 5-7"


def reports(folder) -> list[str]:
    file = folder / "hang" / "report.txt"
    return file.read_text().split("Hang report of ")[1:] if file.exists() else []


def test_one_rank_reports_a_collective_that_waits(ranks, tmp_path, capsys):
    for dog, number in zip(ranks.dogs, (5, 4), strict=True):
        dog.start(ranks.store, hang_seconds=1)
        dog.traffic.number, dog.state = number, TrainState(10, 10, step=3)
    ranks.rounds(2)
    assert reports(tmp_path) == []  # within the second that is allowed
    time.sleep(1.1)
    ranks.rounds(3)
    [report] = reports(tmp_path)
    assert "Rank 1 has not started collective 5" in report and f" {os.getpid()} " in report
    assert capsys.readouterr().out.count("Rank 1 has not started") == 1


def test_signals_to_all_ranks_start_one_report(ranks, tmp_path):
    """Each rank writes its stacks to its own file, and one of them the table."""
    ranks.signals = {signal.SIGUSR2}
    ranks.rounds(1)
    ranks.signals = set()
    ranks.rounds(2)
    assert len(reports(tmp_path)) == 1
    for rank in (0, 1):
        assert "test_signals_to_all_ranks" in (tmp_path / "hang" / f"rank-{rank}.txt").read_text()


# ---------------------------------------------------------------------- the meeting of the ranks


def meet(*entries: dict, seconds: float = 5.0, size: int = 0, store=None) -> list[str]:
    """Let these ranks meet in one store; return the problem that each gets, or its error."""
    store, size = store or dist.HashStore(), size or len(entries)

    def take_part(place: int, entry: dict) -> str:
        rank = entry.get("rank", place)
        own = {"host": f"h{place}", "gpu": None, "same": {}, **entry}
        try:
            return process_group.meet(store, launch_of(rank, size), own, seconds)[1]
        except TrainingError as error:
            return str(error)

    with ThreadPoolExecutor(len(entries)) as pool:
        return list(pool.map(take_part, range(len(entries)), entries))


def test_ranks_meet_again_after_a_restart():
    """torchrun's store outlives its ranks and has the keys of the attempt before."""
    store = dist.HashStore()
    assert meet({}, {}, {}, store=store) == meet({}, {}, {}, store=store) == ["", "", ""]


def test_a_library_that_a_rank_lacks_is_named():
    found = meet({"same": {"torch": "2", "deepspeed": "0.19"}}, {"same": {"torch": "2"}})
    assert all("Rank 1 on h1" in text and "deepspeed missing there" in text for text in found)


def test_two_processes_with_one_rank_are_named():
    """As with `srun torchrun --node_rank 0` on every node."""
    for rank in (0, 1):
        found = meet({}, {}, {"rank": rank}, size=4, seconds=1)
        assert any(f"Two processes have rank {rank}" in text for text in found), found


def test_missing_ranks_are_named(monkeypatch, capsys):
    monkeypatch.setattr(process_group, "NOTICE_SECONDS", 0.2)
    [text] = meet({}, seconds=1, size=4)
    assert "3 of 4 ranks have not arrived (ranks 1-3)" in text and "are on h0." in text
    assert capsys.readouterr().out.count("missing: ranks 1-3") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_without_an_address_ends_the_run(rank):
    """Also of the rank that hosts the store: torch would wait for the name until its timeout."""
    launch = Launch("python", rank, rank, 2, 2, 0, "no-such-host.invalid", 29500)
    with pytest.raises(TrainingError, match=r"no-such-host\.invalid:29500 \(.*an address here"):
        process_group.connect(launch, timeout=0.1)


def entries_of(*places: tuple[str, str | None]) -> dict[int, dict]:
    return {rank: {"host": host, "gpu": gpu, "same": {}} for rank, (host, gpu) in enumerate(places)}


def test_every_host_whose_ranks_share_a_gpu_is_named():
    fits = [("n1", None), ("n1", None), ("n1", "a"), ("n1", "b"), ("n2", "a")]
    assert process_group.misfit(entries_of(*fits)) == ""
    shared = [("n1", "a"), ("n1", "a"), ("n2", "b"), ("n2", "c"), ("n3", "d"), ("n3", "d")]
    said = process_group.misfit(entries_of(*shared))
    assert "ranks 0-1 on n1" in said and "ranks 4-5 on n3" in said and "n2" not in said


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


class Left(BaseException):
    """Stands for the end of this process."""


@pytest.fixture
def fail(stop, monkeypatch):
    """fail(error, record) ends a run of one process; `record` writes its results.json."""

    def leave(code):
        raise Left(code)

    def end(error, record):
        monkeypatch.setattr("support.cluster.failures.exit_now", leave)
        monitor = FailureMonitor(Launch("python", 0, 0, 1, 1, 0, "", 0), Console(True), stop)
        monitor.on_failure.append(record)
        with pytest.raises(Left) as left:
            monitor.end_failed(error)
        return left.value.args[0]

    return end


def test_the_error_is_recorded_before_it_is_printed(fail, capsys):
    """The second time succeeds: the first call needed memory that the traceback held."""
    printed = []

    def record(_error):
        printed.append(capsys.readouterr().err)
        if len(printed) == 1:
            raise MemoryError
        return True

    assert fail(MemoryError("no memory is left"), record) == 3
    assert printed == ["", ""] and "no memory is left" in capsys.readouterr().err


def test_an_error_that_another_rank_has_recorded_is_not_printed(fail, capsys):
    assert fail(TrainingError("a consequence"), lambda _: False) == 1
    assert capsys.readouterr().err == ""


def test_sigusr2_is_seen_without_the_main_thread(stop):
    watchdog.Watchdog(launch_of(0, 1), Console(True), stop).start(None, 100)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert stop.arrived_signals() == {signal.SIGUSR2}
    assert stop.arrived_signals() == set()


def test_no_library_can_swallow_a_signal(stop):
    with pytest.raises(StoppedBySignal) as found:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except Exception:
            pytest.fail("swallowed")
    shown = explain(found.value)
    assert isinstance(shown, TrainingError) and "SIGTERM" in str(shown)
    os.kill(os.getpid(), signal.SIGTERM)  # the launcher's repetition does not disturb `finally`
    with pytest.raises(StoppedBySignal):  # a destructor may have swallowed the first one
        stop.defer()


def test_a_deferred_signal_only_asks(stop, monkeypatch):
    stop.defer()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested
    monkeypatch.setattr("support.cluster.stop_signal.SAME_REQUEST_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
