"""Compare runs with a reference, and strategies with the first that completed.

Two runs and seven strategies are the same case: the first run is the reference. Imports nothing
heavy. comparison_text.py and plots.py show the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from distributed_training import arguments
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.records.agreement import (
    KINDS,
    TOLERANCES,
    Agreement,
    Tolerance,
    points_of,
    relative,
)
from distributed_training.records.causes import Difference, causes_of, differences_of
from distributed_training.records.recorded_run import RecordedRun, read_folder, read_run, read_text
from distributed_training.strategies.table import STRATEGIES
from distributed_training.text_tables import text_table

# The control does the same work as the reference. If its speed differs by more than this share,
# other load on the machine has changed the speeds. docs/COMPARISON.md has the measurements.
LARGEST_SPEED_CHANGE = 0.25


@dataclass(repr=False)
class Comparison:
    """Runs that are compared with the first one; strategies with the first that completed.

    Attributes:
        name: of the comparison.
        runs: in their order. `run.agreement` says how each agrees with the reference: `points` that
            were compared, `first` beyond the tolerance (None: none), the `largest` difference,
            `differences` in settings, data, machine and versions (also if the losses agree), and
            those that are likely `causes` of `first`.
        tolerance: the largest relative difference of equal losses; None when created: what rounding
            explains. With different precisions it is the largest one.
        norm_tolerance: the same of gradient norms.
        lasting: number of steps of which a difference is the median.
        of_strategies: whether the runs are repeats of strategies, by compare_strategies.sh.
        control: the reference with a higher learning rate, which shows whether the losses would
            show a difference; or None.
        reference: the run with which the others are compared; None if no strategy completed.
        compared: runs other than the reference that have a step in common with it.
        departing: runs of which a loss, a gradient norm or an evaluation differs beyond the
            tolerance.
        same_model: whether no run departs; None if no losses could be compared. Losses that agree
            do not prove equal settings: see `agreement.differences`.
        conclusive: whether the control departs; None without one.
    """

    name: str
    runs: list[RecordedRun]
    tolerance: float | None
    of_strategies: bool = False
    control: RecordedRun | None = None

    def __post_init__(self) -> None:
        numbers = range(len(self.runs))
        first = next((n for n in numbers if self.runs[n].numbers or not self.of_strategies), None)
        reference = None if first is None else self.runs[first]
        self.facts = reference.results if reference else {}
        self.simulated = bool(self.facts.get("simulated_world_size"))
        self.on_gpu = self.facts.get("device") == "cuda"
        if reference:
            self.runs = [self._compared(run, reference) for run in self.runs]
            self.control = self._compared(self.control, reference) if self.control else None
        self.reference = None if first is None else self.runs[first]
        if not (self.control and self.control.agreement.points):
            self.control = None
        self.compared = [
            run for run in self.runs if run.agreement.points and run is not self.reference
        ]
        used = [run.agreement.tolerance for run in self.compared]
        default = self.reference.agreement.tolerance if self.reference else TOLERANCES["fp32"]
        self.tolerance, self.norm_tolerance, self.lasting = max(used, default=default)
        self.departing = [run for run in self.runs if run.agreement.first]  # that differ
        # None if no losses could be compared
        self.same_model = not self.departing if self.compared else None
        # Whether the control differs, so that the comparison can show a difference of its size.
        control = self.control if self.compared else None
        self.conclusive = bool(control.agreement.first) if control else None
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

    def __repr__(self) -> str:
        """Return a table of the runs, and what else differs from the reference."""
        headers = ["", "run", "status", "steps", "difference", "departs at", "likely causes"]
        lines = [text_table([self._row_of(run) for run in self.runs], headers)]
        lines += [
            f"{run.name} differs in {', '.join(map(str, found))}"
            for run in self.compared
            if (found := run.agreement.differences)
        ]
        return "\n".join([*lines, f"equal losses: {self.same_model}"])

    def _row_of(self, run: RecordedRun) -> list[str]:
        """Return the row of a run: compared steps, and how they differ from the reference's."""
        agreement, difference, departs = run.agreement, "—", "—"
        if run is not self.reference and (largest := agreement.largest("loss", "eval_loss")):
            difference = f"{largest.relative:.1e}"
        if agreement.first:
            departs = f"step {agreement.first.last}"
        causes = ", ".join(cause.name for cause in agreement.causes) or "—"
        place, steps = str(run.place), f"{agreement.steps:,}"
        return [run.name, place, run.status, steps, difference, departs, causes]

    def _tolerance_of(
        self, run: RecordedRun, reference: RecordedRun, given: float | None
    ) -> Tolerance:
        """Return what rounding explains in the lower precision of two runs, or what was given."""
        rounding = max(run.rounding, reference.rounding)
        if given is None:
            return rounding
        norm = given * rounding.grad_norm / rounding.loss
        return Tolerance(given, norm, rounding.steps if self.of_strategies else 1)

    def _compared(self, run: RecordedRun, reference: RecordedRun) -> RecordedRun:
        """Return a run with its agreement with the reference: losses, gradient norms, causes."""
        tolerance = self._tolerance_of(run, reference, self.tolerance)
        numbers = {**run.numbers, **ratios_of(run.numbers, reference.numbers)}
        lasting = {kind: 1 if kind == "eval_loss" else tolerance.steps for kind in KINDS}
        points = [
            point
            for repeat in (run.repeats if self.of_strategies else [run])
            for kind in KINDS
            for point in points_of(kind, reference.curve(kind), repeat.curve(kind), lasting[kind])
        ]
        agreement = Agreement(tolerance, points)
        if (largest := agreement.largest("loss", "eval_loss")) is None:
            run = replace(run, numbers=numbers, agreement=Agreement(tolerance))
            if run.status == "completed" and self.of_strategies and not self.simulated:
                reason = "metrics.jsonl has no step of the reference"
                return replace(run, status="failed", reason=reason)
            return run
        numbers["difference"] = largest.relative
        if norm := agreement.largest("grad_norm"):
            numbers["norm_difference"] = norm.relative
        differences, causes = compare_facts(reference, run), []
        if first := agreement.first:
            latest = first.last + lasting[first.of] - 1  # the first medians share their steps
            causes = causes_of(differences, first.of, latest)
        agreement = Agreement(tolerance, points, differences, causes)
        return replace(run, numbers=numbers, agreement=agreement)


def ratios_of(numbers: JsonObject, reference: JsonObject) -> JsonObject:
    """Return the speed and the memory relative to the reference, where both were measured."""
    ratios = {}
    if "samples_per_second" in numbers and (speed := reference.get("samples_per_second")):
        low, high = numbers["samples_per_second_low"], numbers["samples_per_second_high"]
        ratios["speed"] = numbers["samples_per_second"] / speed
        ratios["speed_spread"] = (high - low) / 2 / speed
    if "memory_bytes" in numbers and reference.get("memory_bytes"):
        ratios["saved"] = 1 - numbers["memory_bytes"] / reference["memory_bytes"]
    return ratios


def compare_runs(
    reference: str | Path | RecordedRun,
    *others: str | Path | RecordedRun,
    tolerance: float | None = None,
) -> Comparison:
    """Compare the losses and gradient norms of runs with those of the first one, step by step.

    Args:
        reference, others: the folders of the runs, or what `read_run` returned.
        tolerance: the largest relative difference of equal losses; every step is then compared
            alone. None: what rounding explains in the precision of the runs, 1e-4 in fp32, 1e-3 in
            TF32 and 5e-3 in bf16 and fp16, of the median over 5 steps in the last three.
    Returns:
        The comparison. `runs` are named A, B, ... in this order.
    Raises:
        UserError: there are no others, one of them is not a run, or the tolerance is not a number.
    """
    if isinstance(reference, list | tuple):
        raise UserError("The runs are in a list: pass them as separate arguments, *runs.")
    if not others:
        raise UserError("A comparison needs two or more runs: name another one.")
    if tolerance is not None:
        tolerance = arguments.number("tolerance", tolerance, 0, 1e9)
    read = [run if isinstance(run, RecordedRun) else read_run(run) for run in (reference, *others)]
    runs = [replace(run, name=chr(ord("A") + number)) for number, run in enumerate(read)]
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
    return read_text(folder / "planned.txt").split()


def read_row(place: Path) -> RecordedRun:
    """Read one run of a comparison in progress, and compare it with the reference so far.

    The run is not compared while its reference is unknown: that is the first strategy that
    completes, in the order of STRATEGIES.

    Args:
        place: <comparison>/<strategy>/<repeat>.
    """
    repeat, folder = read_folder(place), place.parent.parent
    run = replace(repeat, name=place.parent.name, repeats=[repeat])
    planned = planned_of(folder)
    first = (read_strategy(folder / name) for name in STRATEGIES if name in planned)
    reference = next((r for r in first if r.numbers or r.status == "not run"), None)
    if reference and reference.numbers:
        runs = [run] if reference.place == run.place else [reference, run]
        return Comparison(folder.name, runs, None, of_strategies=True).runs[-1]
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
    run = replace(run, name=folder.name, repeats=completed)
    if broken:
        reason = f"{broken[0].reason} (in {broken[0].place}/log.txt)"
        run = replace(run, status=broken[0].status, reason=reason)
    if len(completed) > 1 and "samples_per_second" in run.numbers:
        slowest, fastest = (completed[end].numbers["samples_per_second"] for end in (0, -1))
        spread = {"samples_per_second_low": slowest, "samples_per_second_high": fastest}
        run = replace(run, numbers={**run.numbers, **spread})
    return run


def compare_facts(a: RecordedRun, b: RecordedRun) -> list[Difference]:
    """Return what differs between two runs besides their losses."""
    key = "learning_rate" if a.of_trainer else "lr"
    rates = [{r["step"]: r[key] for r in run.records if r.get(key)} for run in (a, b)]
    other = [s for s in rates[0] if s in rates[1] and relative(rates[0][s], rates[1][s]) > 1e-9]
    return differences_of(a.results, b.results, min(other, default=0))
