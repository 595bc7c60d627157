"""Run the checks of tools/benchmarks/gpu_check.py: several at a time, each with a time limit.

A check is a command and what its run must show. The runner starts the checks in their order, and
notes what came of each in `done` or `not_run`. It judges nothing: gpu_report.py does that, from
these notes.
"""

import contextlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import TextIO

import psutil

from distributed_training import PROJECT
from distributed_training.records.metrics_file import FILE
from distributed_training.records.metrics_reader import read_metrics

SCRIPT = PROJECT / "real_model_example.py"
# --standalone: the ranks meet at a free port of this machine.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SLOTS = 4  # runs at a time, of those that measure neither time nor free memory
GRACE_SECONDS = 5  # from SIGTERM to SIGKILL
SHORTEST_SECONDS = 10  # a run is not started with less time than this
POLL_SECONDS = 0.05
LOG_CHARACTERS = 200_000  # that are kept of a log's end


# ---------------------------------------------------------------------------- a check, and its run


@dataclass
class Done:
    """A run that has ended."""

    code: int | None  # its exit code; None if it was stopped at its time limit
    seconds: float  # its run time
    log: str  # its standard output and error
    folder: Path  # its output folder
    results: dict = field(default_factory=dict)  # results.json; empty if there is none
    losses: dict[int, float] = field(default_factory=dict)  # training loss by step
    problem: str = ""  # how it differs from the expected end; "" if it does not

    def reason(self) -> str:
        """Return the log's first line with ❌, or else the last with "Error", or else the last."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        marked = [line for line in lines if "❌" in line]
        errors = [line for line in lines if "Error" in line]
        return (marked[:1] or errors[-1:] or lines[-1:] or ["no output"])[0][:300]


Runs = dict[str, Done]  # the runs that have ended, by the names of their checks


class NotPossible(Exception):
    """A check cannot run after what earlier runs showed; the message says why."""


@dataclass(frozen=True)
class Check:
    """A command, what its run must show, and when it may start."""

    name: str  # unique in its part
    command: list | Callable[[Runs], list]  # or made from earlier runs; may raise NotPossible
    folder: Path  # its output folder
    code: int = 0  # expected exit code
    status: str | None = None  # expected in results.json; None: the run writes none
    reference: str = ""  # the check whose losses it must have; "": any losses
    tolerance: float = 0.0  # largest relative difference of these losses
    after_step: int = 0  # compare the losses of later steps only
    # Returns (problem or "", text) of a run that ended as expected.
    judge: Callable[[Done], tuple[str, str]] | None = None
    tables: tuple[str, ...] = ()  # of the report, that show its results; see gpu_tables.py
    after: tuple[str, ...] = ()  # checks that must have ended before, if they can run
    needs: tuple[str, ...] = ()  # checks that must have ended as expected before
    alone: bool = False  # measures time or free memory: nothing else runs at the same time
    background: bool = False  # takes no slot, and has no time limit but the part's
    blocked: str = ""  # why it cannot run on this machine; "" if it can
    stop_after: int = 0  # send SIGTERM after so many logged steps; 0: never
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Running:
    """The process of a check."""

    check: Check
    process: subprocess.Popen
    log: TextIO
    started: float  # time.monotonic()
    ends_at: float  # time.monotonic() of its time limit, or of the part's if that is earlier
    signalled: bool = False  # whether SIGTERM of `stop_after` was sent

    def send_stop_signal(self) -> None:
        """Send SIGTERM once the run has logged `stop_after` steps."""
        wanted = self.check.stop_after
        if wanted and not self.signalled and len(losses_in(self.check.folder)) >= wanted:
            self.process.send_signal(SIGTERM)
            self.signalled = True


# ------------------------------------------------------------------------------- results of a run


def slug(name: str) -> str:
    """Return the name of a check as the name of a file."""
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def losses_in(folder: Path) -> dict[int, float]:
    """Return the training loss by step of metrics.jsonl; a step may be logged twice, at its end."""
    records: list[dict] = []
    with contextlib.suppress(FileNotFoundError):
        records, _ = read_metrics(folder / FILE)
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def results_in(folder: Path) -> dict:
    """Return results.json; {} if there is none, or if it is not complete."""
    try:
        return json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}


def end_problem(run: Done, check: Check) -> str:
    """Return how the exit code or the status differs from the expected one; "" if neither."""
    if run.code is None:
        return f"stopped at its time limit, after {run.seconds:.0f} s: {run.reason()}"
    if run.code != check.code:
        return f"exit code {run.code} instead of {check.code}: {run.reason()}"
    status = run.results.get("status")
    if check.status is not None and status != check.status:
        return f"status {status} instead of {check.status}"
    return ""


def losses_unlike(found: dict[int, float], expected: dict[int, float], tolerance: float) -> str:
    """Return how two loss curves differ; "" if they agree.

    Args:
        found, expected: loss by step. Different steps count as a difference.
        tolerance: largest relative difference that is accepted.
    """
    if not expected or found.keys() != expected.keys():
        return f"losses of the steps {list(found)} instead of {list(expected)}"
    difference, step = largest_difference(found, expected)
    text = f"loss off by {difference:.1e} at step {step}, tolerance {tolerance:g}"
    return text if difference > tolerance else ""


def largest_difference(found: dict[int, float], expected: dict[int, float]) -> tuple[float, int]:
    """Return (relative difference, step) where two curves differ most; infinite for a NaN loss."""
    differences = [(abs(found[step] - loss) / abs(loss), step) for step, loss in expected.items()]
    return max((math.inf if math.isnan(value) else value, step) for value, step in differences)


def end_families(processes: Iterable[subprocess.Popen]) -> None:
    """End commands and all their descendants: SIGTERM, then SIGKILL.

    A signal to a process group is not enough, because torchrun starts each worker in a new session.
    The descendants are listed first, because they cannot be found after the launcher has exited.
    """
    processes = list(processes)
    alive: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            alive += [parent, *parent.children(recursive=True)]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(member)
        _, alive = psutil.wait_procs(alive, timeout=GRACE_SECONDS)
    for process in processes:
        process.poll()


# --------------------------------------------------------------------------------------- the runner


class Runner:
    """Runs the checks of a part.

    Args:
        checks: in the order in which they start, within the limits of `Check`.
        work: folder of the logs.
        seconds: time limit of the part, from the call of `run`.
        run_seconds: time limit of a run.
        env: environment variables in addition to those of this process.
    """

    def __init__(
        self, checks: list[Check], work: Path, seconds: float, run_seconds: float, env: dict
    ):
        self.checks, self.work, self.env = checks, work, env
        self.seconds, self.run_seconds = seconds, run_seconds
        self.waiting = list(checks)
        self.running: dict[str, Running] = {}
        self.done: Runs = {}
        self.not_run: dict[str, str] = {}  # why
        self.started = self.ends_at = math.inf  # time.monotonic()

    def run(self, changed: Callable[[], object]) -> None:
        """Run the checks; an exception, such as that of a signal handler, ends all runs.

        Args:
            changed: called after each change of `done` and `not_run`.
        """
        self.started = time.monotonic()
        self.ends_at = self.started + self.seconds
        try:
            while self.waiting or self.running:
                if self.collect() + self.start_waiting():
                    changed()
                time.sleep(POLL_SECONDS)
        finally:
            end_families(running.process for running in self.running.values())
            self.not_run |= dict.fromkeys(self.running, "stopped while it ran")
            self.running.clear()

    def collect(self) -> int:
        """Note the runs that have ended, or that reached a time limit; return their number.

        A run that the end of the part stops says nothing of the check: it counts as not run.
        """
        noted = 0
        for name, running in list(self.running.items()):
            running.send_stop_signal()
            code = running.process.poll()
            in_time = time.monotonic() < running.ends_at
            seconds = time.monotonic() - running.started
            if code is None and in_time:
                continue
            if code is None:
                end_families([running.process])
            running.log.close()
            del self.running[name]
            noted += 1
            if code is None and running.ends_at == self.ends_at:
                self.not_run[name] = f"{self.no_time()}: it was stopped after {seconds:.0f} s"
            else:
                self.done[name] = self.result_of(running, code)
        return noted

    def no_time(self) -> str:
        """Return why checks do not run, or not to their end, once the part's time has passed."""
        return f"no time was left of the {self.seconds:.0f} s"

    def result_of(self, running: Running, code: int | None) -> Done:
        """Return what is left of a run that has ended."""
        check, seconds = running.check, time.monotonic() - running.started
        text = Path(running.log.name).read_text(encoding="utf-8", errors="replace")
        text = text[-LOG_CHARACTERS:]
        folder = check.folder
        run = Done(code, seconds, text, folder, results_in(folder), losses_in(folder))
        run.problem = end_problem(run, check)
        return run

    def start_waiting(self) -> int:
        """Start the checks that may start now; return how many turned out not to be possible."""
        impossible = 0
        for check in list(self.waiting):
            if reason := self.obstacle(check):
                self.waiting.remove(check)
                self.not_run[check.name] = reason
                impossible += 1
            elif self.is_waiting_for_others(check):
                continue
            elif not self.has_room(check):
                break  # later checks are less valuable, and must not take the room
            else:
                self.waiting.remove(check)
                try:
                    self.start(check)
                except (NotPossible, OSError) as problem:  # OSError: there is no such program
                    self.not_run[check.name] = str(problem)
                    impossible += 1
        return impossible

    def obstacle(self, check: Check) -> str:
        """Return why a check will not run; "" if it will, or may."""
        if check.blocked:
            return check.blocked
        for name in check.needs:
            if name in self.not_run or (name in self.done and self.done[name].problem):
                return f"needs {name}"
        if self.ends_at - time.monotonic() < min(SHORTEST_SECONDS, self.run_seconds):
            return self.no_time()
        return ""

    def is_waiting_for_others(self, check: Check) -> bool:
        """Return whether checks that must end before this one have not ended."""
        pending = {other.name for other in self.waiting} | self.running.keys()
        return any(name in pending for name in (*check.after, *check.needs))

    def has_room(self, check: Check) -> bool:
        """Return whether a check may start next to those that run."""
        if check.background or not self.running:
            return True
        foreground = [run.check for run in self.running.values() if not run.check.background]
        if check.alone or any(other.alone for other in foreground):
            return False
        return len(foreground) < SLOTS

    def start(self, check: Check) -> None:
        """Start the process of a check, in a session of its own."""
        command = check.command if isinstance(check.command, list) else check.command(self.done)
        words, now = [str(word) for word in command], time.monotonic()
        env = {**os.environ, **self.env, **check.env}
        if not (check.alone or check.background):  # it shares the cores
            cores = len(os.sched_getaffinity(0))
            env.setdefault("OMP_NUM_THREADS", str(max(1, cores // SLOTS)))
        # Not with `with`: it is closed when the run has ended.
        log = open(self.work / f"{slug(check.name)}.log", "w", encoding="utf-8")  # noqa: SIM115
        print("$", shlex.join(words), file=log, flush=True)
        process = subprocess.Popen(
            words, stdout=log, stderr=log, env=env, cwd=PROJECT, start_new_session=True
        )
        limit = math.inf if check.background else now + self.run_seconds
        ends_at = min(limit, self.ends_at)
        self.running[check.name] = Running(check, process, log, now, ends_at)
