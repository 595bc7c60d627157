"""The report on a comparison: tables of numbers and a few sentences; text, Markdown, JSON."""

import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from distributed_training.files.atomic import only_finite
from distributed_training.files.json_types import JsonObject
from distributed_training.records.agreement import Point
from distributed_training.records.causes import ROUNDING
from distributed_training.records.compare import Comparison
from distributed_training.records.metrics_file import FILE
from distributed_training.records.metrics_reader import unreadable_lines
from distributed_training.records.recorded_run import RecordedRun
from distributed_training.text_tables import markdown_table, table_header, table_row, text_table
from distributed_training.units import GB, MB, human_bytes

WIDTH = 80
# What the runs of a comparison have in common, as keys of results.json.
WORK = """
    model parameters world_size simulated_world_size device precision batch_size
    gradient_accumulation_steps global_batch_size seq_length seed steps samples hardware versions
""".split()
# Attributes of a comparison.
VERDICTS = """
    name tolerance norm_tolerance same_model conclusive speeds_are_comparable exit_code
""".split()
NAMES = {"loss": "losses", "grad_norm": "gradient norms", "eval_loss": "evaluations"}
MOST_CAUSES = 3  # that a sentence names
# Another commit usually changes rounding at most, so it is no likely cause. The table says more.
CHANGES = {"code_digest": "rounding or more"}
Table = tuple[list[list[str]], list[str]]  # rows and headers
Column = tuple[str, str, str, float]  # header, key of a run's numbers, format, unit of the number

MEMORY: tuple[Column, ...] = (
    ("state\nMB", "memory_bytes", "{:,.1f}", MB),
    ("plan", "planned_bytes", "{:,.1f}", MB),
)
GPU_MEMORY: tuple[Column, ...] = (
    ("GPU\npeak\nGB", "memory_bytes", "{:,.2f}", GB),
    ("plan", "planned_bytes", "{:,.2f}", GB),
)
RESULTS: tuple[Column, ...] = (
    ("samples\n/s", "samples_per_second", "{:,.1f}", 1),
    ("times\nfirst", "speed", "{:.2f}", 1),
    ("±", "speed_spread", "{:.2f}", 1),
    ("final\nloss", "final_loss", "{:.4f}", 1),
    ("loss\ndiff.", "difference", "{:.1e}", 1),
    ("norm\ndiff.", "norm_difference", "{:.1e}", 1),
    ("saved\n%", "saved", "{:.0f}", 0.01),
    ("host\nGB/rank", "host_bytes", "{:,.2f}", GB),
    ("NVMe\nMB", "nvme_bytes", "{:,.0f}", MB),
    ("tokens/s\n/rank", "tokens_per_second_per_gpu", "{:,.0f}", 1),
    ("bits\n/byte", "bits_per_byte", "{:.4f}", 1),
)
NARROW = 5  # of RESULTS without --wide, and in the rows of a comparison in progress
# Characters of the columns in these rows, which are printed before the next row is known: name,
# status, a cell, time. With one blank between them, they fit in WIDTH.
NAME_WIDTH, STATUS_WIDTH, CELL_WIDTH, TIME_WIDTH, GAP = 8, 9, 7, 5, 1
# The paper (arXiv 1910.02054, section 7) has no gradient accumulation.
STEP: tuple[Column, ...] = (
    ("sent\nMB/step", "sent_bytes", "{:,.1f}", MB),
    ("volume", "volume", "{:.2f}P", 1),
    ("paper", "paper_volume", "{:.0f}P", 1),
    ("step\nms", "step_seconds", "{:,.0f}", 1e-3),
    ("data", "data_seconds", "{:,.0f}", 1e-3),
    ("for-\nward", "forward_seconds", "{:,.0f}", 1e-3),
    ("back-\nward", "backward_seconds", "{:,.0f}", 1e-3),
    ("up-\ndate", "update_seconds", "{:,.0f}", 1e-3),
)


def as_text(comparison: Comparison, wide: bool = False) -> str:
    """Return the text for the terminal and the .txt file; `wide` adds columns to the 80."""
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent="   ", break_on_hyphens=False, break_long_words=False
    )
    first, *others = [text_table(*table) for table in tables_of(comparison, wide)]
    sentences = "\n".join(map(wrapper.fill, sentences_of(comparison)))
    origin = "\n".join(map(wrapper.fill, provenance(comparison)))
    return "\n\n".join([wrapper.fill(title(comparison)), first, sentences, *others, origin]) + "\n"


def as_markdown(comparison: Comparison, with_figure: bool = True) -> str:
    """Return the .md file, for a README or a lab notebook, with all columns."""
    tables = [markdown_table(*table) for table in tables_of(comparison, True)]
    lines = [f"- {line}" for line in sentences_of(comparison) + provenance(comparison)]
    figure = f"![Charts](comparison_results_{comparison.name}.png)" if with_figure else ""
    block = "\n".join(["```bash", *map(command_of, comparison.runs), "```"])
    parts = [f"## {title(comparison)}", *tables, "\n".join(lines), figure, block]
    return "\n\n".join(filter(None, parts)) + "\n"


def as_json(comparison: Comparison) -> JsonObject:
    """Return the comparison as a JSON value; docs/OUTPUTS.md explains its keys."""
    return {
        "schema_version": 1,
        **{key: getattr(comparison, key) for key in VERDICTS},
        "work": {key: comparison.facts.get(key) for key in WORK},
        "reported_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "reference": comparison.reference.name if comparison.reference else None,
        "lasting_steps": comparison.lasting,
        "departing": [run.name for run in comparison.departing],
        "verdict": sentences_of(comparison),
        "control": comparison.control and _run_as_json(comparison.control),
        "strategies" if comparison.of_strategies else "runs": [*map(_run_as_json, comparison.runs)],
    }


def _run_as_json(run: RecordedRun) -> JsonObject:
    agreement = run.agreement
    loss, norm = agreement.largest("loss", "eval_loss"), agreement.largest("grad_norm")
    entry = {
        "strategy": run.name,
        "status": run.status,
        "reason": run.reason,
        "folder": str(run.place),
        "command": command_of(run),
        "repeats": len(run.repeats),
        "started_at": run.results.get("started_at"),
        **run.numbers,
        "compared_steps": agreement.steps,
        "unreadable_lines": run.unreadable,
        "first_difference": agreement.first and agreement.first._asdict(),
        "largest_difference": loss and loss._asdict(),
        "largest_norm_difference": norm and norm._asdict(),
        "likely_causes": [entry.name for entry in agreement.causes],
        "differences": [entry._asdict() for entry in agreement.differences],
    }
    return only_finite(entry)


# --------------------------------------------------------------------------- header and provenance


def title(comparison: Comparison) -> str:
    """Describe what was compared in one line: model, ranks, precision, batch, steps."""
    work = comparison.facts
    if not (comparison.of_strategies and work and comparison.reference):
        return "; ".join(f"{run.name}: {run.place}" for run in comparison.runs)
    ranks = f"{work['world_size']} rank{'s' * (work['world_size'] > 1)}"
    if comparison.simulated:
        ranks = f"rank 0 of {work['simulated_world_size']}, simulated"
    precision = work["precision"] + " with TF32" * comparison.reference.in_tf32
    return (
        f"{work['model']} ({work['parameters'] / 1e6:.1f}M parameters), {ranks} on a "
        f"{'GPU' if comparison.on_gpu else 'CPU'}, {precision}, {work['steps']} steps of "
        f"{work['global_batch_size']} sequences of {work['seq_length']} tokens, micro-batches of "
        f"{work['batch_size']}"
    )


def provenance(comparison: Comparison) -> list[str]:
    """Return lines with the hardware, the versions and the date of the measurements."""
    facts = comparison.facts
    machine, dataset = facts.get("hardware"), facts.get("dataset") or {}
    if not (machine and facts.get("versions")):
        return []
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    memory = human_bytes(machine["ram_bytes"])
    data = f"dataset {dataset.get('name')}, sha256 {str(dataset.get('sha256'))[:12]}…"
    return [
        f"Hardware: {machine['gpu'] or 'no GPU'}, {machine['cores']} × {machine['cpu']}, {memory}",
        f"Versions: {versions}",
        f"Measured: {str(facts.get('started_at'))[:10]}; {data}",
    ]


def command_of(run: RecordedRun) -> str:
    """Return the command line of a run, with its launcher if compare_strategies.sh started it."""
    file = run.place / "command.txt"
    return file.read_text().strip() if file.is_file() else str(run.results.get("command", ""))


# ------------------------------------------------------------------------------------------ tables


def tables_of(comparison: Comparison, wide: bool) -> list[Table]:
    """Return the tables: results, then communication and times, or what differs."""
    memory = GPU_MEMORY if comparison.on_gpu else MEMORY
    results, headers = _table_of(comparison.runs, memory + (RESULTS if wide else RESULTS[:NARROW]))
    for cells, run in zip(results, comparison.runs, strict=True):
        cells.insert(1, run.status.replace("_", " "))
    tables: list[Table] = [(results, [headers[0], "status", *headers[1:]])]
    if comparison.of_strategies:
        measured = [run for run in comparison.runs if "step_seconds" in run.numbers]
        tables += [_table_of(measured, STEP)] if measured else []
    for run in [] if comparison.of_strategies else comparison.runs:
        if differences := run.agreement.differences:
            rows = [[d.name, *d.values, CHANGES.get(d.name, d.changes)] for d in differences]
            tables.append((rows, ["", "A", run.name, "changes"]))
    return tables


def _table_of(runs: list[RecordedRun], columns: tuple[Column, ...]) -> Table:
    """Return a table of the columns that at least one run has."""
    columns = tuple(c for c in columns if any(run.numbers.get(c[1]) is not None for run in runs))
    rows = [[run.name, *_cells_of(run, columns)] for run in runs]
    return rows, ["", *(header for header, *_ in columns)]


def _cells_of(run: RecordedRun, columns: tuple[Column, ...]) -> list[str]:
    """Return the numbers of a run as text; "—" for what is not known."""
    values = [(run.numbers.get(key), text, unit) for _, key, text, unit in columns]
    return ["—" if value is None else text.format(value / unit) for value, text, unit in values]


# ----------------------------------------------------------------- rows of a comparison in progress


def progress_header(planned: list[str]) -> str:
    """Return the header of the rows that are printed as the runs complete.

    Args:
        planned: see `compare.planned_of`.
    """
    headers = [header for header, *_ in _progress_columns(planned)]
    return table_header(["", "status", *headers, "time"], _progress_widths(headers), GAP)


def progress_row(run: RecordedRun, planned: list[str]) -> str:
    """Return the row of a run, and the reason in further lines if it did not complete.

    Args:
        planned: see `compare.planned_of`.
    """
    cells = _cells_of(run, _progress_columns(planned))
    time = "—" if run.seconds is None else f"{run.seconds:,} s"
    row = [run.name, run.status.replace("_", " "), *cells, time]
    line = table_row(row, _progress_widths(cells), GAP)
    reason = "" if run.status == "completed" else run.reason
    indent = " " * 3
    return "\n".join(
        [line, *textwrap.wrap(reason, WIDTH, initial_indent=indent, subsequent_indent=indent)]
    )


def _progress_columns(planned: list[str]) -> tuple[Column, ...]:
    memory = GPU_MEMORY if "cuda" in planned else MEMORY
    return memory if "simulated" in planned else memory + RESULTS[:NARROW]


def _progress_widths(columns: Sequence[object]) -> list[int]:
    return [NAME_WIDTH, STATUS_WIDTH, *[CELL_WIDTH] * len(columns), TIME_WIDTH]


# --------------------------------------------------------------------------------------- sentences


def sentences_of(comparison: Comparison) -> list[str]:
    """Return the conclusions: equal losses, speed, memory, and what the comparison cannot show."""
    reference, sentences = comparison.reference, []
    if comparison.simulated:
        sentences = ["This is a memory simulation: nothing was trained."]
    elif reference:
        sentences = [difference_of(run, reference) for run in comparison.departing]
        sentences += _equal_losses(comparison, reference)
        sentences += _control(comparison.control) if comparison.control else []
        sentences += _speed_and_memory(comparison) if comparison.of_strategies else []
    return [*sentences, *_unreadable(comparison), *_incomplete(comparison)]


def _equal_losses(comparison: Comparison, reference: RecordedRun) -> Iterator[str]:
    """Say which losses and gradient norms agree, and claim no more than the control showed."""
    equal = [(run.name, run.agreement) for run in comparison.compared if not run.agreement.first]
    losses = [(*each, p) for each in equal if (p := each[1].largest("loss", "eval_loss"))]
    norms = [(*each, p) for each in equal if (p := each[1].largest("grad_norm"))]
    if not losses:
        return
    mark = {True: "✅ Same model", False: "ℹ️  No difference found", None: "✅ Equal losses"}
    *names, last = [name for name, _ in equal]
    worst, agreement, loss = max(losses, key=lambda each: each[2].relative)
    steps, compared = min(agreement.tolerance.steps, agreement.steps), [a.steps for _, a in equal]
    text = (
        f"{mark[comparison.conclusive]}: the losses of {', '.join(names)}{' and ' * bool(names)}"
        f"{last} agree with those of {reference.name} in {min(compared):,} steps."
        f" The largest relative difference is {loss.relative:.1e}"
        f"{f' in medians of {steps} steps' * (steps > 1)} ({worst}, step {loss.last}); "
        f"tolerance {agreement.tolerance.loss:g}."
    )
    if len(norms) == len(equal):  # earlier versions recorded none
        worst, agreement, norm = max(norms, key=lambda each: each[2].relative)
        text += (
            f" The gradient norms differ by up to {norm.relative:.1e} ({worst}, step "
            f"{norm.last}); tolerance {agreement.tolerance.grad_norm:g}."
        )
    yield text


def _control(control: RecordedRun) -> Iterator[str]:
    """Say whether the control's higher learning rate exceeded the tolerance."""
    loss, first = control.agreement.largest("loss", "eval_loss"), control.agreement.first
    if loss is None:
        return
    text = f"Control: with a higher learning rate the losses differ by up to {loss.relative:.1e}"
    if first is None:
        yield (
            f"ℹ️  {text}, which is within the tolerance. The comparison does not "
            "detect a fault of this size: use --precision fp32 or more steps."
        )
    elif first.of == "grad_norm":
        yield (
            f"{text}, which is within the tolerance, and the gradient norms by {first.relative:.1e}"
            f" at step {first.last}, which exceeds it. The comparison detects a fault of this size."
        )
    else:
        yield (
            f"{text}, and exceed the tolerance at step {first.last}. The comparison "
            "detects a fault of this size."
        )


def difference_of(run: RecordedRun, reference: RecordedRun) -> str:
    """Say where a run differs from the reference, and the likely causes."""
    agreement, departures = run.agreement, run.agreement.departures
    first, norm = departures[0], next((p for p in departures if p.of == "grad_norm"), None)
    largest = agreement.largest(first.of) or first
    other = "another repeat" if run is reference else reference.name
    text = (
        f"❌ {run.name}: the {NAMES[first.of]} differ from those of {other} from step "
        f"{_values(first)}. The largest difference is {largest.relative:.1e}, at step "
        f"{largest.last}."
    )
    if first.of == "grad_norm":
        text += " The training losses agree."
    elif norm and norm.last <= first.last:
        text += f" The gradient norms differ from step {_values(norm)}."
    bits = [each.numbers.get("bits_per_byte") for each in (reference, run)]
    if None not in bits and "tokenizer" in [d.name for d in agreement.differences]:
        text += (
            " A loss per token depends on the tokenizer. The last evaluations are comparable in "
            f"bits per byte: {bits[0]:.4f} and {bits[1]:.4f}."
        )
    if likely := agreement.causes[:MOST_CAUSES]:
        causes = [f"{cause}, which changes {cause.changes}" for cause in likely]
        return f"{text} Likely cause: {'; or '.join(causes)}."
    found = [fact for fact in agreement.differences if fact.changes == ROUNDING]
    names = ", ".join(map(str, found)) or "nothing that the runs record"
    rounding = max(run.rounding, reference.rounding)
    limit = rounding.grad_norm if first.of == "grad_norm" else rounding.loss
    if largest.relative <= limit:
        return f"{text} Likely cause: rounding, up to {limit:.0e} relative, because of {names}."
    return (
        f"{text} This is more than rounding explains ({limit:.0e} relative), and what differs is "
        f"{names}. Repeat with --precision fp32 --deterministic to tell a fault from rounding."
    )


def _values(point: Point) -> str:
    """Return the step of a point, and its two values."""
    digits = ".4f" if point.relative > 1e-4 else ".8g"
    values = f"{point.a:{digits}} and {point.b:{digits}}"
    return f"{point.last} ({values}, {point.relative:.1e} relative)"


def _speed_and_memory(comparison: Comparison) -> Iterator[str]:
    """Name the fastest strategies, if the runs had the same load, and that with least memory."""
    if runs := [run for run in comparison.runs if run.numbers and not run.agreement.first]:
        least = min(runs, key=lambda run: run.numbers["memory_bytes"]).name
        memory = "GPU memory" if comparison.on_gpu else "memory for model states"
        one = " One rank cannot show what sharding saves or what communication costs."
        yield _fastest(comparison, runs)
        yield f"Least {memory}: {least}.{one * (comparison.facts['world_size'] == 1)}"


def _fastest(comparison: Comparison, runs: list[RecordedRun]) -> str:
    """Name the fastest runs; several if the speed of the machine changed by more than theirs."""
    speeds = {run.name: run.numbers["samples_per_second"] for run in runs}
    limit = max(speeds.values()) / (1 + comparison.speed_change)
    fastest = f"Fastest: {', '.join(name for name, speed in speeds.items() if speed >= limit)}."
    if not comparison.control:
        return fastest
    same_work = (
        "the control does the same work as dp and ran at "
        f"{comparison.control.numbers['speed']:.2f} times its speed"
    )
    if comparison.speeds_are_comparable:
        return f"{fastest} Smaller differences of speed are not significant: {same_work}."
    return (
        f"⚠️  The speeds are not comparable: {same_work}. Other programs may have used the "
        "machine. Compare again with REPEATS=3."
    )


def _unreadable(comparison: Comparison) -> Iterator[str]:
    """Name the lines of metrics.jsonl that are not part of the comparison."""
    for run in filter(None, [*comparison.runs, comparison.control]):
        for repeat in run.repeats or [run]:
            if repeat.unreadable:
                yield f"⚠️  {unreadable_lines(repeat.place / FILE, repeat.unreadable)}"


def _incomplete(comparison: Comparison) -> Iterator[str]:
    """Name the runs that did not complete or could not be compared, with reason and log."""
    for run in comparison.runs:
        if comparison.of_strategies and run.status != "completed":
            mark = "ℹ️ " if run.status in ("skipped", "not run") else "❌"
            yield f"{mark} {run.name}: {run.status}. {run.reason}"
        elif not (comparison.of_strategies or run.agreement.points or run is comparison.reference):
            yield f"❌ {run.name}: no step in common ({run.status}). {run.reason}"
