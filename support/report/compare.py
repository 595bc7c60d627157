"""Compare runs: read their files, and compute the numbers of a comparison.

Two runs and seven strategies are the same case: each row has one or several runs, and the first row
with a completed run is the reference. Imports nothing heavy. comparison_text.py and plots.py show
the numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from support.checkpoints.recognize import newest_of_trainer
from support.cli.ds_config import lookup
from support.errors import UserError
from support.files import atomic
from support.files.user_files import shown
from support.report.causes import Difference, differences_of, facts_of
from support.report.metrics_file import read_metrics
from support.tables import STRATEGIES

# Largest relative difference between losses that rounding explains, by precision. On a GPU fp32
# matrices are multiplied in TF32, which keeps 10 bits of each factor's mantissa.
# docs/COMPARISON.md lists the measurements; TF32 and fp16 were not measured.
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 5e-3, "fp16": 5e-3}
# In TF32, bf16 and fp16 the losses of a single step may differ by percents, where an unusual
# sequence makes the loss jump. If a strategy trains another model, the difference lasts. So in
# these precisions a difference is the median over this many steps.
LASTING_STEPS = 5
# The control does the same work as the reference. If its speed differs by more than this share,
# other load on the machine has changed the speeds.
LARGEST_SPEED_CHANGE = 0.15
TRAINER_DECIMALS = 4  # to which transformers before 5.0 rounds the losses that it logs

# Keys of results.json that must be equal in all runs of a comparison of strategies.
SAME_WORK = """
    model parameters trainable_parameters world_size simulated_world_size device precision
    batch_size gradient_accumulation_steps global_batch_size seq_length seed steps samples
    dataset.sha256 hardware.cpu hardware.cores hardware.gpu versions.torch versions.deepspeed
    versions.transformers
""".split()
# torchrun's report lists the ranks that exited. The one that was killed need not be the first:
# torchrun may name as the cause another rank, which failed because its connection broke.
KILLED = re.compile(r"exitcode\s*: -9 ")
# What reading a number raises from results.json of a run that failed.
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

STATES = ("parameters", "gradients", "optimizer")
ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
# The numbers of a row: those of `numbers_of`, and those relative to the reference.
NUMBERS = """
    memory_bytes planned_bytes planned step_peak_bytes activations logits categories host_categories
    saved host_bytes nvme_bytes samples_per_second samples_per_second_low samples_per_second_high
    tokens_per_second_per_gpu speed speed_low speed_high final_loss difference difference_step
    departs_at departing_loss sent_bytes volume collectives phases_seconds
""".split()


def tolerance_of(precision: str, on_gpu: bool) -> float:
    """Return the largest relative difference between losses that counts as the same model."""
    return TOLERANCES["tf32" if precision == "fp32" and on_gpu else precision]


def lasting_steps(precision: str | None, on_cpu: bool) -> int:
    """Return the number of steps over which a difference between losses is the median."""
    return 1 if precision == "fp32" and on_cpu else LASTING_STEPS


def state_bytes(sizes: dict[str, float]) -> float:
    """Return the sum of the model states in a dict of bytes by kind."""
    return sum(sizes[kind] for kind in STATES)


# ------------------------------------------------------------------------------------------ one run


class Span(NamedTuple):
    """The mean loss of the steps after `start` up to `end`; of one step in our own runs."""

    start: int
    end: int
    loss: float


@dataclass
class RecordedRun:
    """What a run recorded, and how it ended."""

    place: Path  # the output folder, or the file of Trainer
    results: dict = field(default_factory=dict)  # results.json; {} for Trainer
    records: list[dict] = field(default_factory=list)  # of metrics.jsonl, or Trainer's log_history
    # completed, skipped, oom, timeout, failed, interrupted, other_work, or as in results.json
    status: str = "completed"
    reason: str = ""  # why the run did not complete, or what its files lack
    losses: list[Span] = field(default_factory=list)  # in the order of the steps
    evaluations: list[Span] = field(default_factory=list)
    lrs: dict[int, float] = field(default_factory=dict)  # the learning rates, by step
    facts: dict[str, object] = field(default_factory=dict)  # by the names of EFFECTS
    slack: float = 0.0  # largest difference of a loss that comes from its number of decimals
    numbers: dict[str, Any] = field(default_factory=dict)  # see `numbers_of`; {} if not measured

    def __post_init__(self) -> None:
        """Read the losses; of a step that a resumed run repeats the later record counts."""
        self.of_trainer, self.kept = self.place.is_file(), (self.place / "kept.txt").is_file()
        for record in self.records:
            # null: NaN and infinity have no other form in JSON.
            found = {key: math.nan if value is None else value for key, value in record.items()}
            step: int = record["step"]
            for key, spans in (("loss", self.losses), ("eval_loss", self.evaluations)):
                if key not in found:
                    continue
                while spans and spans[-1].end >= step:
                    spans.pop()
                start = step - 1
                if self.of_trainer and key == "loss":  # its loss is the mean since the last record
                    start = spans[-1].end if spans else 0
                spans.append(Span(start, step, found[key]))
            if "loss" in found:
                self.lrs[step] = found.get("learning_rate", found.get("lr", math.nan))

    @property
    def completed(self) -> bool:
        return self.status == "completed"


def read_run(path: Path) -> RecordedRun:
    """Read an output folder, or the trainer_state.json of Hugging Face's Trainer or its folder.

    Raises:
        UserError: there is no run.
    """
    if path.name in ("results.json", "metrics.jsonl"):
        path = path.parent
    if any((path / name).exists() for name in ("results.json", "metrics.jsonl")):
        return read_folder(path)
    file = path if path.is_file() else newest_of_trainer(path) / "trainer_state.json"
    state = read_json(file)
    if not isinstance(state.get("log_history"), list):
        known = "an output folder with results.json and metrics.jsonl, or a trainer_state.json"
        raise UserError(f"{shown(path)} is no run: name {known}.")
    run = RecordedRun(file, records=state["log_history"])
    losses = [span.loss for span in run.losses]
    if all(round(loss, TRAINER_DECIMALS) == loss for loss in losses if math.isfinite(loss)):
        run.slack = 0.5 * 10**-TRAINER_DECIMALS
    keys = {"max_steps", "num_train_epochs", "train_batch_size", "logging_steps"} & state.keys()
    run.facts = {key.replace("num_train_epochs", "epochs"): state[key] for key in keys}
    return run


def read_folder(path: Path) -> RecordedRun:
    """Read the output folder of a run; files that are missing or damaged are left out."""
    records, unreadable = [], []
    with contextlib.suppress(OSError):
        records, unreadable = read_metrics(path / "metrics.jsonl")
    run = RecordedRun(path, read_json(path / "results.json"), records)
    run.status, run.reason = _status(path, run.results)
    try:
        run.facts = facts_of(run.results)
        run.numbers = numbers_of(run.results)
    except DAMAGE as error:
        if run.completed:
            run.reason = f"results.json lacks a number ({type(error).__name__}: {shown(error)})"
    if unreadable:
        damage = f"{len(unreadable)} lines of metrics.jsonl cannot be read"
        run.reason += f"{'; ' * bool(run.reason)}{damage}"
    return run


def _status(folder: Path, results: dict) -> tuple[str, str]:
    """Return (status, reason) of a run, whose folder may hold the files of a comparison.

    These are outcome.txt ("exit N", "timeout N" or "interrupted") and log.txt.
    """
    outcome, _, number = read_text(folder / "outcome.txt").strip().partition(" ")
    if outcome == "timeout":
        return "timeout", f"not finished after {number} s"
    if outcome == "interrupted":
        return "interrupted", "stopped by the user"
    if results.get("status") == "completed" and number in ("0", ""):
        return "completed", ""
    log = read_text(folder / "log.txt")
    if KILLED.search(log):
        sender = "which the kernel sends when the host has no memory left"
        return "oom", f"a rank was killed by SIGKILL, {sender}"
    reason = str(results.get("reason") or last_error(log) or (outcome and f"exit code {number}"))
    if results.get("error_kind") == "missing_requirement":
        return "skipped", reason
    if outcome and results.get("status") != "oom":
        return "failed", reason
    return results.get("status") or "unknown", reason


def last_error(log: str) -> str:
    """Return the script's first error line in a log, or else the last line with a letter or digit.

    Later error lines are of ranks that the launcher stops after the first failure.
    """
    lines = [line.strip() for line in log.splitlines() if any(map(str.isalnum, line))]
    marked = [line.removeprefix("❌ ") for line in lines if line.startswith("❌")]
    return marked[0] if marked else (lines or [""])[-1]


def read_text(path: Path) -> str:
    """Return the text of a file; "" if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_json(path: Path) -> dict:
    """Return the object in a JSON file; {} if there is none."""
    try:
        value = atomic.read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# -------------------------------------------------------------------------------- numbers of a run


def numbers_of(results: dict) -> dict[str, Any]:
    """Return the numbers of a run that a comparison shows; docs/COMPARISON.md explains the keys.

    Memory is that of the rank that holds most.

    Raises:
        one of DAMAGE: results.json lacks a number, as that of a run that failed does.
    """
    memory, on_gpu = results["memory"], results["device"] == "cuda"
    kinds = (*STATES, "buffers", "other")
    by_rank = (memory[f"{where}categories_bytes_by_rank"] for where in ("device_", ""))
    device, anywhere = max(
        zip(*by_rank, strict=True), key=lambda rank: sum(rank[0][kind] for kind in kinds)
    )
    planned = memory.get("predicted_bytes")
    numbers = {
        "memory_bytes": max(memory["peak_bytes"]) if on_gpu else state_bytes(device),
        "planned_bytes": planned and (planned["peak"] if on_gpu else state_bytes(planned)),
        "planned": planned,
        "categories": {kind: device[kind] for kind in kinds},
        "host_categories": {k: anywhere[k] - device[k] for k in ("gradients", "optimizer")},
        "activations": device.get("activations"),
        "logits": device.get("logits"),
        "host_bytes": max(memory["host_peak_bytes"]),
        "nvme_bytes": memory["nvme_bytes"],
    }
    steps = memory.get("step_bytes_by_rank") or [None]
    if steps[0] and (on_gpu or not STRATEGIES[results["strategy"]].offloads):
        numbers["step_peak_bytes"] = max(phase["peak"] for s in steps for phase in s.values())
    if results.get("simulated_world_size"):
        return numbers
    collectives = results.get("communication_per_step") or {}
    if results["world_size"] > 1 and collectives:
        numbers["volume"] = volume_of(collectives, results["parameters"])
    # The spread of the speed is that of the middle 80 percent of the steps.
    speed, seconds = float(results["samples_per_second"]), results["step_seconds"]
    return numbers | {
        "samples_per_second": speed,
        "samples_per_second_low": speed * min(1.0, seconds["median"] / seconds["p90"]),
        "samples_per_second_high": speed * max(1.0, seconds["median"] / seconds["p10"]),
        "tokens_per_second_per_gpu": float(results["tokens_per_second_per_gpu"]),
        "phases_seconds": dict(results["step_phases_seconds"]),
        "final_loss": float(results["train_loss_last"]),
        "collectives": collectives,
        "sent_bytes": results.get("communication_bytes_per_step"),
    }


def volume_of(collectives: dict, parameters: int) -> float:
    """Return the volume of the collectives in units of P, the number of parameters.

    The volume is the number of elements of any type, counted twice for an all-reduce, as in the
    ZeRO paper (arXiv 1910.02054, section 7).
    """
    total = 0.0
    for name, entry in collectives.items():
        kind, dtype = name.split(" ")
        elements = entry["message_bytes"] / ITEM_BYTES.get(dtype, 1)
        total += elements * (2 if kind == "all_reduce" else 1) / parameters
    return total


def medians(values: list[Any]) -> Any:
    """Return the median of numbers, or of the numbers in dicts by key; None if one is None."""
    if any(value is None for value in values):
        return None
    if isinstance(values[0], dict):
        return {key: medians([value.get(key) for value in values]) for key in values[0]}
    return median(values)


# ---------------------------------------------------------------------------------- the comparison


class Point(NamedTuple):
    """A loss of the reference (a) and of a run (b): of one step, or a mean of several steps."""

    first: int
    last: int
    a: float
    b: float
    relative: float  # difference relative to the reference; see `points_of`

    @property
    def steps(self) -> str:
        one = self.first == self.last
        return f"step {self.last:,}" if one else f"steps {self.first:,} to {self.last:,} (means)"


@dataclass
class Row:
    """The runs of one strategy, or a single run; `Comparison` fills in the rest."""

    name: str
    runs: list[RecordedRun]
    numbers: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(NUMBERS))  # medians
    points: list[Point] = field(default_factory=list)  # losses of the steps that the reference has
    evaluations: list[Point] = field(default_factory=list)
    # The first loss beyond the tolerance; or, if all training losses agree, the first evaluation.
    first: Point | None = None
    largest: Point | None = None  # the training loss that differs most
    differences: list[Difference] = field(default_factory=list)  # of facts
    causes: list[Difference] = field(default_factory=list)  # of `first`, the most likely first

    @property
    def completed(self) -> list[RecordedRun]:
        return [run for run in self.runs if run.completed]

    @property
    def status(self) -> str:
        broken = [run.status for run in self.runs if not run.completed]
        return broken[0] if broken else "completed" if self.runs else "not run"

    @property
    def reason(self) -> str:
        return next((run.reason for run in self.runs if not run.completed), "")

    @property
    def kept(self) -> bool:
        return any(run.kept for run in self.runs)

    @property
    def measured(self) -> bool:
        return self.numbers["memory_bytes"] is not None


@dataclass
class Comparison:
    """Rows of runs, compared with the first row; of strategies, with the first that completed."""

    name: str
    rows: list[Row]
    tolerance: float | None  # largest relative loss difference that counts as equal
    of_strategies: bool = False  # the rows are strategies, whose runs must do the same work
    step_cap: int | None = None  # the default --max_steps that was added to the user's arguments
    # The reference run again with a higher learning rate, to see whether the losses would show a
    # difference. It is not in `rows`.
    control: Row | None = None

    def __post_init__(self) -> None:
        candidates = [row for row in self.rows if row.completed or not self.of_strategies]
        self.reference = candidates[0] if candidates else None
        self.lasting = 1  # number of steps over which a loss difference is the median
        self.facts: dict = {}  # results.json of the reference
        if self.reference:
            base = (self.reference.completed or self.reference.runs)[0]
            self.facts = base.results
        self.work = {key: lookup(self.facts, key) for key in SAME_WORK} if self.facts else {}
        self.simulated = bool(self.facts.get("simulated_world_size"))
        self.on_gpu = self.facts.get("device") == "cuda"
        if self.reference and self.of_strategies:
            precision = self.facts["precision"]
            self.tolerance = self.tolerance or tolerance_of(precision, self.on_gpu)
            self.lasting = lasting_steps(precision, not self.on_gpu)
        for row in [*self.rows, *filter(None, [self.control])] if self.reference else []:
            self._compare(row, base)
        if not (self.control and self.control.completed):
            self.control = None
        others = [row for row in self.rows if row is not self.reference]
        # Rows with a loss that could be compared, and those whose losses differ
        self.compared = [row for row in others if row.points or row.evaluations]
        self.departing = [row for row in self.rows if row.first]
        # Whether the losses of all compared rows agree; None if none could be compared
        self.same_model = not self.departing if self.compared else None
        # Whether neither the control nor RESUME=1 indicates that the load differed
        self.speeds_are_comparable = len({row.kept for row in self.rows if row.completed}) < 2
        if self.control and (speed := self.control.numbers["speed"]):
            self.speeds_are_comparable = abs(speed - 1) <= LARGEST_SPEED_CHANGE

    @property
    def exit_code(self) -> int:
        """1 if a loss differs, a strategy failed or nothing could be compared; else 0."""
        if not self.of_strategies:
            return 0 if self.same_model and len(self.compared) == len(self.rows) - 1 else 1
        failed = any(row.status not in ("completed", "skipped") for row in self.rows)
        return int(self.reference is None or bool(self.departing) or failed)

    def _compare(self, row: Row, base: RecordedRun) -> None:
        """Fill in a row: the medians of its runs, and what is relative to the reference."""
        for run, (key, expected) in itertools.product(row.completed, self.work.items()):
            if self.of_strategies and (value := lookup(run.results, key)) != expected:
                run.status = "other_work"
                run.reason = f"{key} is {shown(value)}, the reference's is {shown(expected)}"
        runs = row.completed if self.of_strategies else row.runs
        measured = [run.numbers for run in row.completed if run.numbers]
        if measured:
            row.numbers |= {key: medians([run.get(key) for run in measured]) for key in measured[0]}
        if len(measured) > 1 and not self.simulated:
            speeds = [run["samples_per_second"] for run in measured]
            ends = {"samples_per_second_low": min(speeds), "samples_per_second_high": max(speeds)}
            row.numbers |= ends
        for run in runs:
            slack = base.slack + run.slack
            row.points += points_of(base.losses, run.losses, self.lasting, slack)
            row.evaluations += points_of(base.evaluations, run.evaluations, 1, slack)
        for points in (row.evaluations, row.points):
            beyond = [point for point in points if point.relative > (self.tolerance or 0)]
            row.first = min(beyond, key=lambda point: point.last, default=row.first)
        if runs:
            row.differences = compare_facts(base, runs[0])
            row.causes = self._causes_of(row)
        if row.points:
            row.largest = max(row.points, key=lambda point: point.relative)
            row.numbers |= {"difference": row.largest.relative}
            row.numbers |= {"difference_step": row.largest.last}
        if row.first in row.points:
            row.numbers |= {"departs_at": row.first.last, "departing_loss": row.first.b}
        if row.measured and self.reference and self.reference.measured:
            self._add_ratios(row, self.reference.numbers)

    def _causes_of(self, row: Row) -> list[Difference]:
        """Return the differences that explain the first differing loss, the most likely first.

        What can change step 1 would have been seen there: of several causes, those that begin to
        have an effect just before the first differing step come first.
        """
        if row.first is None:
            return []
        on = "losses" if row.first in row.points else "evaluations"
        latest = row.first.last + self.lasting - 1  # the first medians share their steps
        effects = [(entry, entry.effect) for entry in row.differences if entry.effect.on == on]
        found = [entry for entry, effect in effects if effect.first_step <= latest]
        return sorted(found, key=lambda entry: -entry.effect.first_step)

    def _add_ratios(self, row: Row, reference: dict[str, Any]) -> None:
        """Add the memory saved and the relative speed."""
        numbers, ranks = row.numbers, self.facts.get("simulated_world_size")
        shards = (ranks or self.facts["world_size"]) > 1
        shards = shards or STRATEGIES[row.completed[0].results["strategy"]].offloads
        if row is not self.reference and reference["memory_bytes"] and shards:
            numbers["saved"] = 1 - numbers["memory_bytes"] / reference["memory_bytes"]
        if speed := reference["samples_per_second"]:
            for suffix in ("", "_low", "_high"):
                numbers[f"speed{suffix}"] = numbers[f"samples_per_second{suffix}"] / speed


def compare_runs(runs: list[RecordedRun], tolerance: float) -> Comparison:
    """Compare runs of any kind with the first one, step by step."""
    rows = [Row(name, [run]) for name, run in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", runs, strict=False)]
    return Comparison(" ".join(str(run.place) for run in runs), rows, tolerance)


def read_comparison(folder: Path, tolerance: float | None = None) -> Comparison:
    """Read and compare the strategies that compare_strategies.sh left in <strategy>/<repeat>/.

    Args:
        tolerance: replaces the value in TOLERANCES.
    """
    planned_names = read_text(folder / "planned.txt").split()
    names = [n for n in STRATEGIES if n in planned_names or (folder / n).is_dir()]
    *rows, control = (_read_row(folder / name) for name in (*names, "control"))
    cap = read_text(folder / "step_cap.txt").strip()
    step_cap = int(cap) if cap else None
    return Comparison(folder.resolve().name, rows, tolerance, True, step_cap, control)


def _read_row(folder: Path) -> Row:
    repeats = [path for path in folder.glob("*") if path.name.isdecimal()]
    runs = [read_strategy_run(path) for path in sorted(repeats, key=lambda path: int(path.name))]
    return Row(folder.name, runs)


def read_strategy_run(folder: Path) -> RecordedRun:
    """Read a run of compare_strategies.sh; it has failed unless its files have all numbers."""
    run = read_folder(folder)
    if run.completed and not run.numbers:
        run.status, run.reason = "failed", f"{run.reason}: was it edited, or made by --eval_only?"
    elif run.completed and not run.results.get("simulated_world_size"):
        if [span.end for span in run.losses] != [*range(1, run.results.get("steps", 0) + 1)]:
            run.status, run.reason = "failed", "metrics.jsonl does not hold every step"
    elif run.status not in ("completed", "skipped", "oom", "timeout", "interrupted"):
        run.status = "failed"
    return run


def compare_facts(a: RecordedRun, b: RecordedRun) -> list[Difference]:
    """Return what differs between two runs; of a run of Trainer only what both recorded."""
    different_kinds = a.of_trainer != b.of_trainer
    # A run of an earlier version recorded no flags, one that failed early no run signature.
    complete = all(run.results.get(key) for run in (a, b) for key in ("flags", "run_signature"))
    steps = sorted(a.lrs.keys() & b.lrs.keys())
    rate = None
    if steps and not different_kinds:
        rate = next((step for step in steps if relative(a.lrs[step], b.lrs[step]) > 1e-9), 0)
    only_common = different_kinds or not (complete or a.of_trainer)
    return differences_of(a.facts, b.facts, only_common, rate)


def relative(a: float, b: float, slack: float = 0.0) -> float:
    """Return the difference relative to `a`; infinite if one is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if repr(a) == repr(b) else math.inf
    return max(0.0, abs(a - b) - slack) / max(abs(a), 1e-12)


def points_of(a: list[Span], b: list[Span], lasting: int, slack: float) -> list[Point]:
    """Return the losses of the steps that both runs have.

    Runs that log means over different numbers of steps are compared in the means between the steps
    at which both logged.

    Args:
        lasting: number of steps of which each difference is the median: the step and those before
            it. The first differences are all the median of the first `lasting` steps.
        slack: subtracted from each difference.
    """
    edges = [{edge for span in spans for edge in (span.start, span.end)} for spans in (a, b)]
    starts = [{span.start: span for span in spans} for spans in (a, b)]
    found = []
    for start, end in itertools.pairwise(sorted(edges[0] & edges[1])):
        mean, other = (_mean_loss(spans, start, end) for spans in starts)
        if mean is not None and other is not None:
            found.append((start + 1, end, mean, other))
    per_step = [relative(a, b, slack) for _, _, a, b in found]
    return [
        Point(*point, median(per_step[max(0, number - lasting) : max(number, lasting)]))
        for number, point in enumerate(found, 1)
    ]


def _mean_loss(spans: dict[int, Span], start: int, end: int) -> float | None:
    """Return the mean loss of the steps after `start` up to `end`; None if one has no loss."""
    total, step = 0.0, start
    while step < end:
        if step not in spans:
            return None
        total += spans[step].loss * (spans[step].end - step)
        step = spans[step].end
    return total / (end - start)
