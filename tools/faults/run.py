"""Plant the faults one at a time, run their checks, and run the checks without a fault, too."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from distributed_training.errors import UserError
from distributed_training.hardware import cpu_fact
from distributed_training.process import versions
from distributed_training.ranks import tuning
from distributed_training.text_tables import text_table
from tools.faults.bench import Bench, Workshop
from tools.faults.fault import Check, Fault, Finding

AT_A_TIME = 2  # jobs, each of which runs one program at a time
SEED = 0  # of the runs with a fault; those without one have the seeds from 1
# A patch does not apply, a run fails, or its files lack what a check or a curve reads there.
CANNOT_RUN = (UserError, OSError, LookupError, TypeError, ValueError)


@dataclass
class Outcome:
    """What the checks of a job found."""

    name: str  # of the fault, or of the seed
    findings: dict[Check, Finding] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)  # with a fault, and without
    problem: str = ""  # why a check or a curve could not be run
    seconds: float = 0.0


@dataclass
class Results:
    """The outcomes of all jobs."""

    faults: list[Fault]
    with_fault: dict[str, Outcome] = field(default_factory=dict)
    without: dict[int, Outcome] = field(default_factory=dict)  # by seed
    release: dict[str, Any] = field(default_factory=dict)  # of deepspeed_release.show
    seconds: float = 0.0

    @property
    def missed(self) -> list[str]:
        """The faults that their check did not catch, or could not judge."""
        found = {name for name, out in self.with_fault.items() if is_caught(out)}
        return [fault.name for fault in self.faults if fault.name not in found]

    @property
    def alarms(self) -> list[str]:
        """The seeds whose checks found something without a fault, or failed."""
        return [
            outcome.name
            for _, outcome in sorted(self.without.items())
            if outcome.problem or any(finding.caught for finding in outcome.findings.values())
        ]

    def alarms_of(self, *checks: Check) -> int:
        """Return in how many clean runs one of the checks raised an alarm, or could not be run."""
        found = [[out.findings.get(check) for check in checks] for out in self.without.values()]
        return sum(any(each is None or each.caught for each in findings) for findings in found)


def is_caught(outcome: Outcome) -> bool:
    """Return whether all checks of a fault caught it."""
    return not outcome.problem and all(finding.caught for finding in outcome.findings.values())


def run_all(faults: list[Fault], seeds: int, workshop: Workshop) -> Results:
    """Run the checks of all faults, and each check without a fault with the seeds 1 to `seeds`."""
    started, results = time.monotonic(), Results(faults)
    checks = list(dict.fromkeys(check for fault in faults for check in fault.checks))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        jobs: dict[Future[Outcome], Fault | int] = {}
        try:
            for fault in faults:
                jobs[pool.submit(run_with_fault, workshop, fault)] = fault
            for seed in range(1, seeds + 1):
                jobs[pool.submit(run_without_fault, workshop, checks, seed)] = seed
            for outcome, job in in_order_of_end(jobs):
                keep(results, outcome, job)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            workshop.stop()  # otherwise the pool waits for the checks that are running
            raise
    results.seconds = time.monotonic() - started
    return results


def in_order_of_end(
    jobs: dict[Future[Outcome], Fault | int],
) -> Iterator[tuple[Outcome, Fault | int]]:
    """Yield each outcome when it is there, with its job."""
    for future in as_completed(jobs):
        yield future.result(), jobs[future]


def keep(results: Results, outcome: Outcome, job: Fault | int) -> None:
    """Add an outcome to the results, and print it."""
    if isinstance(job, Fault):
        results.with_fault[job.name] = outcome
        caught = is_caught(outcome)
        shown = [finding for finding in outcome.findings.values() if finding.caught == caught]
        steps = [f" at step {finding.step}" if finding.step else "" for finding in shown]
        by = " and ".join(f"{each.by}{step}" for each, step in zip(shown, steps, strict=True))
        said = outcome.problem or f"{'caught' if caught else 'missed'} by {by}"
        mark = "✅" if caught else "❌"
    else:
        results.without[job] = outcome
        alarms = [
            f"{check.command}: {f.evidence}" for check, f in outcome.findings.items() if f.caught
        ]
        mark = "❌" if outcome.problem or alarms else "✅"
        said = outcome.problem or "; ".join(alarms) or f"{len(outcome.findings)} checks are silent"
    print(f"{mark} {outcome.name}: {said} ({outcome.seconds:.1f} s)", flush=True)


def run_with_fault(workshop: Workshop, fault: Fault) -> Outcome:
    """Plant a fault, and run its checks."""
    outcome = Outcome(fault.name)
    with judging(outcome):
        project = workshop.plant(fault.patch)
        bench = Bench(workshop, project, SEED, project.parent / "runs")
        run_checks(outcome, bench, fault.checks)
        if fault.curve:
            clean = Bench(workshop, workshop.clean, SEED, project.parent / "clean_runs")
            outcome.curves = {
                name: losses_of(each.train(fault.curve))
                for name, each in (("with", bench), ("without", clean))
            }
    return outcome


def run_without_fault(workshop: Workshop, checks: Iterable[Check], seed: int) -> Outcome:
    """Run all checks on the clean copy, with another seed and other data."""
    outcome = Outcome(f"seed {seed} without a fault")
    with judging(outcome):
        bench = Bench(workshop, workshop.clean, seed, workshop.folder / f"seed{seed}")
        run_checks(outcome, bench, checks)
    return outcome


def run_checks(outcome: Outcome, bench: Bench, checks: Iterable[Check]) -> None:
    """Run checks one after the other, up to one that cannot be run."""
    for check in checks:
        outcome.findings[check] = check(bench)


@contextmanager
def judging(outcome: Outcome) -> Iterator[None]:
    """Make an error of a job its problem, so that the other jobs go on; measure its seconds."""
    started = time.monotonic()
    try:
        yield
    except CANNOT_RUN as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        outcome.problem = f"not judged: {kind}{' '.join(str(error).split())}"
    outcome.seconds = time.monotonic() - started


def losses_of(folder: Path) -> list[float]:
    """Return the training losses of a run, step by step."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def as_table(results: Results) -> str:
    """Return a table of the faults for a terminal."""
    rows = []
    for fault in results.faults:
        outcome, clean = results.with_fault[fault.name], len(results.without)
        finding = outcome.findings.get(fault.check)
        step = str(finding.step or "–") if finding else ""
        by = "❌ not judged" if outcome.problem else "❌ missed"
        by = finding.by if finding and is_caught(outcome) else by
        rows.append([fault.name, by, step, f"{results.alarms_of(*fault.checks)} of {clean}"])
    return text_table(rows, ["fault", "caught by", "step", "alarms with-\nout a fault"])


def summary(results: Results) -> str:
    """Return the last line, or several."""
    if missed := results.missed:
        return f"❌ Not caught: {', '.join(missed)}."
    if alarms := results.alarms:
        return f"❌ An alarm without a fault: {', '.join(alarms)}."
    clean = f" No check raises an alarm without a fault, with {len(results.without)} other seeds."
    return (
        f"✅ All {len(results.faults)} faults are caught.{clean if results.without else ''} "
        f"({results.seconds:.0f} s)"
    )


def as_json(results: Results) -> dict:
    """Return what results.json contains, if no check failed."""
    found = {}
    for fault in results.faults:
        outcome = results.with_fault[fault.name]
        shown = [
            {"by": each.by, "step": each.step, "evidence": each.evidence}
            for each in (outcome.findings[check] for check in fault.checks)
        ]
        found[fault.name] = {
            **shown[0],
            **({"also": shown[1:]} if fault.also else {}),
            "seconds": round(outcome.seconds, 1),
            "alarms": results.alarms_of(*fault.checks),
            **({"curves": outcome.curves} if outcome.curves else {}),
        }
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": round(results.seconds),
        "cpu": cpu_fact("model name") or platform.machine(),
        "cores": tuning.available_cores(),
        "versions": versions(),
        "clean_runs": len(results.without),
        "faults": found,
        "release": results.release,
    }
