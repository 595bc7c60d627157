"""The watchdog with a simulated clock, hang reports, the rendezvous, and stop signals."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch.distributed as dist

from support import process
from support.cluster import failures, hang, rendezvous, watchdog
from support.cluster.launch import Launch
from support.cluster.stop_signal import StopSignal
from support.console import Console
from support.errors import HostOutOfMemory, StoppedBySignal, TrainingError, explain
from support.train_state import TrainState


class Ranks:
    """The watchdogs of several ranks in this process, which share a store."""

    def __init__(self, folder, world_size: int = 2):
        self.store = dist.HashStore()
        self.dogs = []
        for rank in range(world_size):
            launch = Launch("torchrun", rank, rank, world_size, world_size, 0, "", 0)
            report = hang.HangReport(launch, Console(rank == 0), StopSignal())
            report.folder, report._seconds = folder, 2
            self.dogs.append(watchdog.Watchdog(launch, report, self.store))

    def rounds(self, number: int, asking=(0, 1)) -> str | None:
        """Let the first rank look `number` times; before each look these ranks ask the store."""
        found = None
        for _ in range(number):
            for rank in asking:
                self.dogs[rank].exchange()
            found = found or self.dogs[0].look()
        return found


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)


def test_healthy_ranks_are_left_alone(ranks):
    assert ranks.rounds(1000) is None


def test_a_rank_that_stops_answering_is_reported_in_time(ranks):
    """The watchdog counts rounds, not seconds, so a suspended process reports no failure."""
    ranks.rounds(5)
    ranks.dogs[0]._neighbor_state["host"] = ""
    assert ranks.rounds(17, asking=()) is None
    ranks.rounds(2)
    ranks.store.set("state/1", '{"beat": 5, "host": "elsewhere", "pid": 1}')
    assert ranks.rounds(17, asking=[0]) is None
    assert "Rank 1 ended without reporting" in ranks.rounds(4, asking=[0])


def test_a_neighbor_that_computes_has_more_time(ranks, monkeypatch):
    """Its main thread may hold Python's lock for minutes; a stopped process does not."""
    ranks.rounds(5)
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_RUNNING)
    assert ranks.rounds(300, asking=[0]) is None
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_STOPPED)
    assert "Rank 1" in ranks.rounds(2, asking=[0])


def test_a_rank_that_never_answers_is_reported(ranks):
    assert ranks.rounds(50, asking=[0]) is None
    assert "Rank 1" in ranks.rounds(20, asking=[0])


def test_a_store_that_blocks_is_reported_in_time(ranks):
    ranks.rounds(5)
    assert ranks.rounds(17, asking=[]) is None
    assert "Rank 0 does not answer" in ranks.rounds(4, asking=[])


def test_a_store_that_ended_is_reported_at_once(ranks, monkeypatch):
    def gone(*_):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(watchdog, "ROUND_SECONDS", 0)
    monkeypatch.setattr(ranks.dogs[0], "exchange", gone)
    ranks.dogs[0].exchange_until(threading.Event())
    assert ranks.dogs[0].lost and "Rank 0 ended" in ranks.dogs[0].look()


def test_an_error_of_another_rank_is_its_own_to_report(ranks):
    ranks.store.set("failure", "an error")
    assert ranks.rounds(1) == ""


def test_a_call_that_blocks_is_given_up():
    with pytest.raises(TimeoutError):
        watchdog.in_time(lambda: threading.Event().wait(60), 0.2)
    assert watchdog.in_time(lambda: 3, 5) == 3
    with pytest.raises(KeyError):
        watchdog.in_time(lambda: {}["nothing"], 5)


# ------------------------------------------------------------------------------ the hang report


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


def reports(folder) -> list[str]:
    file = folder / "hang" / hang.FILE_NAME
    return file.read_text().split("Hang report of ")[1:] if file.exists() else []


def test_one_rank_reports_a_collective_that_waits(ranks, tmp_path, capsys):
    for dog, number in zip(ranks.dogs, (5, 4), strict=True):
        dog._hang.traffic.number, dog._hang.state = number, TrainState(10, 10, step=3)
    ranks.rounds(2)
    assert reports(tmp_path) == []  # within the 2 s that are allowed
    for dog in ranks.dogs:
        dog._hang._changed -= 3
    ranks.rounds(3)
    [report] = reports(tmp_path)
    assert "Rank 1 has not started collective 5" in report and f" {os.getpid()} " in report
    assert capsys.readouterr().out.count("Rank 1 has not started") == 1
    for dog in ranks.dogs:
        dog._hang.close()


def test_signals_to_all_ranks_start_one_report(ranks, tmp_path):
    """Each rank writes its stacks to its own file, and one of them the table."""
    for dog in ranks.dogs:
        dog._hang._stop.arrived_signals = lambda: {signal.SIGUSR2}
    ranks.rounds(1)
    for dog in ranks.dogs:
        dog._hang._stop.arrived_signals = set
    ranks.rounds(2)
    assert len(reports(tmp_path)) == 1
    for rank in (0, 1):
        assert "test_signals_to_all_ranks" in (tmp_path / "hang" / f"rank-{rank}.txt").read_text()


# ------------------------------------------------------------------------------- the rendezvous


def meet(*entries: dict, seconds: float = 5.0) -> list:
    """Let these ranks meet in one store; return what each gets, or its error."""
    store, size = dist.HashStore(), len(entries)
    rank_of = lambda entry, place: entry.pop("rank", place)  # noqa: E731

    def take_part(place: int, entry: dict):
        rank = rank_of(entry, place)
        launch = Launch("torchrun", rank, rank, size, size, 0, "a", 29500)
        own = {"number": str(place), "host": f"h{place}", "gpu": None, "facts": {}, **entry}
        meeting = rendezvous._Meeting(store, launch, own, time.monotonic() + seconds)
        store.set(meeting.key_of(rank), rendezvous.json.dumps(own))
        try:
            return meeting.announce() if rank == 0 else meeting.answer()
        except TrainingError as error:
            return "", str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(take_part, range(size), entries))


def test_ranks_that_fit_together_agree_on_an_attempt():
    found = meet({}, {}, {})
    assert len({attempt for attempt, _ in found}) == 1 and {text for _, text in found} == {""}


def test_a_library_that_a_rank_lacks_is_named():
    found = meet({"facts": {"torch": "2", "deepspeed": "0.19"}}, {"facts": {"torch": "2"}})
    assert all("Rank 1 on h1" in text and "deepspeed missing" in text for _, text in found)


def test_two_processes_with_one_rank_are_named():
    """As with `srun torchrun --node_rank 0` on every node."""
    assert any("Two processes have rank 1" in text for _, text in meet({}, {}, {"rank": 1}))
    assert any("Two processes have rank 0" in text for _, text in meet({}, {}, {"rank": 0}))


def test_missing_ranks_are_named(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.2)
    store = dist.HashStore()
    entry = {"number": "x", "host": "a", "gpu": None, "facts": {}}
    launch = Launch("srun", 0, 0, 4, 3, 0, "a", 29500)
    meeting = rendezvous._Meeting(store, launch, entry, time.monotonic() + 1)
    store.set(meeting.key_of(0), rendezvous.json.dumps(entry))
    _, text = meeting.announce()
    assert "3 of 4 ranks have not arrived (ranks 1-3)" in text and "are on a." in text
    assert capsys.readouterr().out.count("missing: ranks 1-3") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_without_an_address_ends_the_run(monkeypatch, rank):
    """Also of the rank that hosts the store: torch would wait for the name until its timeout."""
    monkeypatch.setattr(rendezvous, "RESOLVE_SECONDS", 0)
    launch = Launch("python", rank, rank, 2, 2, 0, "no-such-host.invalid", 29500)
    with pytest.raises(TrainingError, match=r"no-such-host\.invalid, .* has no address here"):
        rendezvous.connect(launch, timeout=300)


# ------------------------------------------------------------------------ signals and reporting


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


@pytest.fixture
def monitor(stop):
    return failures.FailureMonitor(Launch("python", 0, 0, 1, 1, 0, "", 0), Console(True), stop)


def test_the_error_is_recorded_before_it_is_printed(monitor, capsys):
    """The second time succeeds: the first call needed memory that the traceback held."""
    said = []

    def record(error):
        said.append(capsys.readouterr().err)
        if len(said) == 1:
            raise MemoryError
        return True

    monitor.on_failure.append(record)
    monitor._report(HostOutOfMemory("no memory is left"))
    assert said == ["", ""] and "no memory is left" in capsys.readouterr().err


def test_an_error_that_another_rank_has_recorded_is_not_printed(monitor, capsys):
    monitor.on_failure.append(lambda _: False)
    monitor._report(TrainingError("a consequence"))
    assert capsys.readouterr().err == ""


def test_sigusr2_is_seen_without_the_main_thread(monitor):
    monitor.hang.start(100)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert monitor.stop.arrived_signals() == {signal.SIGUSR2}
    assert monitor.stop.arrived_signals() == set()


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
