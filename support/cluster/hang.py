"""The hang report: every rank's Python stack, step and last collective, in one file.

A rank whose collective waits for another rank starts the report after --hang_seconds; SIGUSR2 to
any rank starts it at any time. The main thread may be blocked in C++, so a thread of each rank
takes part. The ranks exchange what they know in the store, once per second. If the store does not
answer, because the rank that hosts it is stopped, each rank writes its own part.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import torch.distributed as dist

from support import PROJECT, progress
from support.cluster.comm_volume import Traffic
from support.cluster.launch import Launch
from support.cluster.peers import PERIOD_SECONDS, Silence
from support.console import Console
from support.text_tables import text_table
from support.train_state import TrainState

FILE_NAME = "hang_report.txt"
REQUEST = "hang/request"  # entry of the store: number of the last request, kind, rank
ANSWER_SECONDS = 3  # for the stacks of all ranks; less than failures.GRACE_SECONDS
# A step without a collective may be slow. It is a hang if it takes longer than this number of times
# the longest time between two collectives so far.
SLOW_FACTOR = 3
MOST_FAILURES = 3  # of consecutive rounds, after which the store counts as ended
MOST_FRAMES = 60  # the innermost frames of a stack
HEADERS = ("rank", "host", "pid", "step", "doing", "last collective", "started")


class HangMonitor:
    """Monitor of one rank that writes a hang report, or contributes to another rank's."""

    def __init__(self, launch: Launch, console: Console):
        self.traffic = Traffic()
        self.folder: Path | None = None  # of the report; None: to stderr, and only after SIGUSR2
        self.state: TrainState | None = None  # None before and after the training
        self.doing: Callable[[], str] = str  # returns the phase of the run
        self.lost = ""  # set by another thread: the line about a rank that does not answer
        self._launch, self._console = launch, console
        self._store: dist.Store | None = None
        self._seconds = 0
        self._silence, self._longest = Silence(time.monotonic), 0.0
        self._reported = -1  # number of the last collective that was reported as waiting
        self._request = ""  # the last one that this rank has answered
        self._signals_seen = 0
        self._not_written = 0  # number of signals that faulthandler's handler did not record
        self._bytes_before = 0  # size of its file when the Python handler last ran
        self._reported_lost = False

    def start(self, store: dist.Store | None, seconds: int) -> None:
        """Count the collectives, handle SIGUSR2, and start the thread.

        Args:
            store: a connection that no other thread uses, because its calls may block; None for a
                single process.
            seconds: for which a collective may wait (--hang_seconds).
        """
        self.traffic.start()
        self.handle_signal()
        self._store, self._seconds = store, seconds
        threading.Thread(target=self._run, daemon=True).start()

    def handle_signal(self) -> None:
        """Install the handlers of SIGUSR2; `_signal_bytes` grows with each signal.

        A Python handler runs only when the main thread returns from C++. faulthandler's is in C,
        and writes to a file, unless the kernel delivers the signal to a thread of C++, for example
        right after SIGCONT. Such a signal is counted by the Python handler, which is called, too.
        """
        self._signal_file = tempfile.TemporaryFile()  # noqa: SIM115 (it stays open)

        def count(*_) -> None:
            size = os.fstat(self._signal_file.fileno()).st_size
            self._not_written += size == self._bytes_before
            self._bytes_before = size

        faulthandler.unregister(signal.SIGUSR2)  # or the handler of an earlier call would stay
        signal.signal(signal.SIGUSR2, count)
        # all_threads: reading the frames of other threads that run could crash the process.
        faulthandler.register(signal.SIGUSR2, self._signal_file, all_threads=False, chain=True)

    def _signal_bytes(self) -> int:
        return os.fstat(self._signal_file.fileno()).st_size + self._not_written

    def _run(self) -> None:
        failures = 0
        while True:
            time.sleep(PERIOD_SECONDS)
            try:
                self._round()
                failures = 0
            except Exception:  # torch raises several classes, for one failed call and at the end
                failures += 1
                self._store = None if failures == MOST_FAILURES else self._store

    def _round(self) -> None:
        """Publish this rank's state, answer a request, and start a report if there is a reason."""
        before = self._silence.seconds
        silent = self._silence.observe(self.traffic.number)
        self._longest = max(self._longest, before if silent == 0 else 0)
        if self._store:
            self._store.set(f"hang/state/{self._launch.rank}", json.dumps(self._own_state()))
        answered, size = self._answer(), self._signal_bytes()
        # A signal to all ranks is one request.
        signaled = size > self._signals_seen and answered != "signal"
        self._signals_seen = size
        if self.lost and not self._reported_lost:
            self._report("lost", self.lost)
        elif signaled:
            self._report("signal", "SIGUSR2 requested this report")
        elif silent >= self._seconds and self._reported != self.traffic.number and self.folder:
            states, slow = self._published(), silent < SLOW_FACTOR * self._longest
            if len(states) > 1 and (reason := diagnosis(states, slow)):
                self._report("hang", reason)

    # ------------------------------------------------------------------------- exchange of states

    def _own_state(self) -> dict:
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self.state.step + 1 if self.state else None,
            "doing": self.doing(),
            "number": self.traffic.number,
            "collective": self.traffic.last,
            "seconds": round(self._silence.seconds),
        }

    def _published(self) -> dict[int, dict]:
        """Return the last state that each rank has published."""
        keys = {rank: f"hang/state/{rank}" for rank in range(self._launch.world_size)}
        store = self._store
        return {r: json.loads(store.get(k)) for r, k in keys.items() if store and store.check([k])}

    def _answer(self) -> str:
        """Answer a new request of a rank; return its kind, or "" without a new one."""
        if not (self._store and self._store.check([REQUEST])):
            return ""
        request = self._store.get(REQUEST).decode()
        if request == self._request:
            return ""
        number, kind = request.split()[:2]
        answer = json.dumps({**self._own_state(), "stacks": stacks()})
        self._store.set(f"hang/{number}/{self._launch.rank}", answer)
        self._request = request
        self._reported = self.traffic.number if kind == "hang" else self._reported
        self._reported_lost |= kind == "lost"
        return kind

    def _report(self, kind: str, reason: str) -> None:
        """Ask all ranks for their stacks, and write the report, unless another rank does so.

        Args:
            kind: "hang", "signal" or "lost".
        """
        rank, store = self._launch.rank, self._store
        if store is None:
            self._reported_lost |= kind == "lost"
            self._write(reason, {rank: {**self._own_state(), "stacks": stacks()}})
            return
        number = int(self._request.split()[0]) + 1 if self._request else 1
        # Several ranks may have a reason at the same time; the first one writes the report.
        request = f"{number} {kind} {rank}"
        if store.compare_set(REQUEST, self._request, request) != request.encode():
            return
        states = self._published()
        missing, deadline = set(range(self._launch.world_size)), time.monotonic() + ANSWER_SECONDS
        while missing and time.monotonic() < deadline:
            self._answer()
            for other in [r for r in missing if store.check([f"hang/{number}/{r}"])]:
                states[other] = json.loads(store.get(f"hang/{number}/{other}"))
                missing.remove(other)
            time.sleep(0.1)
        if missing and kind != "lost":
            verb = "does" if len(missing) == 1 else "do"
            reason += f"; {rank_names(missing)} {verb} not answer"
        self._write(reason, states)

    def write_alone(self) -> None:
        """Write this rank's part if a rank does not answer, and no report was written.

        For another thread than that of this monitor, which may be blocked in a call to the store.
        """
        if self.lost and not self._reported_lost:
            self._write(self.lost, {self._launch.rank: {**self._own_state(), "stacks": stacks()}})

    def _write(self, reason: str, states: dict[int, dict]) -> None:
        """Append the report to the file, and print one line; or print the report."""
        text = report(reason, states, self._launch.rank)
        try:
            if self.folder is None:
                raise FileNotFoundError
            self.folder.mkdir(parents=True, exist_ok=True)  # on a host that does not share the disk
            with open(self.folder / FILE_NAME, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            progress.write(text, sys.stderr)
            return
        place = f"{self.folder / FILE_NAME} on {socket.gethostname()}"
        self._console.print(f"ℹ️  {reason}: the stacks are in {place}")


def diagnosis(states: dict[int, dict], slow: bool) -> str:
    """Say which ranks the others wait for; "" if the ranks seem not to wait for each other.

    Every rank starts the same collectives in the same order.

    Args:
        states: by rank; see `HangMonitor._own_state`. The ranks have started no collective for
            --hang_seconds.
        slow: equal states may be those of a slow step.
    """
    latest = max(state["number"] for state in states.values())
    waiting = [rank for rank, state in states.items() if state["number"] == latest]
    behind = states.keys() - waiting
    collective = f"collective {latest} ({states[waiting[0]]['collective']})"
    if behind:
        verb = "has" if len(behind) == 1 else "have"
        return (
            f"{rank_names(behind)} {verb} not started {collective}, "
            f"in which {rank_names(waiting)} wait{'s' * (len(waiting) == 1)}"
        ).capitalize()
    ranks_in: dict[str, list[int]] = {}
    for rank, state in states.items():
        ranks_in.setdefault(state["collective"], []).append(rank)
    if len(ranks_in) > 1:
        places = [f"{rank_names(ranks)} in {name}" for name, ranks in ranks_in.items()]
        return (
            f"The ranks differ in collective {latest}: {', '.join(places)}. "
            "A rank has skipped a collective, or started another one"
        )
    if slow or any(state["step"] is None for state in states.values()):
        return ""
    return f"All ranks have started {collective}, and no rank has started the next one"


def report(reason: str, states: dict[int, dict], writer: int) -> str:
    """Return the text of a report.

    Args:
        states: by rank; "stacks" is missing in that of a rank that did not answer.
    """
    rows = []
    ranks_with: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        place = [str(rank), state["host"], str(state["pid"]), str(state["step"] or "")]
        last = f"{state['number']} {state['collective']}"
        rows.append([*place, state["doing"], last, f"{state['seconds']} s ago"])
        ranks_with.setdefault(state.get("stacks") or _unanswered(rank, state), []).append(rank)
    parts = [
        text if "stacks" not in states[ranks[0]] else f"{rank_names(ranks)}:\n{text}"
        for text, ranks in ranks_with.items()
    ]
    head = f"Hang report of {time.strftime('%Y-%m-%d %H:%M:%S')}, written by rank {writer}"
    blocks = [f"{head}\n{reason}", text_table(rows, HEADERS), *parts]
    return "\n\n".join(blocks) + "\n\n\n"


def _unanswered(rank: int, state: dict) -> str:
    status = ""
    if state["host"] == socket.gethostname():
        try:
            status = f", which is {psutil.Process(state['pid']).status()}"
        except psutil.Error:
            status = ", which has ended"
    return (
        f"rank {rank} does not answer: process {state['pid']} on {state['host']}{status}. Its row "
        f"above is what it published last. `py-spy dump --pid {state['pid']}` on its host may show "
        "its stack."
    )


def rank_names(ranks) -> str:
    """Name ranks: "rank 3", "ranks 0-2, 5"."""
    runs = itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    texts = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def stacks() -> str:
    """Return the Python stacks of this process, innermost frames first, as py-spy prints them.

    Threads of this package and threads that wait for other threads are left out.
    """
    main, own = threading.main_thread().ident, f"{Path(__file__).parent}{os.sep}"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for thread, innermost in sys._current_frames().items():
        frames = [
            (frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in itertools.islice(traceback.walk_stack(innermost), MOST_FRAMES)
        ]
        files = [file for file, _, _ in frames]
        if thread != main and (
            files[0] == threading.__file__ or any(file.startswith(own) for file in files)
        ):
            continue
        lines = [f"    {name} ({_short(file)}:{line})" for file, line, name in frames]
        text = "\n".join([f"  {names.get(thread, 'a thread of a library')}", *lines])
        texts.insert(0 if thread == main else len(texts), text)
    return "\n".join(texts)


def _short(file: str) -> str:
    return file.rpartition("site-packages/")[2].removeprefix(f"{PROJECT}/")
