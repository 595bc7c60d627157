"""The report on a comparison: tables of numbers and a few sentences; text, Markdown, JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

from support.console import markdown_table, text_table
from support.files.atomic import only_finite
from support.report import PHASES
from support.report.compare import (
    TOLERANCES,
    Comparison,
    RecordedRun,
    Row,
    read_text,
    state_bytes,
    tolerance_of,
)
from support.tables import STRATEGIES
from support.units import GB, MB, human_bytes, human_rate

WIDTH = 80
MOST_CAUSES = 3  # that a sentence names
Table = tuple[list[list[str]], list[str]]  # rows and headers


def as_text(comparison: Comparison, wide: bool = False) -> str:
    """Return the text for the terminal and the .txt file; `wide` adds columns to the 80."""
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent="   ", break_on_hyphens=False, break_long_words=False
    )
    tables = [text_table(*table) for table in tables_of(comparison, wide) if table[0]]
    sentences = "\n".join(map(wrapper.fill, sentences_of(comparison)))
    origin = "\n".join(map(wrapper.fill, provenance(comparison)))
    parts = [wrapper.fill(title(comparison)), *tables[:1], sentences, *tables[1:], origin]
    return "\n\n".join(parts) + "\n"


def as_markdown(comparison: Comparison) -> str:
    """Return the .md file, for a README or a lab notebook, with all columns."""
    tables = [markdown_table(*table) for table in tables_of(comparison, True) if table[0]]
    parts = [f"## {title(comparison)}", *tables[:1]]
    parts.append("\n".join(f"- {line}" for line in sentences_of(comparison)))
    if comparison.reference:
        parts.append(f"![Charts](comparison_results_{comparison.name}.png)")
    parts += [*tables[1:], "\n".join(f"- {line}" for line in provenance(comparison))]
    parts.append("```bash\n" + "\n".join(commands_of(comparison)) + "\n```")
    return "\n\n".join(parts) + "\n"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as a JSON value; docs/OUTPUTS.md explains its keys."""
    keys = ("name", "tolerance", "same_model", "speeds_are_comparable", "exit_code", "step_cap")
    return {
        "schema_version": 1,
        **{key: getattr(comparison, key) for key in (*keys, "work")},
        "reported_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "reference": comparison.reference.name if comparison.reference else None,
        "lasting_steps": comparison.lasting,
        "equal": comparison.same_model is True,
        "departing": [row.name for row in comparison.departing],
        "hardware": comparison.facts.get("hardware"),
        "versions": comparison.facts.get("versions"),
        "verdict": sentences_of(comparison),
        "control": comparison.control and _row_as_json(comparison.control),
        "strategies" if comparison.of_strategies else "runs": [*map(_row_as_json, comparison.rows)],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    attempts = [
        {
            "folder": str(run.place),
            "steps": extent_of(run),
            "command": command_of(run),
            **{key: getattr(run, key) for key in ("status", "reason", "kept")},
            **{key: run.results.get(key) for key in ("started_at", "samples_per_second")},
        }
        for run in row.runs
    ]
    entry = {
        "strategy": row.name,
        "status": row.status,
        "reason": row.reason,
        **row.numbers,
        "attempts": attempts,
        "compared_steps": sum(point.last - point.first + 1 for point in row.points),
        "first_difference": row.first and row.first._asdict(),
        "largest_difference": row.largest and row.largest._asdict(),
        "likely_causes": [entry.name for entry in row.causes],
        "differences": [
            {"name": entry.name, "a": entry.a, "b": entry.b}
            | {"changes": entry.effect.on, "effect": entry.effect.text}
            for entry in row.differences
        ],
    }
    return only_finite(entry)


# --------------------------------------------------------------------------- header and provenance


def title(comparison: Comparison) -> str:
    """Describe what was compared in one line: model, ranks, precision, batch, steps."""
    work = comparison.work
    if not comparison.of_strategies:
        runs = [(row.name, row.runs[0]) for row in comparison.rows]
        return "; ".join(f"{name}: {run.place}, {extent_of(run)}" for name, run in runs)
    if not work:
        return f"Comparison of strategies: {comparison.name}"
    one, several = ("GPU", "GPUs") if comparison.on_gpu else ("CPU process", "CPU processes")
    ranks = f"{work['world_size']} {one if work['world_size'] == 1 else several}"
    if comparison.simulated:
        ranks = f"1 of {work['simulated_world_size']} simulated {several}"
    micro_steps, size = work["gradient_accumulation_steps"], work["batch_size"]
    batch = f"{size} block{'s' * (size > 1)} of {work['seq_length']} tokens each"
    batch += f" × {micro_steps} micro-batches" if micro_steps > 1 else ""
    steps = f"{work['steps']} steps"
    steps += " (the comparison's default cap)" if comparison.step_cap == work["steps"] else ""
    repeats = max(len(row.runs) for row in comparison.rows)
    steps += f", {repeats} repeats" if repeats > 1 else ""
    model = f"{work['model']} ({work['parameters'] / 1e6:.1f}M parameters)"
    return f"{model} on {ranks}, {work['precision']}, {batch}, {steps}"


def provenance(comparison: Comparison) -> list[str]:
    """Return lines with the hardware, the versions and the date of the measurements."""
    facts = comparison.facts
    machine, dataset = facts.get("hardware"), facts.get("dataset") or {}
    if not (machine and facts.get("versions")):
        return []
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    memory = human_bytes(machine["ram_bytes"])
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return [
        f"Hardware: {machine['gpu'] or 'no GPU'}, {cores} of {machine['cpu']}, {memory} of memory",
        f"Versions: {versions}",
        f"Measured: {str(facts.get('started_at'))[:10]}; dataset {dataset.get('name')}, "
        f"sha256 {str(dataset.get('sha256'))[:12]}…",
    ]


def extent_of(run: RecordedRun) -> str:
    """Describe the steps that have a loss."""
    if not run.losses:
        return "no step"
    return f"steps {run.losses[0].start + 1:,} to {run.losses[-1].end:,}"


def command_of(run: RecordedRun) -> str:
    """Return the command line of a run, with its launcher if compare_strategies.sh started it."""
    return read_text(run.place / "command.txt").strip() or str(run.results.get("command", ""))


def commands_of(comparison: Comparison) -> list[str]:
    """Return the command line of each run."""
    return [*filter(None, (command_of(run) for row in comparison.rows for run in row.runs))]


# ------------------------------------------------------------------------------------------ tables


def tables_of(comparison: Comparison, wide: bool) -> list[Table]:
    """Return the tables: results, then communication and times, or what differs between runs."""
    columns = _columns(comparison, wide)
    rows = []
    for row in comparison.rows:
        status = "kept" if row.kept and row.status == "completed" else row.status.replace("_", " ")
        rows.append([row.name, status])
        for cell in columns.values():
            try:
                rows[-1].append(cell(row.numbers))
            except TypeError:  # the row lacks the number
                rows[-1].append("—")
    results: Table = (rows, ["", "status", *columns])
    if not comparison.of_strategies:
        return [results, *(_facts_table(row, wide) for row in comparison.rows[1:])]
    return [results] if comparison.simulated else [results, _step_table(comparison)]


def _columns(comparison: Comparison, wide: bool) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Return the cell of a row for each column, by the column's header."""
    unit, digits, memory = (GB, 2, "GPU\npeak\nGB") if comparison.on_gpu else (MB, 1, "state\nMB")

    def size(name: str, unit: int = unit, digits: int = digits) -> Callable[[dict], str]:
        return lambda n: f"{n[name] / unit:,.{digits}f}"

    saved = {"saved": lambda n: f"{100 * n['saved']:.0f}%"}
    if comparison.simulated:
        return {
            "states\nMB": lambda n: f"{state_bytes(n['categories']) / MB:,.1f}",
            "plan": lambda n: f"{state_bytes(n['planned']) / MB:,.1f}",
            **saved,
            "activ-\nations": size("activations", MB, 1),
            "logits": size("logits", MB, 1),
            "peak": size("step_peak_bytes", MB, 1),
            "plan\nof it": lambda n: f"{n['step_peak_bytes'] and n['planned']['peak'] / MB:,.1f}",
        }
    columns = {
        memory: size("memory_bytes"),
        "plan": size("planned_bytes"),
        "samples\n/s": lambda n: human_rate(n["samples_per_second"]),
        f"speed\nvs {comparison.reference.name if comparison.reference else 'dp'}": lambda n: (
            f"{n['speed']:.2f} ±{(n['speed_high'] - n['speed_low']) / 2:.2f}"
        ),
        "final\nloss": lambda n: f"{n['final_loss']:.4f}",
        "loss\ndiff.": lambda n: (
            f"{n['difference']:.1e}{' ❌' if n['departs_at'] else ''}" if n["difference"] else "0"
        ),
    }
    if wide:
        columns |= {
            **saved,
            "host\nGB/rank": size("host_bytes", GB, 2),
            "NVMe\nMB": size("nvme_bytes", MB, 0),
            "tokens/s\n/rank": lambda n: f"{n['tokens_per_second_per_gpu']:,.0f}",
        }
    return columns


def _step_table(comparison: Comparison) -> Table:
    """Return what a rank sends, next to the ZeRO paper, and the time of each phase of a step.

    The paper (arXiv 1910.02054, section 7) has no gradient accumulation.
    """
    rows = []
    for row in comparison.rows:
        if seconds := row.numbers["phases_seconds"]:
            sent, volume = row.numbers["sent_bytes"], row.numbers["volume"]
            paper = "3P" if STRATEGIES[row.name].shards_parameters else "2P"
            cells = ["—" if sent is None else f"{sent / MB:,.1f}"]
            cells += ["—" if volume is None else f"{volume:.2f}P", paper]
            times = [sum(seconds.values()), *(seconds[phase] for phase in PHASES)]
            rows.append([row.name, *cells, *(f"{1000 * time:.0f}" for time in times)])
    headers = ["", "sent\nMB/step", "volume", "paper", "step\nms", "data", "for-\nward"]
    return rows, [*headers, "back-\nward", "up-\ndate"]


def _facts_table(row: Row, wide: bool) -> Table:
    """Return what differs between a run and the reference, with the effect on the losses."""
    rows = [
        [entry.name, *entry.values, entry.effect.text if wide else entry.effect.on]
        for entry in row.differences
        if wide or entry.effect.on != "nothing"
    ]
    return rows, ["", "A", row.name, "can change"]


# --------------------------------------------------------------------------------------- sentences


def sentences_of(comparison: Comparison) -> list[str]:
    """Return the conclusions: equal losses, speed, memory, and what the comparison cannot show."""
    if comparison.reference is None:
        sentences = ["❌ No strategy completed, so there is nothing to compare."]
    elif comparison.simulated:
        sentences = [
            "This is a memory simulation: one process allocated what rank 0 of "
            f"{comparison.work['simulated_world_size']} ranks would. Nothing was trained."
        ]
    else:
        sentences = [*_losses(comparison, comparison.reference)]
        rows = [row for row in comparison.rows if row.measured and not row.first]
        if comparison.of_strategies and rows:
            sentences += [_speeds(comparison, rows), _smallest(comparison, rows)]
    return [*sentences, *_files(comparison)]


def _losses(comparison: Comparison, reference: Row) -> Iterator[str]:
    """Say whose losses agree with the reference's, and whose differ and why."""
    for row in comparison.rows:
        alone = not (row is reference or row.points or row.evaluations or comparison.of_strategies)
        if row.first or alone:
            yield row_sentence(row, comparison)
    if equal := [row for row in comparison.compared if not row.first]:
        points = [(point, row) for row in equal for point in row.points + row.evaluations]
        worst, row = max(points, key=lambda entry: entry[0].relative)
        steps = min(sum(point.last - point.first + 1 for point in row.points) for row in equal)
        medians = f" in medians of {comparison.lasting} steps" if comparison.lasting > 1 else ""
        *names, last = [row.name for row in equal]
        yield (
            f"✅ Same model: the losses of {', '.join(names)}{' and ' * bool(names)}{last} agree "
            f"with those of {reference.name} in all {steps:,} steps"
            f"{' and in the evaluations' if row.evaluations else ''}. The largest relative "
            f"difference is {worst.relative:.1e}{medians} ({row.name}, {worst.steps}); tolerance "
            f"{comparison.tolerance:g}."
        )
    if not comparison.compared and comparison.of_strategies:
        yield f"ℹ️  Only {reference.name} completed, so no losses could be compared."
    if comparison.control and comparison.compared:
        yield _control(comparison.control, reference)


def row_sentence(row: Row, comparison: Comparison) -> str:
    """Say how the losses of a row differ from the reference's, and the likely cause."""
    first, largest, reference = row.first, row.largest, comparison.reference
    if first is None or reference is None:
        status = f"{row.status}{': ' * bool(row.reason)}{row.reason}"
        return f"❌ {row.name}: no loss could be compared, no step in common ({status})."
    what, on = "training losses agree, and the evaluations", ""
    if first in row.points:
        what, later = "losses", row.points[row.points.index(first) :]
        on = " on" if all(point.relative > (comparison.tolerance or 0) for point in later) else ""
    digits = ".4f" if first.relative > 1e-4 else ".8g"
    text = (
        f"❌ {row.name}: the {what} differ from those of "
        f"{'its first run' if row is reference else reference.name} from {first.steps}{on} "
        f"({first.a:{digits}} and {first.b:{digits}}, {first.relative:.1e} relative)."
    )
    if largest and largest != first and first in row.points:
        text += f" The largest difference is {largest.relative:.1e}, at {largest.steps}."
    named = "; or ".join(f"{entry}: {entry.effect.text}" for entry in row.causes[:MOST_CAUSES])
    return text + (f" Likely cause: {named}." if named else _rounding(row))


def _rounding(row: Row) -> str:
    """Say whether rounding explains the difference, where no recorded fact changes the losses."""
    results = row.runs[0].results
    found = [entry for entry in row.differences if entry.effect.on == "rounding"]
    precisions = {str(entry.a) for entry in found if entry.name == "precision"}
    precisions = {*precisions, str(results.get("precision"))} & TOLERANCES.keys()
    on_gpu = results.get("device") == "cuda"
    limit = max((tolerance_of(name, on_gpu) for name in precisions), default=TOLERANCES["fp32"])
    names = ", ".join(map(str, found)) or "nothing that the runs record"
    if row.largest and row.largest.relative <= limit:
        return f" Likely cause: rounding, up to {limit:.0e} relative, because of {names}."
    return (
        f" This is more than rounding explains ({limit:.0e} relative), and what differs is "
        f"{names}. Repeat with --precision fp32 --deterministic to tell a fault from rounding."
    )


def _control(control: Row, reference: Row) -> str:
    """Say whether the losses would show a strategy that trains slightly differently."""
    rates = [next(iter(row.completed[0].lrs.values())) for row in (control, reference)]
    text = (
        f"with a {100 * (rates[0] / rates[1] - 1):.0f}% higher learning rate the losses of "
        f"{reference.name} differ by up to {control.numbers['difference']:.1e}"
    )
    if control.first:
        at = f"and exceed the tolerance at step {control.first.last}"
        return f"Control: {text}, {at}. The comparison detects a fault of this size."
    return (
        f"ℹ️  Control: {text}, which is within the tolerance. The comparison does not detect a "
        "fault of this size: use --precision fp32 or more steps."
    )


def _speeds(comparison: Comparison, rows: list[Row]) -> str:
    """Name the fastest and the slowest, if the runs had the same load."""
    if not comparison.speeds_are_comparable:
        reason = "some runs were kept from an earlier comparison (RESUME=1)"
        if comparison.control:
            speed = comparison.control.numbers["speed"]
            reason = f"the control does the same work as dp and ran at {speed:.2f} times its speed"
        return (
            f"⚠️  The speeds are not comparable: {reason}. Other programs may have used the "
            "machine. Compare again without RESUME, with REPEATS=3."
        )
    ranking = sorted(rows, key=lambda row: -row.numbers["samples_per_second"])
    fastest, slowest = (row.numbers["samples_per_second"] for row in (ranking[0], ranking[-1]))
    text = f"Fastest: {ranking[0].name}, {human_rate(fastest)} samples/s"
    if len(rows) > 1:
        text += f"; slowest: {ranking[-1].name}, {slowest / fastest:.2f} times that"
    one = "GPU" if comparison.on_gpu else "process"
    if comparison.work["world_size"] == 1:
        text += f". One {one} cannot show what sharding saves or what communication costs"
    if not comparison.on_gpu:
        text += ". The ranks share this CPU and its memory, so the order can differ on GPUs"
    return f"{text}."


def _smallest(comparison: Comparison, rows: list[Row]) -> str:
    """Name the strategy with the least GPU memory, and the least without offloading."""
    on_device = [row for row in rows if not STRATEGIES[row.name].offloads]
    least, without = (
        min(some, key=lambda row: row.numbers["memory_bytes"]) for some in (rows, on_device or rows)
    )
    sizes = [human_bytes(row.numbers["memory_bytes"]) for row in (least, without)]
    usage = "at its peak" if comparison.on_gpu else "of model states"
    text = f"Least GPU memory: {least.name}, {sizes[0]} per rank {usage}."
    return text if without is least else f"{text} Without offloading: {without.name}, {sizes[1]}."


def _files(comparison: Comparison) -> Iterator[str]:
    """Name the runs that did not complete, with reason and log, and what files lack."""
    for row in comparison.rows:
        for run in row.completed:
            if run.reason:
                yield f"⚠️  {row.name}: {run.reason}. What is missing is left out."
        if row.status != "completed":
            text = f"{row.name}: {row.status.replace('_', ' ')}"
            if row.completed:
                text += f" ({len(row.completed)} of {len(row.runs)} repeats completed)"
            mark = "ℹ️ " if row.status in ("skipped", "not run") else "❌"
            logs = [run.place / "log.txt" for run in row.runs if not run.completed]
            log = f" Log: {logs[0]}" if logs and logs[0].is_file() else ""
            yield f"{mark} {text}. {row.reason}{log}"
