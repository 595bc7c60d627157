"""The report on a comparison: tables of numbers and a few sentences; text, Markdown, JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

from support.files.atomic import only_finite
from support.report import PHASES
from support.report.compare import TOLERANCES, Comparison, Row, state_bytes, tolerance_of
from support.strategy import STRATEGIES
from support.text_tables import markdown_table, text_table
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
    figure = f"![Memory, throughput and losses](comparison_results_{comparison.name}.png)"
    parts = [
        f"## {title(comparison)}",
        *tables[:1],
        "\n".join(f"- {line}" for line in sentences_of(comparison)),
        *([figure] if comparison.reference else []),
        *tables[1:],
        "\n".join(f"- {line}" for line in provenance(comparison)),
        "```bash\n" + "\n".join(commands_of(comparison)) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as a JSON value; docs/OUTPUTS.md explains its keys."""
    row = next((row for row in comparison.rows if row is not comparison.reference), None)
    return {
        "schema_version": 1,
        "name": comparison.name,
        "reported_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "reference": comparison.reference.name if comparison.reference else None,
        "tolerance": comparison.tolerance,
        "lasting_steps": comparison.lasting,
        "equal": comparison.same_model is True,
        "same_model": comparison.same_model,
        "speeds_are_comparable": comparison.speeds_are_comparable,
        "departing": [row.name for row in comparison.departing],
        "exit_code": comparison.exit_code,
        "step_cap": comparison.step_cap,
        "work": comparison.work,
        "hardware": comparison.facts.get("hardware"),
        "versions": comparison.facts.get("versions"),
        "verdict": sentences_of(comparison),
        "control": _row_as_json(comparison.control) if comparison.control else None,
        **({} if comparison.of_strategies or row is None else _difference_as_json(row)),
        "strategies" if comparison.of_strategies else "runs": [*map(_row_as_json, comparison.rows)],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    runs = [
        {
            "status": run.status,
            "reason": run.reason,
            "folder": str(run.place),
            "steps": run.extent,
            "kept": run.kept,
            "command": run.command,
            "started_at": run.results.get("started_at"),
            "samples_per_second": run.results.get("samples_per_second"),
        }
        for run in row.runs
    ]
    numbers = {"strategy": row.name, "status": row.status, "reason": row.reason, **row.numbers}
    return only_finite({**numbers, "attempts": runs})


def _difference_as_json(row: Row) -> dict[str, Any]:
    """Return how the second of two runs differs from the first."""
    return only_finite(
        {
            "answer": row_sentence(row, "A"),
            "compared_steps": sum(point.last - point.first + 1 for point in row.points),
            "first_difference": row.first and vars(row.first),
            "largest_difference": row.largest and vars(row.largest),
            "evaluations": [vars(point) for point in row.evaluations],
            "likely_causes": [entry.name for entry in row.causes],
            "differences": [
                {"name": entry.name, "a": entry.a, "b": entry.b}
                | {"changes": entry.effect.on, "effect": entry.effect.text}
                for entry in row.differences
            ],
        }
    )


# ------------------------------------------------------------------------------------------ header


def title(comparison: Comparison) -> str:
    """Describe what was compared in one line: model, ranks, precision, batch, steps."""
    work = comparison.work
    if not comparison.of_strategies:
        runs = [(row.name, row.runs[0]) for row in comparison.rows]
        return "; ".join(f"{name}: {run.place}, {run.extent}" for name, run in runs)
    if not work:
        return f"Comparison of strategies: {comparison.name}"
    one, several = ("GPU", "GPUs") if comparison.on_gpu else ("CPU process", "CPU processes")
    ranks = f"{work['world_size']} {one if work['world_size'] == 1 else several}"
    if comparison.simulated:
        ranks = f"1 of {work['simulated_world_size']} simulated {several}"
    micro_steps, size = work["gradient_accumulation_steps"], work["batch_size"]
    batch = f"{size} block{'s' * (size > 1)} of {work['seq_length']} tokens each"
    batch += f" × {micro_steps} micro-batches" if micro_steps > 1 else ""
    capped = " (the comparison's default cap)" if comparison.step_cap == work["steps"] else ""
    repeats = max(len(row.runs) for row in comparison.rows)
    repeated = f", {repeats} repeats" if repeats > 1 else ""
    model = f"{work['model']} ({work['parameters'] / 1e6:.1f}M parameters)"
    steps = f"{work['steps']} steps{capped}{repeated}"
    return f"{model} on {ranks}, {work['precision']}, {batch}, {steps}"


def provenance(comparison: Comparison) -> list[str]:
    """Return lines with the hardware, the versions and the date of the measurements."""
    facts = comparison.facts
    machine, dataset = facts.get("hardware") or {}, facts.get("dataset") or {}
    if not (machine.get("cpu") and facts.get("versions")):
        return []
    gpu = machine.get("gpu") or "no GPU"
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    memory = human_bytes(machine["ram_bytes"])
    return [
        f"Hardware: {gpu}, {cores} of {machine['cpu']}, {memory} of memory",
        f"Versions: {versions}",
        f"Measured: {str(facts.get('started_at'))[:10]}; dataset {dataset.get('name')}, "
        f"sha256 {str(dataset.get('sha256'))[:12]}…",
    ]


def commands_of(comparison: Comparison) -> list[str]:
    """Return the command line of each run."""
    return [run.command for row in comparison.rows for run in row.runs if run.command]


# ------------------------------------------------------------------------------------------ tables


def tables_of(comparison: Comparison, wide: bool) -> list[Table]:
    """Return the tables: results, then communication and times, or what differs between runs."""
    columns = _columns(comparison, wide)
    cells = [
        [
            row.name,
            "kept" if row.kept and row.status == "completed" else row.status.replace("_", " "),
            *[_cell(cell, row) for cell in columns.values()],
        ]
        for row in comparison.rows
    ]
    results: Table = (cells, ["", "status", *columns])
    if not comparison.of_strategies:
        return [results, *(_facts_table(row, wide) for row in comparison.rows[1:])]
    return [results] if comparison.simulated else [results, _step_table(comparison)]


def _cell(cell: Callable[[dict[str, Any]], str], row: Row) -> str:
    try:
        return cell(row.numbers)
    except TypeError:  # the row lacks the number
        return "—"


def _columns(comparison: Comparison, wide: bool) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Return the cell of a row for each column, by the column's header."""
    unit, digits, memory = (GB, 2, "GPU\npeak\nGB") if comparison.on_gpu else (MB, 1, "state\nMB")

    def size(name: str, unit: int = unit, digits: int = digits) -> Callable[[dict], str]:
        return lambda n: f"{n[name] / unit:,.{digits}f}"

    def kinds(*names: str) -> Callable[[dict], str]:
        return lambda n: f"{sum(n['categories'][name] for name in names) / MB:,.1f}"

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
            **(
                {name: kinds(name) for name in ("parameters", "gradients", "optimizer")}
                if wide
                else {}
            ),
            **({"buffers,\nother": kinds("buffers", "other")} if wide else {}),
        }
    reference = comparison.reference.name if comparison.reference else "dp"
    columns = {
        memory: size("memory_bytes"),
        "plan": size("planned_bytes"),
        "samples\n/s": lambda n: human_rate(n["samples_per_second"]),
        f"speed\nvs {reference}": lambda n: (
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
            "slowest to\nfastest": lambda n: f"{n['speed_low']:.2f}–{n['speed_high']:.2f}",
        }
    return columns


def _step_table(comparison: Comparison) -> Table:
    """Return what a rank sends, next to the ZeRO paper, and the time of each phase of a step.

    The paper (arXiv 1910.02054, section 7) has no gradient accumulation.
    """
    headers = ["", "sent\nMB/step", "volume", "paper", "step\nms", "data", "for-\nward"]
    rows = []
    for row in comparison.rows:
        if seconds := row.numbers["phases_seconds"]:
            sent, volume = row.numbers["sent_bytes"], row.numbers["volume"]
            rows.append(
                [
                    row.name,
                    "—" if sent is None else f"{sent / MB:,.1f}",
                    "—" if volume is None else f"{volume:.2f}P",
                    "3P" if STRATEGIES[row.name].shards_parameters else "2P",
                    f"{1000 * sum(seconds.values()):.0f}",
                    *[f"{1000 * seconds[phase]:.0f}" for phase in PHASES],
                ]
            )
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
    reference = comparison.reference
    if reference is None:
        sentences = ["❌ No strategy completed, so there is nothing to compare."]
    elif comparison.simulated:
        sentences = [_simulated(comparison)]
    else:
        sentences = [*_losses(comparison, reference)]
        rows = [row for row in comparison.rows if row.measured and not row.departs]
        if comparison.of_strategies and rows:
            sentences += [_speeds(comparison, rows), _smallest(comparison, rows)]
            sentences += _limits(comparison)
    return [*sentences, *_files(comparison)]


def _losses(comparison: Comparison, reference: Row) -> Iterator[str]:
    """Say whose losses agree with the reference's, and whose differ and why."""
    if comparison.of_strategies and reference.name != "dp":
        dp = next((row for row in comparison.rows if row.name == "dp"), None)
        reason = f"did not complete ({dp.status})" if dp else "was left out"
        others = f"the others are compared with {reference.name}"
        yield f"ℹ️  dp, the plain reference, {reason}: {others}."
    for row in comparison.departing:
        yield row_sentence(row, "its first run" if row is reference else reference.name)
    if equal := [row for row in comparison.compared if not row.departs]:
        yield _agreement(comparison, equal)
    for row in comparison.rows:
        if not (row is reference or row.points or row.evaluations or comparison.of_strategies):
            yield row_sentence(row, reference.name)
    if comparison.of_strategies and not comparison.compared:
        yield f"ℹ️  Only {reference.name} completed, so no losses could be compared."
    if comparison.control and comparison.control.points and comparison.compared:
        yield _control(comparison.control, reference)


def _agreement(comparison: Comparison, rows: list[Row]) -> str:
    points = [(point, row) for row in rows for point in row.points + row.evaluations]
    worst, row = max(points, key=lambda entry: entry[0].relative)
    steps = min(sum(point.last - point.first + 1 for point in row.points) for row in rows)
    over = f"in all {steps:,} steps" + (" and in the evaluations" if row.evaluations else "")
    medians = f" in medians of {comparison.lasting} steps" if comparison.lasting > 1 else ""
    assert comparison.reference is not None
    return (
        f"✅ Same model: the losses of {_names(rows)} agree with those of "
        f"{comparison.reference.name} {over}. The largest relative difference is "
        f"{worst.relative:.1e}{medians} ({row.name}, {worst.steps}); tolerance "
        f"{comparison.tolerance:g}."
    )


def row_sentence(row: Row, reference: str) -> str:
    """Say how the losses of a row differ from the reference's, and the likely cause."""
    if not (row.points or row.evaluations):
        status = f"{row.status}{': ' * bool(row.reason)}{row.reason}"
        return f"❌ {row.name}: no loss could be compared, no step in common ({status})."
    first = row.first or row.first_evaluation
    if first is None:
        return f"✅ {row.name}: the losses agree with those of {reference}."
    what = "losses" if row.first else "training losses agree, and the evaluations"
    later = row.points[row.points.index(row.first) :] if row.first else []
    on = " on" if later and all(point.relative > row.tolerance for point in later) else ""
    text = f"❌ {row.name}: the {what} differ from those of {reference} from {first.steps}{on} "
    text += f"({first.losses})."
    if row.first and row.largest and row.largest is not row.first:
        text += f" The largest difference is {row.largest.relative:.1e}, at {row.largest.steps}."
    causes = "; or ".join(f"{entry}: {entry.effect.text}" for entry in row.causes[:MOST_CAUSES])
    return text + (f" Likely cause: {causes}." if causes else _rounding(row))


def _rounding(row: Row) -> str:
    """Say whether rounding explains the difference, where no recorded fact changes the losses."""
    results = row.runs[0].results
    names = [str(entry) for entry in row.differences if entry.effect.on == "rounding"]
    if not results:
        return " trainer_state.json does not record what could explain it: compare the arguments."
    if not names:
        return (
            " Nothing that the runs record explains it. On a GPU, some kernels add in no fixed "
            "order: --deterministic."
        )
    other = [entry.a for entry in row.differences if entry.name == "precision"]
    precisions = {str(name) for name in (*other, results.get("precision"))} & {*TOLERANCES}
    on_gpu = results.get("device") == "cuda"
    limit = max((tolerance_of(name, on_gpu) for name in precisions), default=TOLERANCES["fp32"])
    if row.largest and row.largest.relative <= limit:
        return (
            f" Likely cause: rounding, up to {limit:.0e} relative, because of {', '.join(names)}."
        )
    return (
        f" This is more than rounding explains ({limit:.0e} relative), and the runs record no "
        f"other cause than {', '.join(names)}. Repeat with --precision fp32 to tell a fault from "
        "rounding."
    )


def _control(control: Row, reference: Row) -> str:
    """Say whether the losses would show a strategy that trains slightly differently."""
    rates = [next(iter(row.completed[0].lrs.values()), math.nan) for row in (control, reference)]
    largest = control.largest.relative if control.largest else 0.0
    text = (
        f"with a {100 * (rates[0] / rates[1] - 1):.0f}% higher learning rate the losses of "
        f"{reference.name} differ by up to {largest:.1e}"
    )
    if control.first:
        at = f"and exceed the tolerance at step {control.first.last}"
        return f"Control: {text}, {at}. The comparison detects a fault of this size."
    return (
        f"ℹ️  Control: {text}, which is within the tolerance. The comparison does not detect a "
        "fault of this size: use --precision fp32 or more steps."
    )


def _speeds(comparison: Comparison, rows: list[Row]) -> str:
    """Name the fastest, if the runs had the same load."""
    if not comparison.speeds_are_comparable:
        if comparison.control and comparison.control.numbers["speed"]:
            speed = comparison.control.numbers["speed"]
            reason = f"the control does the same work as dp and ran at {speed:.2f} times its speed"
        else:
            reason = "some runs were kept from an earlier comparison (RESUME=1)"
        return (
            f"⚠️  The speeds are not comparable: {reason}. Other programs may have used the "
            "machine. Compare again without RESUME, with REPEATS=3."
        )
    fastest, *others = sorted(rows, key=lambda row: -row.numbers["samples_per_second"])
    rate = fastest.numbers["samples_per_second"]
    text = f"Fastest: {fastest.name}, {human_rate(rate)} samples/s"
    if others:
        ratio = others[-1].numbers["samples_per_second"] / rate
        text += f"; slowest: {others[-1].name}, {ratio:.2f} times that"
    slowest_repeat = fastest.numbers["samples_per_second_low"]
    overlap = [r.name for r in others if r.numbers["samples_per_second_high"] > slowest_repeat]
    # Without repeats the spread is that of one run's steps, which has other causes.
    if comparison.repeated and overlap:
        text += f" (within the spread of repeats: {', '.join(overlap)})"
    if not comparison.on_gpu:
        text += ". The ranks share this CPU and its memory, so the order can differ on GPUs"
    return f"{text}."


def _smallest(comparison: Comparison, rows: list[Row]) -> str:
    """Name the strategy with the least GPU memory, and the least without offloading."""
    by_memory = sorted(rows, key=lambda row: row.numbers["memory_bytes"])
    sizes = {row.name: human_bytes(row.numbers["memory_bytes"]) for row in rows}
    least = by_memory[0]
    usage = "at its peak" if comparison.on_gpu else "of model states"
    text = f"Least GPU memory: {least.name}, {sizes[least.name]} per rank {usage}"
    if in_host := sum(least.numbers["host_categories"].values()):
        text += f", and {human_bytes(in_host)} per rank in host memory"
    if least.numbers["nvme_bytes"]:
        text += f", and {human_bytes(least.numbers['nvme_bytes'])} on NVMe in total"
    on_device = [row.name for row in by_memory if not STRATEGIES[row.name].offloads]
    if on_device and least.name != on_device[0]:
        text += f". Without offloading: {on_device[0]}, {sizes[on_device[0]]}"
    return f"{text}."


def _limits(comparison: Comparison) -> Iterator[str]:
    """Say what this comparison cannot show: on one rank, and on a CPU."""
    if comparison.work["world_size"] == 1:
        yield (
            f"ℹ️  One {'GPU' if comparison.on_gpu else 'process'} cannot show what sharding saves "
            "or what communication costs. Compare on two or more."
        )
    if not comparison.on_gpu:
        yield (
            "ℹ️  On a CPU the memory is the model states that a GPU would hold, without "
            "activations and temporary memory."
        )


def _simulated(comparison: Comparison) -> str:
    """Explain memory simulations, and compare the memory estimate with them."""
    text = (
        "This is a memory simulation: one process allocated what rank 0 of "
        f"{comparison.work['simulated_world_size']} ranks would. Nothing was trained."
    )
    errors = [
        (abs(row.numbers["planned_bytes"] / row.numbers["memory_bytes"] - 1), row.name)
        for row in comparison.rows
        if row.numbers["planned_bytes"]
    ]
    if errors:
        error, worst = max(errors)
        quantity = "peaks" if comparison.on_gpu else "model states"
        text += f" The planned {quantity} differ by at most {100 * error:.1f}% ({worst})."
    return text


def _files(comparison: Comparison) -> Iterator[str]:
    """Name the runs that did not complete, with reason and log, and files that are damaged."""
    for row in comparison.rows:
        for run in row.runs:
            where = run.place if not comparison.of_strategies else f"{row.name}"
            if run.unreadable:
                lines = "1 line" if run.unreadable == 1 else f"{run.unreadable:,} lines"
                yield f"⚠️  {where}: {lines} of metrics.jsonl cannot be read and are left out."
            if run.completed and run.reason:
                yield f"ℹ️  {where}: {run.reason}, so its numbers are left out."
            if run.slack:
                yield f"ℹ️  {where} has losses of 4 decimals, which is considered."
        if row.status == "completed":
            continue
        text = f"{row.name}: {row.status.replace('_', ' ')}"
        if row.completed:
            text += f" ({len(row.completed)} of {len(row.runs)} repeats completed)"
        mark = "ℹ️ " if row.status in ("skipped", "not run") else "❌"
        log = next((run.place / "log.txt" for run in row.runs if not run.completed), None)
        has_log = log and log.is_file() and row.status != "interrupted"
        yield f"{mark} {text}. {row.reason}" + (f" Log: {log}" if has_log else "")


def _names(rows: list[Row]) -> str:
    *names, last = [row.name for row in rows]
    return f"{', '.join(names)} and {last}" if names else last
