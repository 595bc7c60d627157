"""Why two runs differ: compare their losses step by step, and say what else differs.

Imports nothing heavy. plots.py draws the figure.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from support.checkpoints.recognize import newest_of_trainer
from support.errors import UserError
from support.files.user_files import shown
from support.report.compare import TOLERANCES, read_json, read_json_lines, tolerance_of
from support.report.effects import EFFECTS, RATE, SIGNATURE_NAMES, UNKNOWN, Effect
from support.text_tables import text_table

TRAINER_STATE = "trainer_state.json"
TRAINER_DECIMALS = 4  # to which transformers before 5.0 rounds the losses that it logs
MOST_CAUSES = 3  # that the answer names
# Keys of results.json that are compared under their own name, besides the flags.
FACTS = (
    "strategy model device backend launcher precision seed batch_size gradient_accumulation_steps "
    "seq_length parameters simulated_world_size code_digest"
).split()


# ------------------------------------------------------------------------------------- the two runs


@dataclass
class Span:
    """The mean loss of the steps after `start` up to `end`; of one step in our own runs."""

    start: int
    end: int
    loss: float


@dataclass
class RecordedRun:
    """What a run recorded."""

    place: Path  # the output folder, or the file of Trainer
    spans: list[Span] = field(default_factory=list)  # training losses in the order of the steps
    evaluations: dict[int, float] = field(default_factory=dict)  # the losses, by step
    lrs: dict[int, float] = field(default_factory=dict)  # the learning rates, by step
    facts: dict[str, object] = field(default_factory=dict)  # by the names of EFFECTS
    results: dict = field(default_factory=dict)  # results.json; {} for Trainer
    slack: float = 0.0  # largest difference of a loss that comes from its number of decimals

    @property
    def of_trainer(self) -> bool:
        return self.place.is_file()

    @property
    def folder(self) -> Path:
        return self.place.parent if self.of_trainer else self.place

    def extent(self) -> str:
        """Describe the steps that have a loss, and how the run ended if it did not complete."""
        status = self.results.get("status", "completed")
        end = "" if status == "completed" else f" ({status}: {self.results.get('reason')})"
        if not self.spans:
            return f"no step{end}"
        return f"steps {self.spans[0].start + 1:,} to {self.spans[-1].end:,}{end}"


def read_run(path: Path) -> RecordedRun:
    """Read an output folder, or the trainer_state.json of Hugging Face's Trainer.

    Args:
        path: the folder, a file in it, or the folder of Trainer or of one of its checkpoints.
    """
    if path.is_file() and path.name in ("results.json", "metrics.jsonl"):
        path = path.parent
    if path.is_file():
        return _read_trainer(path)
    if not any((path / name).exists() for name in ("results.json", "metrics.jsonl")):
        state = newest_of_trainer(path) / TRAINER_STATE
        if state.is_file():
            return _read_trainer(state)
        known = f"an output folder with results.json and metrics.jsonl, or a {TRAINER_STATE}"
        raise UserError(f"{shown(path)} is no run: name {known}.")
    run = RecordedRun(path, results=read_json(path / "results.json"))
    _add_records(run, read_json_lines(path / "metrics.jsonl"))
    run.facts = _facts_of(run.results)
    return run


def _read_trainer(path: Path) -> RecordedRun:
    state = read_json(path)
    history = state.get("log_history")
    if not isinstance(history, list):
        raise UserError(f"{shown(path)} has no log_history: is it the file of a Trainer?")
    run = RecordedRun(path)
    records = [record for record in history if isinstance(record, dict)]
    _add_records(run, records)
    losses = [span.loss for span in run.spans]
    if all(round(loss, TRAINER_DECIMALS) == loss for loss in losses if math.isfinite(loss)):
        run.slack = 0.5 * 10**-TRAINER_DECIMALS
    names = {"num_train_epochs": "epochs"}
    keys = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps")
    run.facts = {names.get(key, key): state[key] for key in keys if key in state}
    return run


def _add_records(run: RecordedRun, records: list[dict]) -> None:
    """Add the losses of metrics.jsonl or of a log_history.

    A resumed run may repeat steps: the later record counts.
    """
    of_trainer = run.of_trainer
    rate_key = "learning_rate" if of_trainer else "lr"
    for record in records:
        step = record.get("step")
        if type(step) is not int:
            continue
        if _is_number(record.get("eval_loss")):
            run.evaluations[step] = record["eval_loss"]
        if "loss" not in record or step < 1:
            continue
        while run.spans and run.spans[-1].end >= step:
            run.spans.pop()
        start = step - 1
        if of_trainer:  # its loss is the mean since the last record
            start = run.spans[-1].end if run.spans else 0
        # null: NaN and infinity have no other form in JSON.
        loss = record["loss"] if _is_number(record["loss"]) else math.nan
        run.spans.append(Span(start, step, loss))
        if _is_number(record.get(rate_key)):
            run.lrs[step] = record[rate_key]


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _part(mapping: dict, key: str) -> dict:
    """Return the dict under a key, or {} if there is none."""
    value = mapping.get(key)
    return value if isinstance(value, dict) else {}


def _facts_of(results: dict) -> dict[str, object]:
    """Return what a run recorded besides its losses, from results.json; {} if it is missing."""
    facts: dict[str, object] = {name: results[name] for name in FACTS if name in results}
    facts |= {"ranks": results.get("world_size"), "global batch": results.get("global_batch_size")}
    if dataset := _part(results, "dataset"):
        facts |= {"data digest": dataset.get("sha256"), "sequences": dataset.get("blocks")}
    facts |= _part(results, "flags")
    signature = _part(results, "run_signature")
    for part in signature:
        facts |= {SIGNATURE_NAMES.get(k, k): value for k, value in _part(signature, part).items()}
    facts |= _part(results, "hardware")
    facts |= {f"{name} version": value for name, value in _part(results, "versions").items()}
    return facts


# ------------------------------------------------------------------------------- what else differs


@dataclass(frozen=True)
class Difference:
    """A fact that differs between the runs; None: not set, or not known."""

    name: str
    a: object
    b: object
    effect: Effect

    def __str__(self) -> str:
        return f"{self.name} ({_cell(self.a)} and {_cell(self.b)})"


def _cell(value: object) -> str:
    return "—" if value is None else shown(value, 24)


def differences(a: RecordedRun, b: RecordedRun) -> list[Difference]:
    """Return the facts that differ, those first that are most likely to change the losses.

    Between a run of ours and one of Trainer, only facts that both recorded are compared.
    """
    both = a.facts.keys() & b.facts.keys()
    different_kinds = a.of_trainer != b.of_trainer
    # A run of an earlier version recorded no flags, one that failed early no run signature.
    complete = all(_part(run.results, key) for run in (a, b) for key in ("flags", "run_signature"))
    names = both if different_kinds or not (complete or a.of_trainer) else {*a.facts, *b.facts}
    rates = {step: (a.lrs[step], b.lrs[step]) for step in sorted(a.lrs.keys() & b.lrs.keys())}
    rate_differs = next((step for step, pair in rates.items() if _relative(*pair) > 1e-9), None)
    found = []
    for name in names:
        # What is off or unset is not among the flags that a run recorded.
        pair = (a.facts.get(name), b.facts.get(name))
        of_a, of_b = (None if value is False else value for value in pair)
        effect = EFFECTS.get(name, UNKNOWN)
        if of_a == of_b:
            continue
        if effect is RATE and rates and not different_kinds:
            effect = Effect("nothing", "the learning rates of the compared steps are equal")
            if rate_differs:
                text = f"changes the learning rate, first that of step {rate_differs:,}"
                effect = Effect("losses", text, rate_differs + 1)
        found.append(Difference(name, of_a, of_b, effect))
    order = {name: place for place, name in enumerate(EFFECTS)}
    return sorted(found, key=lambda entry: (order.get(entry.name, len(order)), entry.name))


# ------------------------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Point:
    """A loss in both runs: of one step, or the mean of the steps `first` to `last`."""

    first: int
    last: int
    a: float
    b: float
    relative: float

    @property
    def steps(self) -> str:
        one = self.first == self.last
        return f"step {self.last:,}" if one else f"steps {self.first:,} to {self.last:,} (means)"

    @property
    def losses(self) -> str:
        digits = ".4f" if self.relative > 1e-4 else ".8g"
        return f"{self.a:{digits}} and {self.b:{digits}}, {self.relative:.1e} relative"


def _relative(a: float, b: float, slack: float = 0.0) -> float:
    """Return the difference relative to the larger value; infinite if one is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if repr(a) == repr(b) else math.inf
    return max(0.0, abs(a - b) - slack) / max(abs(a), abs(b), 1e-12)


def points_of(a: RecordedRun, b: RecordedRun) -> list[Point]:
    """Return the losses of the steps that both runs have.

    Runs that log means over different numbers of steps are compared in the means between the steps
    at which both logged.
    """
    edges = [{edge for span in run.spans for edge in (span.start, span.end)} for run in (a, b)]
    starts = [{span.start: span for span in run.spans} for run in (a, b)]
    found = []
    for start, end in itertools.pairwise(sorted(edges[0] & edges[1])):
        in_a, in_b = (_mean_loss(spans, start, end) for spans in starts)
        if in_a is not None and in_b is not None:
            relative = _relative(in_a, in_b, a.slack + b.slack)
            found.append(Point(start + 1, end, in_a, in_b, relative))
    return found


def _mean_loss(spans: dict[int, Span], start: int, end: int) -> float | None:
    """Return the mean loss of the steps after `start` up to `end`; None if one has no loss.

    Args:
        spans: by their start.
    """
    total, step = 0.0, start
    while step < end:
        if (span := spans.get(step)) is None:
            return None
        total += span.loss * (span.end - span.start)
        step = span.end
    return total / (end - start)


@dataclass(frozen=True)
class Divergence:
    """Two runs, compared."""

    a: RecordedRun
    b: RecordedRun
    points: list[Point]  # losses of the steps that both have
    evaluations: list[Point]  # the same of evaluations
    differences: list[Difference]  # what differs besides the losses
    tolerance: float  # largest relative difference of equal losses

    def first(self, points: list[Point]) -> Point | None:
        """Return the first point that differs, or None."""
        return next((point for point in points if point.relative > self.tolerance), None)

    @property
    def equal(self) -> bool:
        """Whether losses were compared, and all agree."""
        points = self.points + self.evaluations
        return bool(points) and self.first(points) is None

    @property
    def rounding(self) -> tuple[float, str]:
        """Largest relative difference that rounding explains, and the precision; see TOLERANCES."""
        precisions = [str(run.results.get("precision", "fp32")) for run in (self.a, self.b)]
        on_gpu = any(run.results.get("device") == "cuda" for run in (self.a, self.b))
        known = {name: tolerance_of(name, on_gpu) for name in precisions if name in TOLERANCES}
        precision = max(known or ["fp32"], key=lambda name: known.get(name, 0.0))
        return known.get(precision, TOLERANCES["fp32"]), precision

    @property
    def causes(self) -> list[Difference]:
        """Differences that explain the first differing loss, the most likely first.

        Without a differing training loss, those that explain a differing evaluation.

        What can change step 1 would have been seen there: of several, those that begin to have an
        effect just before the first differing step come first.
        """
        first = self.first(self.points)
        if first is None:
            on = "evaluations" if self.first(self.evaluations) else ""
            return [entry for entry in self.differences if entry.effect.on == on]
        found = [entry for entry in self.differences if entry.effect.on == "losses"]
        found = [entry for entry in found if entry.effect.first_step <= first.last]
        return sorted(found, key=lambda entry: -entry.effect.first_step)


def compare_runs(a: RecordedRun, b: RecordedRun, tolerance: float) -> Divergence:
    """Compare two runs; `tolerance` is the largest relative difference of equal losses."""
    evaluations = [
        Point(step, step, *pair, _relative(*pair))
        for step in sorted(a.evaluations.keys() & b.evaluations.keys())
        for pair in [(a.evaluations[step], b.evaluations[step])]
    ]
    return Divergence(a, b, points_of(a, b), evaluations, differences(a, b), tolerance)


# --------------------------------------------------------------------------------------- the answer


def answer(found: Divergence) -> str:
    """Return whether the losses differ, from which step on, and the likely cause."""
    if not found.points and not found.evaluations:
        return "No loss could be compared: the runs have no step in common."
    first, evaluation = found.first(found.points), found.first(found.evaluations)
    if found.equal:
        largest = max(found.points + found.evaluations, key=lambda point: point.relative)
        steps = sum(point.last - point.first + 1 for point in found.points)
        evaluations = ", and in the evaluations" if found.evaluations else ""
        return (
            f"The losses agree within {found.tolerance:g} in all {steps:,} steps that both runs "
            f"have{evaluations}. The largest relative difference is {largest.relative:.1e}, at "
            f"{largest.steps}."
        )
    if first is None:
        assert evaluation is not None
        agree = "The training losses agree" if found.points else "No training loss was compared"
        differ = f"the evaluations differ at {evaluation.steps} ({evaluation.losses})"
        return f"{agree}, and {differ}.{_likely(found.causes)}"
    later = found.points[found.points.index(first) :]
    lasts = all(point.relative > found.tolerance for point in later)
    how = "differ from {} on" if lasts else "first differ at {}"
    text = f"The losses {how.format(first.steps)} ({first.losses})."
    largest = max(found.points, key=lambda point: point.relative)
    if largest is not first:
        text += f" The largest difference is {largest.relative:.1e}, at {largest.steps}."
    return text + (_likely(found.causes) or _explain_rounding(found, largest))


def _likely(causes: list[Difference]) -> str:
    texts = [f"{entry}: {entry.effect.text}" for entry in causes[:MOST_CAUSES]]
    return f" Likely cause: {'; or '.join(texts)}." if causes else ""


def _explain_rounding(found: Divergence, largest: Point) -> str:
    """Say whether rounding explains the difference, where no recorded fact changes the losses."""
    if found.a.of_trainer or found.b.of_trainer:
        return f" {TRAINER_STATE} does not record what could explain it: compare the arguments."
    limit, precision = found.rounding
    names = [str(entry) for entry in found.differences if entry.effect.on == "rounding"]
    if not names:
        return (
            " Nothing that the runs record explains it. On a GPU, some kernels add in no fixed "
            "order: --deterministic."
        )
    explained = f"{limit:.0e} relative in {precision}"
    if largest.relative <= limit:
        return f" Likely cause: rounding, up to {explained}, because of {', '.join(names)}."
    return (
        f" This is more than rounding explains ({explained}), and the runs record no other cause "
        f"than {', '.join(names)}."
    )


def as_text(found: Divergence) -> str:
    """Return the answer, what was compared, and the tables of the differences."""
    runs = {"A": found.a, "B": found.b}
    lines = [textwrap.fill(answer(found), 100), ""]
    lines += [f"{name}: {run.place}, {run.extent()}" for name, run in runs.items()]
    for name, run in runs.items():
        if not run.of_trainer and "flags" not in run.results:
            reason = "damaged, or of an earlier version"
            lines.append(f"The results.json of {name} has no flags: {reason}.")
        if run.slack and run.spans:
            decimals = f"{TRAINER_DECIMALS} decimals, which were considered"
            lines.append(f"{name} has losses of {decimals}.")
    for title, on in (
        ("Differences that can change the losses:", ("losses", "rounding", "evaluations")),
        ("Differences without effect on the losses:", ("nothing",)),
    ):
        rows = [
            [entry.name, _cell(entry.a), _cell(entry.b), effect_text(found, entry)]
            for entry in found.differences
            if entry.effect.on in on
        ]
        if rows:
            lines += ["", title, text_table(rows, ["", "A", "B", "effect"])]
    return "\n".join(lines) + "\n"


def effect_text(found: Divergence, entry: Difference) -> str:
    """Return the effect of a difference; rounding with its size."""
    limit, precision = found.rounding
    size = f", up to rounding of {limit:.0e} in {precision}"
    return entry.effect.text + (size if entry.effect.on == "rounding" else "")


def as_json(found: Divergence) -> dict:
    """Return the comparison as a JSON value."""
    first = found.first(found.points)
    largest = max(found.points, key=lambda point: point.relative, default=None)
    return {
        "schema_version": 1,
        "equal": found.equal,
        "answer": answer(found),
        "tolerance": found.tolerance,
        "runs": [{"place": str(run.place), "steps": run.extent()} for run in (found.a, found.b)],
        "compared_steps": sum(point.last - point.first + 1 for point in found.points),
        "first_difference": first and vars(first),
        "largest_difference": largest and vars(largest),
        "evaluations": [vars(point) for point in found.evaluations],
        "likely_causes": [entry.name for entry in found.causes],
        "differences": [
            {"name": entry.name, "a": entry.a, "b": entry.b}
            | {"changes": entry.effect.on, "effect": effect_text(found, entry)}
            for entry in found.differences
        ],
    }
