"""Read the runs of a comparison, check that they did the same work, and compute its numbers.

Imports nothing heavy. verdict.py draws the conclusions; tables.py and plots.py show the numbers.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from support.cli.ds_config import lookup
from support.files.user_files import shown
from support.strategy import STRATEGIES, Strategy

# Largest relative difference between losses that rounding explains, by precision. On a GPU fp32
# matrices are multiplied in TF32, which keeps 10 bits of each factor's mantissa.
# docs/COMPARISON.md lists the measurements; TF32 and fp16 were not measured.
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 5e-3, "fp16": 5e-3}
# In TF32, bf16 and fp16 the losses of a single step may differ by percents, where an unusual
# sequence makes the loss jump. If a strategy trains another model, the difference lasts. So in
# these precisions a difference is the median over this many steps.
LASTING_STEPS = 5

# Keys of results.json whose values must be equal in all runs of a comparison, and their types.
SAME_WORK = {
    "model": str,
    "parameters": int,
    "trainable_parameters": int,
    "world_size": int,
    "simulated_world_size": int | None,
    "device": str,
    "precision": str,
    "batch_size": int,
    "gradient_accumulation_steps": int,
    "global_batch_size": int,
    "seq_length": int,
    "seed": int,
    "steps": int,
    "samples": int,
    "dataset.sha256": str,
    "hardware.cpu": str,
    "hardware.cores": int,
    "hardware.gpu": str | None,
    "versions.torch": str | None,
    "versions.deepspeed": str | None,
    "versions.transformers": str | None,
}
# Keys of further values that the report shows.
PROVENANCE = {
    "started_at": str,
    "dataset.name": str,
    "hardware.ram_bytes": int,
    "hardware.gpu_memory_bytes": int | None,
    "versions": dict,
}
# torchrun's report lists the ranks that exited. The one that was killed need not be the first:
# torchrun may name as the cause another rank, which failed because its connection broke.
KILLED = re.compile(r"exitcode\s*: -9 ")
# What reading a number from a damaged results.json may raise.
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

STATES = ("parameters", "gradients", "optimizer")
PHASES = ("data", "forward", "backward", "update")
ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


def tolerance_of(precision: str, on_gpu: bool) -> float:
    """Return the largest relative difference between losses that counts as the same model."""
    return TOLERANCES["tf32" if precision == "fp32" and on_gpu else precision]


def lasting_steps(precision: str | None, on_cpu: bool) -> int:
    """Return the number of steps over which a difference between losses is the median.

    It is 1 for fp32 on a CPU, where rounding is small enough to judge each step separately.
    """
    return 1 if precision == "fp32" and on_cpu else LASTING_STEPS


def state_bytes(sizes: dict[str, float]) -> float:
    """Return the sum of the model states in a dict of bytes by kind."""
    return sum(sizes[kind] for kind in STATES)


# ------------------------------------------------------------------------------------------ one run


@dataclass
class Attempt:
    """One run of one strategy: its files, and the outcome that compare_strategies.sh recorded."""

    folder: Path  # <strategy>/<repeat>
    strategy: str
    status: str  # completed, skipped, oom, timeout, failed, interrupted or other_work
    reason: str  # why the run did not complete; empty otherwise
    command: str
    results: dict  # results.json, or {}
    steps: list[dict]  # the record of each optimizer step in metrics.jsonl

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    @property
    def simulated_ranks(self) -> int | None:
        """The number of ranks of a memory simulation; None for a run that trained."""
        return self.results.get("simulated_world_size")

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    def number(self, key: str) -> float:
        """Return the number at a dotted key of results.json; see `_numbers`."""
        return _numbers([lookup(self.results, key)], key)[0]

    def largest(self, key: str) -> float:
        """Return the largest number in the list at a dotted key of results.json."""
        return max(_numbers(lookup(self.results, key), key))


def read_attempt(folder: Path) -> Attempt:
    """Read the folder of one run, <strategy>/<repeat>.

    A run with a missing, incomplete or damaged file has the status "failed".
    """
    results = read_json(folder / "results.json")
    steps = [record for record in read_json_lines(folder / "metrics.jsonl") if "loss" in record]
    status, reason = _status(folder, results, len(steps))
    command = _read_text(folder / "command.txt").strip() or str(results.get("command", ""))
    attempt = Attempt(folder, folder.parent.name, status, reason, command, results, steps)
    if attempt.completed:
        try:
            _check_values(attempt)
        except DAMAGE as error:
            attempt.status = "failed"
            attempt.reason = (
                "results.json or metrics.jsonl cannot be used "
                f"({type(error).__name__}: {shown(str(error))}): was it edited, or made by "
                "--eval_only or an older version?"
            )
    return attempt


def _check_values(attempt: Attempt) -> None:
    """Check every number and text that the report shows; raise one of DAMAGE."""
    row = Row(attempt.strategy, [attempt])
    _measure(row)
    for key, kind in {**SAME_WORK, **PROVENANCE}.items():
        value = lookup(attempt.results, key)
        if not isinstance(value, kind):
            raise ValueError(f"{key} is {value!r}")
        if isinstance(value, int):
            attempt.number(key)
    if attempt.results["gradient_accumulation_steps"] < 1:
        raise ValueError("gradient_accumulation_steps is 0")
    if attempt.results["hardware"]["gpu"]:
        attempt.number("hardware.gpu_memory_bytes")
    if not attempt.simulated_ranks:
        attempt.number("train_loss_first")
        _numbers(attempt.losses, "a loss")
        _numbers([step.get("lr") for step in attempt.steps], "a learning rate")
        _compare(row, row, TOLERANCES[attempt.results["precision"]], 1)


def _numbers(values: Iterable, name: str) -> list[float]:
    """Return numbers that were read from a file as a list.

    Raises:
        ValueError: one is missing, or is not a finite, non-negative number; the message names it.
    """
    values = list(values)
    for value in values:
        if not (isinstance(value, int | float) and 0 <= value < 1e30):
            raise ValueError(f"{name} is {value!r}")
    return values


def _status(folder: Path, results: dict, steps: int) -> tuple[str, str]:
    """Return (status, reason) of a run; see `Attempt`.

    Args:
        folder: holds outcome.txt ("exit N", "timeout N" or "interrupted") and log.txt.
        steps: number of optimizer steps in metrics.jsonl.
    """
    outcome, _, number = _read_text(folder / "outcome.txt").strip().partition(" ")
    if outcome == "timeout":
        return "timeout", f"not finished after {number} s"
    if outcome == "interrupted":
        return "interrupted", "stopped by the user"
    written_status = results.get("status")
    if written_status == "completed" and outcome in ("exit", "") and number in ("0", ""):
        if not results.get("simulated_world_size") and steps != results.get("steps"):
            return "failed", "metrics.jsonl does not hold every step"
        return "completed", ""
    log = _read_text(folder / "log.txt")
    if KILLED.search(log):
        sender = "which the kernel sends when the host has no memory left"
        return "oom", f"a rank was killed by SIGKILL, {sender}"
    code = f"ended with exit code {number or 'unknown'}"
    reason = str(results.get("reason") or last_error(log) or code)
    if written_status == "oom":
        return "oom", reason
    return ("skipped" if results.get("error_kind") == "missing_requirement" else "failed"), reason


def last_error(log: str) -> str:
    """Return the script's first error line in a log, or else the last line with a letter or digit.

    Later error lines are of ranks that the launcher stops after the first failure.
    """
    lines = [line.strip() for line in log.splitlines() if any(map(str.isalnum, line))]
    marked = [line.removeprefix("❌ ") for line in lines if line.startswith("❌")]
    return marked[0] if marked else (lines or [""])[-1]


def _read_text(path: Path) -> str:
    # Only regular files: reading a pipe would block.
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError:
        return ""


def read_json(path: Path) -> dict:
    """Return the object in a JSON file; {} if there is none."""
    return next(iter(_objects([_read_text(path)])), {})


def read_json_lines(path: Path) -> list[dict]:
    """Return the objects in a file with one per line, up to the first line that is not JSON.

    The last line of a run that was killed may be incomplete.
    """
    return _objects(_read_text(path).splitlines())


def _objects(texts: list[str]) -> list[dict]:
    values = []
    for text in texts:
        try:
            values.append(json.loads(text))
        except (ValueError, RecursionError):  # not JSON, thousands of digits, deep nesting
            break
    return [value for value in values if isinstance(value, dict)]


# ----------------------------------------------------------------------------------------- all runs


# A number; None if there is none, as of a strategy that did not complete.
Measured = Any


@dataclass
class Row:
    """One strategy: medians over its completed repeats.

    Bytes are those of the rank that needs most, unless the comment says otherwise. None: not known.
    """

    strategy: str
    attempts: list[Attempt]
    # Peak of the GPU's allocator; on a CPU the model states that a GPU would hold.
    memory_bytes: Measured = None
    planned_bytes: float | None = None  # the estimate of memory_bytes (support/memory/estimate.py)
    planned: dict[str, float] = field(default_factory=dict)  # the whole estimate, by kind
    # Largest sum of live tensors in the measured step; not known on a CPU for ordinary runs, nor
    # where part of the tensors would not be on a GPU.
    step_peak_bytes: float | None = None
    activations: float | None = None  # bytes at the end of forward, if the run measured them
    logits: float | None = None
    # Live bytes at the end of backward by category: on the device, and in host memory.
    categories: dict[str, float] = field(default_factory=dict)
    host_categories: dict[str, float] = field(default_factory=dict)
    # 1 minus the ratio of memory_bytes to the reference's. None for the reference, and for a
    # strategy that only shards, on one rank.
    saved: float | None = None
    host_bytes: Measured = None  # peak of the process in host memory
    nvme_bytes: Measured = None  # of all ranks
    # _low and _high: the slowest and fastest repeat; with one repeat the tenth and ninetieth
    # percentile of its steps.
    samples_per_second: Measured = None
    samples_per_second_low: Measured = None
    samples_per_second_high: Measured = None
    tokens_per_second_per_gpu: Measured = None
    speed: Measured = None  # samples_per_second relative to the reference's
    speed_low: Measured = None
    speed_high: Measured = None
    final_loss: Measured = None
    difference: Measured = None  # largest difference of a loss; see `differences`
    difference_step: Measured = None
    departs_at: Measured = None  # first step whose difference exceeds the tolerance
    departing_loss: Measured = None  # the loss of that step
    sent_bytes: float | None = None  # by a rank per step, the mean over the ranks
    volume: Measured = None  # of the collectives of a step, in units of P; see `volumes`
    collectives: dict = field(default_factory=dict)  # results.json's communication_per_step
    phases_seconds: dict[str, float] = field(default_factory=dict)  # of a step

    @property
    def completed(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.completed]

    @property
    def incomplete(self) -> Attempt | None:
        """The first repeat that did not complete."""
        return next((attempt for attempt in self.attempts if not attempt.completed), None)

    @property
    def status(self) -> str:
        if not self.attempts:
            return "not run"
        return self.incomplete.status if self.incomplete else "completed"

    @property
    def definition(self) -> Strategy:
        """What the strategy shards and offloads; the control is dp with another learning rate."""
        return STRATEGIES["dp" if self.strategy == "control" else self.strategy]

    @property
    def failed(self) -> bool:
        """Whether the strategy neither completed nor was skipped; a skip is not a failure."""
        return self.status not in ("completed", "skipped")


@dataclass
class Comparison:
    """All strategies of one comparison."""

    name: str  # of the comparison's folder
    rows: list[Row]  # in the order of STRATEGIES
    # The row that the others are compared with, the first that completed: dp's, unless dp failed or
    # was left out. None if none completed.
    reference: Row | None
    step_cap: int | None  # the default --max_steps that was added to the user's arguments
    tolerance: Measured  # largest relative loss difference that counts as the same model
    work: dict = field(default_factory=dict)  # the reference's values of SAME_WORK
    # The reference run again with a higher learning rate, to see whether the losses would show a
    # difference. It is not in `rows`.
    control: Row | None = None

    @property
    def simulated(self) -> bool:
        """Whether the runs are memory simulations, which have no speed and no losses."""
        return bool(self.work.get("simulated_world_size"))

    @property
    def trained(self) -> bool:
        """Whether there are completed runs that are no simulations."""
        return self.reference is not None and not self.simulated

    @property
    def on_gpu(self) -> bool:
        return self.work.get("device") == "cuda"

    @property
    def lasting(self) -> int:
        """Number of steps over which a loss difference is the median."""
        return lasting_steps(self.work.get("precision"), self.work.get("device") == "cpu")

    @property
    def repeated(self) -> bool:
        """Whether there are several repeats, so that the spread is that of the repeats."""
        return any(len(row.attempts) > 1 for row in self.rows)

    @property
    def compared(self) -> list[Row]:
        """Completed rows other than the reference."""
        return [row for row in self.rows if row.completed and row is not self.reference]

    @property
    def same_model(self) -> bool | None:
        """Whether all compared strategies train the same model; None if none could be compared."""
        return not self.departing if self.compared and not self.simulated else None

    @property
    def commands(self) -> list[str]:
        """The command line of each run."""
        return [run.command for row in self.rows for run in row.attempts if run.command]

    @property
    def facts(self) -> dict:
        """results.json of the reference's first completed run, or {}."""
        return self.reference.completed[0].results if self.reference else {}

    @property
    def departing(self) -> list[Row]:
        """Rows of the strategies that do not train the same model."""
        return [row for row in self.rows if row.departs_at is not None]

    @property
    def exit_code(self) -> int:
        """1 if a loss curve departs, a strategy failed or nothing completed; else 0."""
        return int(
            self.reference is None or bool(self.departing) or any(row.failed for row in self.rows)
        )


def read_comparison(folder: Path, tolerance: float | None = None) -> Comparison:
    """Read <folder>/<strategy>/<repeat>/ and compare.

    Args:
        folder: the folder that compare_strategies.sh filled; its planned.txt names strategies that
            may not have run yet.
        tolerance: replaces the value in TOLERANCES.
    """
    planned_names = _read_text(folder / "planned.txt").split()
    rows = [
        _read_row(folder / name)
        for name in STRATEGIES
        if name in planned_names or (folder / name).is_dir()
    ]
    reference = next((row for row in rows if row.completed), None)
    cap = _read_text(folder / "step_cap.txt").strip()
    step_cap = int(cap) if cap.isdecimal() else None
    comparison = Comparison(folder.resolve().name, rows, reference, step_cap, tolerance)
    if reference is None:
        return comparison
    results = comparison.facts
    comparison.work = {key: lookup(results, key) for key in SAME_WORK}
    comparison.tolerance = tolerance or tolerance_of(results["precision"], comparison.on_gpu)
    control = _read_row(folder / "control")
    for row in (*rows, control):
        _set_other_work_apart(row, comparison.work)
        _measure(row)
    for row in (*rows, control):
        _compare(row, reference, comparison.tolerance, comparison.lasting)
    comparison.control = control if control.completed else None
    return comparison


def _read_row(folder: Path) -> Row:
    repeats = [path for path in folder.glob("*") if path.name.isdecimal()]
    repeats.sort(key=lambda path: int(path.name))
    return Row(folder.name, [read_attempt(path) for path in repeats])


def _set_other_work_apart(row: Row, work: dict) -> None:
    """Set the status "other_work" for runs that did not do the reference's work.

    A run with another batch size, seed, text or library version proves nothing, so its numbers are
    left out.
    """
    for attempt in row.completed:
        for key, expected in work.items():
            if (value := lookup(attempt.results, key)) != expected:
                attempt.status = "other_work"
                attempt.reason = f"{key} is {value}, the reference's is {expected}"


def _measure(row: Row) -> None:
    """Fill in the fields that do not depend on the reference."""
    if row.completed:
        _measure_memory(row)
        if not row.completed[0].simulated_ranks:
            _measure_speed(row)
            _measure_traffic(row)


def _measure_memory(row: Row) -> None:
    kinds = (*STATES, "buffers", "other")
    fullest = []  # (bytes on the device, bytes anywhere), by kind, of one rank of each repeat
    for attempt in row.completed:
        memory = attempt.results["memory"]
        by_rank = (memory[f"{where}categories_bytes_by_rank"] for where in ("device_", ""))
        ranks = zip(*by_rank, strict=True)
        fullest.append(max(ranks, key=lambda rank: sum(rank[0][kind] for kind in kinds)))
    row.categories = {
        kind: median(_numbers([device[kind] for device, _ in fullest], kind)) for kind in kinds
    }
    for kind in ("gradients", "optimizer"):
        in_host = [anywhere[kind] - device[kind] for device, anywhere in fullest]
        row.host_categories[kind] = median(_numbers(in_host, kind))
    on_gpu = row.completed[0].results["device"] == "cuda"
    peak = median(attempt.largest("memory.peak_bytes") for attempt in row.completed)
    row.memory_bytes = peak if on_gpu else state_bytes(row.categories)
    row.host_bytes = median(attempt.largest("memory.host_peak_bytes") for attempt in row.completed)
    row.nvme_bytes = median(attempt.number("memory.nvme_bytes") for attempt in row.completed)

    memory = row.completed[0].results["memory"]
    if memory.get("predicted_bytes"):
        row.planned = memory["predicted_bytes"]
        _numbers(row.planned.values(), "memory.predicted_bytes")
        row.planned_bytes = row.planned["peak"] if on_gpu else state_bytes(row.planned)
    ranks = memory["device_categories_bytes_by_rank"]
    if ranks[0].get("activations") is not None:
        row.activations = max(_numbers([rank["activations"] for rank in ranks], "activations"))
        row.logits = max(_numbers([rank["logits"] for rank in ranks], "logits"))
    steps = memory.get("step_bytes_by_rank") or [None]
    if steps[0] and (on_gpu or not row.definition.offloads):
        peaks = [phase["peak"] for step in steps for phase in step.values()]
        row.step_peak_bytes = max(_numbers(peaks, "memory.step_bytes_by_rank"))


def _measure_speed(row: Row) -> None:
    def numbers(key: str) -> list[float]:
        return [attempt.number(key) for attempt in row.completed]

    speeds = numbers("samples_per_second")
    row.samples_per_second = median(speeds)
    row.tokens_per_second_per_gpu = median(numbers("tokens_per_second_per_gpu"))
    row.final_loss = median(numbers("train_loss_last"))
    row.phases_seconds = {
        phase: median(numbers(f"step_phases_seconds.{phase}")) for phase in PHASES
    }
    # With one repeat: the spread of its steps, without the slowest and the fastest tenth.
    if len(row.attempts) == 1:
        results, steps = row.completed[0].results, row.completed[0].steps
        rates = [step["tokens_per_second"] for step in steps[results["warmup_steps_excluded"] :]]
        rates = sorted(_numbers(rates, "tokens_per_second"))
        tenth = (len(rates) - 1) // 10
        speeds = [rate / results["seq_length"] for rate in rates[tenth : len(rates) - tenth]]
    row.samples_per_second_low, row.samples_per_second_high = min(speeds), max(speeds)


def _measure_traffic(row: Row) -> None:
    key = "communication_bytes_per_step"
    counted = [attempt for attempt in row.completed if attempt.results.get(key) is not None]
    if counted:
        row.sent_bytes = median(attempt.number(key) for attempt in counted)
        results = counted[0].results
        row.collectives = results["communication_per_step"]
        if results["world_size"] > 1:
            volume = sum(volumes(row.collectives, results["parameters"]).values())
            row.volume = _numbers([volume], "communication_per_step")[0]


def volumes(collectives: dict, parameters: int) -> dict[str, float]:
    """Return the volume of each kind of collective, in units of P.

    The volume is the number of elements of any type, counted twice for an all-reduce, as in the
    ZeRO paper.

    Returns:
        {"all_gather": …, "all_reduce": …, …}
    """
    totals: dict[str, float] = defaultdict(float)
    for name, entry in collectives.items():
        kind, dtype = name.split(" ")
        elements = entry["message_bytes"] / ITEM_BYTES.get(dtype, 1) / parameters
        totals[kind] += elements * (2 if kind == "all_reduce" else 1)
    return totals


def _compare(row: Row, reference: Row, tolerance: float, lasting: int) -> None:
    """Fill in the fields that are relative to the reference."""
    if not row.completed:
        return
    first = row.completed[0]
    several_ranks = (first.simulated_ranks or first.results["world_size"]) > 1
    if row is not reference and (several_ranks or row.definition.offloads):
        row.saved = 1 - row.memory_bytes / reference.memory_bytes
    if first.simulated_ranks:
        return
    base = reference.samples_per_second
    row.speed = row.samples_per_second / base
    row.speed_low = row.samples_per_second_low / base
    row.speed_high = row.samples_per_second_high / base
    expected = reference.completed[0]
    points = [
        (difference, step, attempt.losses[step - 1])
        for attempt in row.completed
        for step, difference in enumerate(differences(attempt, expected, lasting), 1)
    ]
    row.difference, row.difference_step, _ = max(points, key=lambda point: point[0])
    beyond = [(step, loss) for difference, step, loss in points if difference > tolerance]
    if beyond:
        row.departs_at, row.departing_loss = min(beyond, key=lambda point: point[0])


def differences(attempt: Attempt, reference: Attempt, lasting: int) -> list[float]:
    """Return the relative difference of the loss from the reference's, step by step.

    Args:
        attempt, reference: runs with the same number of steps.
        lasting: number of steps of which each value is the median: the step and those before it.
            The first values are all the median of the first `lasting` steps.
    Raises:
        ValueError: the numbers of steps differ.
    """
    pairs = zip(attempt.losses, reference.losses, strict=True)
    per_step = [abs(loss - expected) / max(abs(expected), 1e-12) for loss, expected in pairs]
    return [
        median(per_step[max(0, step - lasting) : max(step, lasting)])
        for step in range(1, len(per_step) + 1)
    ]
