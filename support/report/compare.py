"""Compare runs: read their files, and compute the numbers of a comparison.

Two runs and seven strategies are the same case: the first run is the reference. Imports nothing
heavy. comparison_text.py and plots.py show the numbers.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from support.checkpoints.recognize import newest_of_trainer
from support.errors import UserError
from support.files import atomic
from support.files.json_types import JsonObject
from support.files.user_files import shown
from support.report.causes import Difference, causes_of, differences_of
from support.report.metrics_file import read_metrics
from support.report.results_types import PHASES, wrong_key
from support.strategies.table import STRATEGIES

# In TF32, bf16 and fp16 the losses of a single step may differ by percents where an unusual
# sequence makes the loss jump; if a strategy trains another model, the difference lasts. So in
# these precisions a difference is the median over this many steps.
LASTING_STEPS = 5


class Tolerance(NamedTuple):
    """The largest relative differences that rounding explains."""

    loss: float
    grad_norm: float
    steps: int  # of which each difference is the median


# By precision. docs/COMPARISON.md lists the measurements.
TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-3, 1),
    # fp32 matrices on a GPU: 10 bits of each factor's mantissa
    "tf32": Tolerance(1e-3, 1e-2, LASTING_STEPS),
    "bf16": Tolerance(5e-3, 5e-2, LASTING_STEPS),
    "fp16": Tolerance(5e-3, 5e-2, LASTING_STEPS),
}
# The control does the same work as the reference. If its speed differs by more than this share,
# other load on the machine has changed the speeds. docs/COMPARISON.md has the measurements.
LARGEST_SPEED_CHANGE = 0.25

# In torchrun's report of the ranks that exited. The one that was killed need not be the first.
KILLED = re.compile(r"exitcode\s*: -9 ")
STATES = ("parameters", "gradients", "optimizer")
ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}

# The values of a key of metrics.jsonl: of a loss the mean of the steps from the first to the last.
Curve = dict[tuple[int, int], float]


# ------------------------------------------------------------------------------------------ one run


class Point(NamedTuple):
    """A value of the reference (a) and of a run (b): of one step, or a mean of several steps."""

    of: str  # "loss", "grad_norm" or "eval_loss"
    first: int
    last: int
    a: float
    b: float
    relative: float  # difference relative to the reference; see `points_of`


@dataclass
class RecordedRun:
    """What a run recorded, and how it ended; `Comparison` fills in what is below `repeats`."""

    place: Path  # the output folder, or the file of Trainer
    records: list[dict]  # of metrics.jsonl, or Trainer's log_history
    results: dict = field(default_factory=dict)  # results.json; {} for Trainer
    seconds: int | None = None  # of the whole process, if compare_strategies.sh started it
    # completed, skipped, oom, timeout, failed, interrupted, not run, or as in results.json
    status: str = "completed"
    reason: str = ""  # why the run did not complete
    numbers: JsonObject = field(default_factory=dict)  # see `numbers_of`; {} if not measured
    repeats: list[RecordedRun] = field(default_factory=list)  # this one too; see `read_strategy`
    name: str = ""  # in the report
    unreadable: list[int] = field(default_factory=list)  # numbers of lines of metrics.jsonl
    points: list[Point] = field(default_factory=list)  # in common with the reference
    tolerance: Tolerance = TOLERANCES["fp32"]  # of the differences from the reference
    # The first point of each kind beyond the tolerance, the losses first.
    departures: list[Point] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)  # of facts
    causes: list[Difference] = field(default_factory=list)  # of `first`, the most likely first

    @property
    def of_trainer(self) -> bool:
        return self.place.is_file()

    def curve(self, key: str) -> Curve:
        """Return the values of "loss", "grad_norm" or "eval_loss"; a loss of null is NaN.

        Norms that are missing, or not finite because fp16 overflowed, are left out.
        """
        found, first = {}, 1
        for record in self.records:
            if key not in record:
                continue
            step, value = record["step"], record[key]
            # Trainer's loss is the mean since its last record.
            start = first if self.of_trainer and key == "loss" else step
            first = step + 1
            if key != "grad_norm":
                found[start, step] = math.nan if value is None else value
            elif isinstance(value, float | int) and 0 <= value < math.inf:
                found[step, step] = value
        return found

    @property
    def first(self) -> Point | None:
        """Return the first loss beyond the tolerance, else the first norm, else evaluation."""
        return self.departures[0] if self.departures else None

    def largest(self, *kinds: str) -> Point | None:
        """Return the point of these kinds that differs most from the reference; None without."""
        points = [point for point in self.points if point.of in kinds]
        return max(points, key=lambda point: point.relative, default=None)

    @property
    def steps(self) -> int:
        """Return the number of compared training steps."""
        return sum(p.last - p.first + 1 for p in self.points if p.of == "loss")

    @property
    def in_tf32(self) -> bool:
        """Return whether fp32 matrices were multiplied in TF32."""
        # Earlier versions used it on every GPU, and did not record it.
        allowed = self.results.get("tf32", self.results.get("device") == "cuda")
        return allowed and self.results.get("precision") == "fp32"

    @property
    def rounding(self) -> Tolerance:
        """Return the entry of TOLERANCES for the precision of the run."""
        precision = self.results.get("precision", "fp32")
        return TOLERANCES["tf32" if self.in_tf32 else precision]


def read_run(path: Path) -> RecordedRun:
    """Read an output folder, or the trainer_state.json of Hugging Face's Trainer or its folder.

    Raises:
        UserError: there is no run.
    """
    if any((path / name).exists() for name in ("results.json", "metrics.jsonl")):
        return read_folder(path)
    file = path if path.is_file() else newest_of_trainer(path) / "trainer_state.json"
    if not isinstance(history := _read_json(file).get("log_history"), list):
        known = "an output folder with results.json and metrics.jsonl, or a trainer_state.json"
        raise UserError(f"{shown(path)} is no run: name {known}.")
    return RecordedRun(file, history)


def read_folder(path: Path) -> RecordedRun:
    """Read the output folder of a run, which has failed if its files have no numbers.

    Raises:
        UserError: a value in results.json has another type.
    """
    run = RecordedRun(path, [], _read_json(path / "results.json"))
    if key := wrong_key(run.results):
        raise UserError(f"{shown(path / 'results.json')} is damaged: the type of {key}.")
    run.seconds = next((int(line) for line in _outcome(path)[1:] if line.isdigit()), None)
    with contextlib.suppress(OSError):
        run.records, run.unreadable = read_metrics(path / "metrics.jsonl")
    run.status, run.reason = _status(path, run.results)
    if run.status == "completed":
        try:
            run.numbers = numbers_of(run.results)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            run.status = "failed"  # or --eval_only
            run.reason = f"results.json lacks a number ({type(error).__name__}: {shown(error)})"
    return run


def _status(folder: Path, results: dict) -> tuple[str, str]:
    """Return (status, reason) of a run.

    compare_strategies.sh adds log.txt and outcome.txt: "exit N", "timeout N" or "interrupted", and
    in the second line the seconds that the run took.
    """
    outcome, log = _outcome(folder)[0], _read_text(folder / "log.txt")
    status = results.get("status") or "failed"
    reason = results.get("reason") or last_error(log) or outcome
    if outcome.startswith(("timeout", "interrupted")):
        return outcome.split()[0], f"{outcome} s" if "timeout" in outcome else "by the user"
    if KILLED.search(log):
        return "oom", "a rank was killed by SIGKILL, probably because the host's memory was full"
    if results.get("error_kind") == "missing_requirement":
        return "skipped", reason
    if outcome not in ("", "exit 0") and status != "oom":
        return "failed", reason
    return status, "" if status == "completed" else reason


def _outcome(folder: Path) -> list[str]:
    """Return the lines of outcome.txt, at least one."""
    return _read_text(folder / "outcome.txt").splitlines() or [""]


def last_error(log: str) -> str:
    """Return the script's first error line in a log, or else the last line with a letter or digit.

    Later error lines are of ranks that the launcher stops after the first failure.
    """
    lines = [line.strip() for line in log.splitlines() if any(map(str.isalnum, line))]
    marked = [line.removeprefix("❌ ") for line in lines if line.startswith("❌")]
    return marked[0] if marked else (lines or [""])[-1]


def _read_text(path: Path) -> str:
    """Return the text of a file; "" if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_json(path: Path) -> dict:
    """Return the object in a JSON file; {} if there is none."""
    with contextlib.suppress(OSError, ValueError):
        value = atomic.read_json(path)
        return value if isinstance(value, dict) else {}
    return {}


# -------------------------------------------------------------------------------- numbers of a run


def numbers_of(results: dict) -> JsonObject:
    """Return the numbers of a run that a comparison shows; docs/COMPARISON.md explains the keys.

    Memory is that of the rank that holds most.

    Raises:
        LookupError, TypeError, ValueError or the like: results.json lacks a number.
    """
    memory, on_gpu = results["memory"], results["device"] == "cuda"
    ranks = [memory[f"{where}categories_bytes_by_rank"] for where in ("device_", "")]
    device, anywhere = max(zip(*ranks, strict=True), key=lambda rank: states_of(rank[0]))
    planned = memory.get("predicted_bytes") or {}
    numbers = {
        "memory_bytes": max(memory["peak_bytes"]) if on_gpu else states_of(device),
        "planned_bytes": (planned["peak"] if on_gpu else states_of(planned)) if planned else None,
        "categories": {kind: device[kind] for kind in STATES},
        "host_categories": {k: anywhere[k] - device[k] for k in ("gradients", "optimizer")},
        "host_bytes": max(memory["host_peak_bytes"]),
        "nvme_bytes": memory["nvme_bytes"],
    }
    if results.get("simulated_world_size"):
        return numbers
    collectives, phases = results.get("communication_per_step"), results["step_phases_seconds"]
    # The median step: in a short run 5 s of other load changed the mean by 9 percent. The spread is
    # that of the middle 80 percent of the steps.
    speed, low, high = (
        results["global_batch_size"] / results["step_seconds"][key]
        for key in ("median", "p90", "p10")
    )
    return numbers | {
        "samples_per_second": speed,
        "samples_per_second_low": low,
        "samples_per_second_high": high,
        "tokens_per_second_per_gpu": float(results["tokens_per_second_per_gpu"]),
        **{f"{phase}_seconds": phases[phase] for phase in PHASES},
        "step_seconds": sum(phases.values()),
        "paper_volume": STRATEGIES[results["strategy"]].paper_volume,
        "final_loss": float(results["train_loss_last"]),
        "volume": collectives and volume_of(collectives) / results["parameters"],
        "sent_bytes": results.get("communication_bytes_per_step"),
    }


def states_of(sizes: dict[str, float]) -> float:
    """Return the sum of the model states in a dict of bytes by kind."""
    return sum(sizes[kind] for kind in STATES)


def volume_of(collectives: dict) -> float:
    """Return the number of elements in the collectives, as in the ZeRO paper.

    An all-reduce counts twice (arXiv 1910.02054, section 7).
    """
    total = 0.0
    for name, entry in collectives.items():
        kind, dtype = name.split(" ")
        elements = entry["message_bytes"] / ITEM_BYTES.get(dtype, 1)
        total += 2 * elements if kind == "all_reduce" else elements
    return total


# ---------------------------------------------------------------------------------- the comparison


@dataclass
class Comparison:
    """Runs that are compared with the first one; strategies with the first that completed."""

    name: str
    runs: list[RecordedRun]
    # The largest relative difference of equal losses; None: what rounding explains. Of several
    # runs with different precisions the largest.
    tolerance: float | None
    of_strategies: bool = False
    # The reference with a higher learning rate, to see whether the losses would show a difference
    control: RecordedRun | None = None

    def __post_init__(self) -> None:
        candidates = [run for run in self.runs if run.numbers or not self.of_strategies]
        self.reference = candidates[0] if candidates else None
        self.facts = self.reference.results if self.reference else {}
        self.simulated = bool(self.facts.get("simulated_world_size"))
        self.on_gpu = self.facts.get("device") == "cuda"
        given = self.tolerance
        for run in [*self.runs, self.control]:
            if run and self.reference:
                add_ratios(run.numbers, self.reference.numbers)
                run.tolerance = self._tolerance_of(run, self.reference, given)
                self._compare(run, self.reference)
        if not (self.control and self.control.points):
            self.control = None
        self.compared = [run for run in self.runs if run.points and run is not self.reference]
        used = [run.tolerance for run in self.compared]
        default = self.reference.tolerance if self.reference else TOLERANCES["fp32"]
        self.tolerance, self.norm_tolerance, self.lasting = max(used, default=default)
        self.departing = [run for run in self.runs if run.first]  # that differ
        # None if no losses could be compared
        self.same_model = not self.departing if self.compared else None
        # Whether the control differs, so that the comparison can show a difference of its size.
        self.conclusive = bool(self.control.first) if self.control and self.compared else None
        speed = self.control.numbers["speed"] if self.control else 1.0
        self.speed_change = abs(speed - 1)  # of the machine, between the reference and the control
        self.speeds_are_comparable = self.speed_change <= LARGEST_SPEED_CHANGE

    @property
    def exit_code(self) -> int:
        """1 if a loss differs, a strategy failed or a run could not be compared; else 0."""
        if self.of_strategies:
            failed = any(run.status not in ("completed", "skipped") for run in self.runs)
        else:
            failed = len(self.compared) < len(self.runs) - 1
        return int(failed or self.reference is None or bool(self.departing))

    def _tolerance_of(
        self, run: RecordedRun, reference: RecordedRun, given: float | None
    ) -> Tolerance:
        """Return what rounding explains in the lower precision of two runs, or what was given."""
        rounding = max(run.rounding, reference.rounding)
        if given is None:
            return rounding
        norm = given * rounding.grad_norm / rounding.loss
        return Tolerance(given, norm, rounding.steps if self.of_strategies else 1)

    def _compare(self, run: RecordedRun, reference: RecordedRun) -> None:
        """Compare the losses and gradient norms of a run with the reference's, and find causes."""
        tolerance = run.tolerance
        steps = {"loss": tolerance.steps, "grad_norm": tolerance.steps, "eval_loss": 1}
        for repeat in run.repeats if self.of_strategies else [run]:
            for kind, lasting in steps.items():
                run.points += points_of(kind, reference, repeat, lasting)
        if (largest := run.largest("loss", "eval_loss")) is None:
            run.points = []
            if run.status == "completed" and self.of_strategies and not self.simulated:
                run.status, run.reason = "failed", "metrics.jsonl has no step of the reference"
            return
        run.differences = compare_facts(reference, run)
        run.numbers["difference"] = largest.relative
        if norm := run.largest("grad_norm"):
            run.numbers["norm_difference"] = norm.relative
        for kind in steps:
            limit = tolerance.grad_norm if kind == "grad_norm" else tolerance.loss
            beyond = [p for p in run.points if p.of == kind and p.relative > limit]
            run.departures += sorted(beyond, key=lambda point: point.last)[:1]
        if run.first:
            latest = run.first.last + steps[run.first.of] - 1  # the first medians share their steps
            run.causes = causes_of(run.differences, run.first.of, latest)


def add_ratios(numbers: JsonObject, reference: JsonObject) -> None:
    """Add the speed and the memory relative to the reference, where both were measured."""
    if "samples_per_second" in numbers and (speed := reference.get("samples_per_second")):
        low, high = numbers["samples_per_second_low"], numbers["samples_per_second_high"]
        numbers["speed"] = numbers["samples_per_second"] / speed
        numbers["speed_spread"] = (high - low) / 2 / speed
    if "memory_bytes" in numbers and reference.get("memory_bytes"):
        numbers["saved"] = 1 - numbers["memory_bytes"] / reference["memory_bytes"]


def compare_runs(runs: list[RecordedRun], tolerance: float | None) -> Comparison:
    """Compare runs of any kind with the first one, step by step.

    Args:
        tolerance: replaces the values in TOLERANCES; every step is then compared alone.
    """
    for number, run in enumerate(runs):
        run.name = chr(ord("A") + number)
    return Comparison(" ".join(str(run.place) for run in runs), runs, tolerance)


def read_comparison(folder: Path, tolerance: float | None = None) -> Comparison:
    """Read and compare the strategies that compare_strategies.sh left in <strategy>/<repeat>/.

    Args:
        tolerance: replaces the value in TOLERANCES.
    """
    planned = planned_of(folder)
    names = [name for name in STRATEGIES if name in planned or (folder / name).is_dir()]
    *runs, control = [read_strategy(folder / name) for name in (*names, "control")]
    return Comparison(folder.resolve().name, runs, tolerance, True, control)


def planned_of(folder: Path) -> list[str]:
    """Return the words of planned.txt: the strategies, and "cpu", "cuda" and "simulated"."""
    return _read_text(folder / "planned.txt").split()


def read_row(place: Path) -> RecordedRun:
    """Read one run of a comparison in progress, and compare it with the reference so far.

    The run is not compared while its reference is unknown: that is the first strategy that
    completes, in the order of STRATEGIES.

    Args:
        place: <comparison>/<strategy>/<repeat>.
    """
    run, folder = read_folder(place), place.parent.parent
    run.name, run.repeats = place.parent.name, [run]
    planned = planned_of(folder)
    first = (read_strategy(folder / name) for name in STRATEGIES if name in planned)
    reference = next((r for r in first if r.numbers or r.status == "not run"), None)
    if reference and reference.numbers:
        runs = [run] if reference.place == run.place else [reference, run]
        Comparison(folder.name, runs, None, of_strategies=True)
    return run


def read_strategy(folder: Path) -> RecordedRun:
    """Return the repeat with the median speed; with repeats the spread is that of their speeds.

    If a repeat did not complete, the status is that of the first such repeat.
    """
    numbers = sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit())
    runs = [read_folder(folder / str(number)) for number in numbers]
    broken = [run for run in runs if run.status != "completed"]
    completed = [run for run in runs if run.status == "completed"]
    completed.sort(key=lambda run: run.numbers.get("samples_per_second", 0))
    if completed:
        run = completed[(len(completed) - 1) // 2]
    else:
        run = broken[0] if broken else RecordedRun(folder, [], status="not run")
    run.name, run.repeats = folder.name, completed
    if broken:
        run.status = broken[0].status
        run.reason = f"{broken[0].reason} (in {broken[0].place}/log.txt)"
    if len(completed) > 1 and "samples_per_second" in run.numbers:
        slowest, fastest = (completed[end].numbers["samples_per_second"] for end in (0, -1))
        run.numbers |= {"samples_per_second_low": slowest, "samples_per_second_high": fastest}
    return run


def compare_facts(a: RecordedRun, b: RecordedRun) -> list[Difference]:
    """Return what differs between two runs besides their losses."""
    key = "learning_rate" if a.of_trainer else "lr"
    rates = [{r["step"]: r[key] for r in run.records if r.get(key)} for run in (a, b)]
    other = [s for s in rates[0] if s in rates[1] and relative(rates[0][s], rates[1][s]) > 1e-9]
    return differences_of(a.results, b.results, min(other, default=0))


def relative(a: float, b: float) -> float:
    """Return the difference relative to `a`; infinite if one is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if repr(a) == repr(b) else math.inf
    return abs(a - b) / max(abs(a), 1e-12)


def points_of(of: str, a: RecordedRun, b: RecordedRun, lasting: int) -> list[Point]:
    """Return the values ("loss", "grad_norm" or "eval_loss") that both runs have.

    A mean of several steps, which Trainer logs, is compared with the other run's mean of them.

    Args:
        lasting: number of steps of which each difference is the median: the step and those before
            it. The first differences are all the median of the first `lasting` steps.
    """
    of_a, of_b = a.curve(of), b.curve(of)
    found = []
    for window in sorted({*of_a, *of_b}, key=lambda window: window[1]):
        value, other = mean_of(of_a, *window), mean_of(of_b, *window)
        if value is not None and other is not None:
            found.append((*window, value, other))
    each = [relative(value, other) for _, _, value, other in found]
    return [
        Point(of, *point, median(each[max(0, number - lasting) : max(number, lasting)]))
        for number, point in enumerate(found, 1)
    ]


def mean_of(curve: Curve, first: int, last: int) -> float | None:
    """Return the mean value of some steps; None if the run did not log one of them."""
    if (first, last) in curve:
        return curve[first, last]
    steps = [(step, step) for step in range(first, last + 1)]
    return mean(map(curve.__getitem__, steps)) if curve.keys() >= {*steps} else None
