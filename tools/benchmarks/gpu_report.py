"""The report of tools/benchmarks/gpu_check.py: the machine, a row for each check, and tables.

The report is computed from what the runners noted so far, and replaced as a whole after each run.
So it is complete at any moment, whatever ends the next run, and says of every check that it passed,
failed, or did not run and why.
"""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from distributed_training.files.atomic import only_finite, write_text
from distributed_training.process import code_digest
from distributed_training.units import GB
from tools.benchmarks.runner import Check, Done, Runner, Runs, largest_difference, losses_unlike

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes")
LOG_LINES = 150  # of a failed run's log
# What results that are not as this version writes them can raise.
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)

Rows = list[tuple[str, str, str]]  # (check, verdict, text)
Tables = dict[str, list[str]]  # title -> lines of a Markdown table


# ------------------------------------------------------------------------------------- the machine


@dataclass
class Machine:
    """The machine that the checks run on."""

    gpus: int  # number of GPUs that the checks may use
    gpu_bytes: int  # memory of the first one; 0 without a GPU
    facts: list[str]  # GPUs, driver, cores, memory and versions

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU."""
        return self.gpus > 0


def describe_machine() -> Machine:
    """Return the facts of nvidia-smi and of the installed packages, none of which is imported."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version"]
    query.append("--format=csv,noheader,nounits")
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        gpus = [line.split(", ") for line in output.stdout.splitlines() if line.count(",") == 2]
    except (OSError, subprocess.SubprocessError):
        gpus = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = gpus[: len([name for name in visible.split(",") if name.strip()])]
    size = int(gpus[0][1]) << 20 if gpus and gpus[0][1].isdecimal() else 0
    names = ", ".join(f"{name} ({mib} MiB)" for name, mib, _ in gpus)
    facts = [f"GPUs: {names or 'none'}", f"driver {gpus[0][2] if gpus else 'none'}"]
    memory = psutil.virtual_memory().total / GB
    facts += [f"{len(os.sched_getaffinity(0))} CPU cores", f"{memory:.0f} GB of host memory"]
    facts += [f"Python {platform.python_version()}", *map(describe_package, PACKAGES)]
    return Machine(len(gpus), size, [*facts, f"code {code_digest()}"])


def describe_package(name: str) -> str:
    """Return a package's name and version."""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


# ---------------------------------------------------------------------------------------- the rows


def verdict_of(check: Check, runs: Runs) -> tuple[str, str]:
    """Return (verdict, text) of a check whose run has ended."""
    run = runs[check.name]
    if run.problem:
        return FAILED, run.problem
    texts = [f"{run.seconds:.0f} s"]
    if check.reference:
        reference = runs.get(check.reference)
        if reference is None:
            return NOT_RUN, f"{texts[0]}; not compared yet, with {check.reference}"
        if reference.problem:
            return NOT_RUN, f"{texts[0]}; not compared, because {check.reference} failed"
        expected = {s: loss for s, loss in reference.losses.items() if s > check.after_step}
        if problem := losses_unlike(run.losses, expected, check.tolerance):
            return FAILED, f"{problem}, compared with {check.reference}"
        difference, _ = largest_difference(run.losses, expected)
        texts.append(f"losses off by at most {difference:.1e} from {check.reference}")
    if check.judge:
        try:
            problem, text = check.judge(run)
        except UNREADABLE as error:
            problem, text = f"the result cannot be read: {error!r}", ""
        if problem:
            return FAILED, problem
        texts.append(text)
    return PASSED, ", ".join(filter(None, texts))


def rows_of(runner: Runner, otherwise: str) -> Rows:
    """Return a row for each check of a part.

    Args:
        otherwise: why a check that has not started did not run.
    """
    rows = []
    for check in runner.checks:
        if check.name in runner.done:
            verdict, text = verdict_of(check, runner.done)
        elif check.name in runner.running:
            verdict, text = NOT_RUN, "it was running when this file was written"
        else:
            verdict, text = NOT_RUN, runner.not_run.get(check.name, otherwise)
        rows.append((check.name, verdict, text))
    return rows


def lines_of(rows: Rows) -> list[str]:
    """Return the rows as a Markdown table, failed checks first."""
    lines = ["| check | result | |", "|---|---|---|"]
    for row in sorted(rows, key=lambda row: row[1] != FAILED):
        cells = [" ".join(cell.replace("|", "/").split()) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def counts_of(rows: Rows) -> str:
    """Return how many checks passed, failed and did not run."""
    verdicts = [verdict for _, verdict, _ in rows]
    return ", ".join(f"{verdicts.count(kind)} {kind}" for kind in (PASSED, FAILED, NOT_RUN))


# -------------------------------------------------------------------------------------- the report


@dataclass
class Report:
    """Writes the report, and two files with the same stem.

    The .json file has what every run measured, and the .log file the output of the failed ones.
    """

    file: Path  # of the report
    command: str  # of this program
    machine: Machine
    parts: dict[str, Runner]
    tables: Callable[[list[tuple[Check, Done]]], Tables]  # of the checks that have ended

    def __post_init__(self) -> None:
        self.printed: set[str] = set()  # checks of the console
        self.otherwise = "not reached yet"  # why a check that has not started did not run
        self.started_at = datetime.datetime.now(datetime.timezone.utc)

    def write(self) -> None:
        """Replace the files, and print the rows that are new."""
        lines = [f"# GPU check: {', '.join(self.parts)}", ""]
        lines += [f"`{self.command}`; {self.started_at:%Y-%m-%d %H:%M} UTC", ""]
        lines += ["; ".join(self.machine.facts), ""]
        for name, runner in self.parts.items():
            rows = rows_of(runner, self.otherwise)
            self.show(name, rows, runner)
            lines += [f"## {name}: {counts_of(rows)}", "", *lines_of(rows), ""]
            ended = [(c, runner.done[c.name]) for c in runner.checks if c.name in runner.done]
            for title, table in self.tables(ended).items():
                lines += [f"### {title}", "", *table, ""]
        write_text(self.file, "\n".join(lines))
        self.write_runs()

    def write_runs(self) -> None:
        """Write the .json file and, if a run failed, the .log file."""
        measured, logs = {}, []
        for part, runner in self.parts.items():
            for name, run in runner.done.items():
                ended = {"code": run.code, "seconds": round(run.seconds, 1)}
                values = {"losses": run.losses, "results": run.results}
                measured[f"{part}: {name}"] = {**ended, **values}
                if run.problem:
                    end = run.log.splitlines()[-LOG_LINES:]
                    logs += [f"==== {part}: {name}: {run.problem}", *end, ""]
        write_text(self.file.with_suffix(".json"), json.dumps(only_finite(measured)))
        if logs:
            write_text(self.file.with_suffix(".log"), "\n".join(logs))

    def show(self, part: str, rows: Rows, runner: Runner) -> None:
        """Print the rows of checks that have come to an end since the last call."""
        for name, verdict, text in rows:
            is_final = verdict != NOT_RUN or name in runner.not_run
            if is_final and f"{part} {name}" not in self.printed:
                self.printed.add(f"{part} {name}")
                print(f"{verdict} {name}: {text}", flush=True)

    def all_rows(self) -> Rows:
        """Return the rows of all parts."""
        return [row for runner in self.parts.values() for row in rows_of(runner, self.otherwise)]
