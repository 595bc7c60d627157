"""The report on a comparison as text, as Markdown and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from datetime import datetime, timezone

from support.report.compare import PHASES, Comparison, Row, state_bytes
from support.report.verdict import explain_traffic, verdict
from support.text_tables import markdown_table, text_table
from support.units import GB, MB, human_rate

Table = tuple[list[list[str]], list[str]]  # rows and headers
Columns = list[tuple[str, Callable[[Row], str]]]  # header with the unit, cell of a strategy
WHY = "Where the time of a step goes, and what a rank sends"


def as_text(comparison: Comparison) -> str:
    """Return the text for the terminal: both tables, the verdict, and the explanation."""
    parts = [title(comparison), text_table(*first_table(comparison)), _wrapped(verdict(comparison))]
    if comparison.trained:
        parts += [f"{WHY}:", text_table(*why_table(comparison))]
        parts.append(_wrapped(explain_traffic(comparison)))
    return "\n\n".join(parts) + "\n"


def as_file(comparison: Comparison) -> str:
    """Return the .txt file: the terminal's text, hardware, versions, date and the commands."""
    commands = [f"  {command}" for command in comparison.commands]
    lines = [as_text(comparison), *provenance(comparison), "", "Commands:", *commands]
    return "\n".join(lines) + "\n"


def as_markdown(comparison: Comparison) -> str:
    """Return the .md file, for a README or a lab notebook."""
    parts = [
        f"## {title(comparison)}",
        markdown_table(*first_table(comparison)),
        _markdown_list(verdict(comparison)),
    ]
    if comparison.reference:
        parts.append(f"![Memory, throughput and losses](comparison_results_{comparison.name}.png)")
    if comparison.trained:
        parts += [f"### {WHY}", markdown_table(*why_table(comparison))]
        parts.append(_markdown_list(explain_traffic(comparison)))
    parts.append(_markdown_list(provenance(comparison)))
    parts.append("```bash\n" + "\n".join(comparison.commands) + "\n```")
    return "\n\n".join(parts) + "\n"


def as_json(comparison: Comparison) -> str:
    """Return the .json file; docs/COMPARISON.md explains its keys."""
    report = {
        "schema_version": 1,
        "name": comparison.name,
        "reported_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "reference": comparison.reference.strategy if comparison.reference else None,
        "tolerance": comparison.tolerance,
        "lasting_steps": comparison.lasting,
        "same_model": comparison.same_model,
        "departing": [row.strategy for row in comparison.departing],
        "exit_code": comparison.exit_code,
        "step_cap": comparison.step_cap,
        "work": comparison.work,
        "hardware": comparison.facts.get("hardware"),
        "versions": comparison.facts.get("versions"),
        "verdict": verdict(comparison),
        "communication": [] if comparison.simulated else explain_traffic(comparison),
        "control": _row_as_dict(comparison.control) if comparison.control else None,
        "strategies": [_row_as_dict(row) for row in comparison.rows],
    }
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"


def _row_as_dict(row: Row) -> dict:
    """Return a strategy's numbers, and a summary of each of its runs."""
    reason = row.incomplete.reason if row.incomplete else ""
    numbers = {"strategy": row.strategy, "status": row.status, "reason": reason, **vars(row)}
    del numbers["attempts"]
    attempts = [
        {
            "status": attempt.status,
            "reason": attempt.reason,
            "folder": str(attempt.folder),
            "command": attempt.command,
            "started_at": attempt.results.get("started_at"),
            "samples_per_second": attempt.results.get("samples_per_second"),
        }
        for attempt in row.attempts
    ]
    return {**numbers, "attempts": attempts}


def _wrapped(sentences: list[str]) -> str:
    """Wrap each sentence to lines of at most 110 characters, the width of the table."""
    wrapper = textwrap.TextWrapper(110, subsequent_indent="   ", break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, sentences))


def _markdown_list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def title(comparison: Comparison) -> str:
    """Describe what was compared in one line: model, ranks, precision, batch, steps."""
    work = comparison.work
    if not work:
        return f"Comparison of strategies: {comparison.name}"
    one, several = ("GPU", "GPUs") if comparison.on_gpu else ("CPU process", "CPU processes")
    ranks = f"{work['world_size']} {one if work['world_size'] == 1 else several}"
    if comparison.simulated:
        ranks = f"1 of {work['simulated_world_size']} simulated {several}"
    micro_steps = work["gradient_accumulation_steps"]
    repeats = max(len(row.attempts) for row in comparison.rows)
    blocks = f"{work['batch_size']} block{'s' * (work['batch_size'] > 1)}"
    batch = f"{blocks} of {work['seq_length']} tokens each"
    if micro_steps > 1:
        batch += f" × {micro_steps} micro-batches"
    capped = " (the comparison's default cap)" if comparison.step_cap == work["steps"] else ""
    repeated = f", {repeats} repeats" if repeats > 1 else ""
    model = f"{work['model']} ({work['parameters'] / 1e6:.1f}M parameters)"
    steps = f"{work['steps']} steps{capped}{repeated}"
    return f"{model} on {ranks}, {work['precision']}, {batch}, {steps}"


def provenance(comparison: Comparison) -> list[str]:
    """Return lines with the hardware, the versions and the date of the measurements."""
    facts = comparison.facts
    if not facts:
        return []
    machine, dataset = facts["hardware"], facts["dataset"]
    gpu = "no GPU"
    if machine["gpu"]:
        gpu = f"{machine['gpu']} ({machine['gpu_memory_bytes'] / GB:.1f} GB)"
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    memory = f"{machine['ram_bytes'] / GB:.1f} GB of memory"
    return [
        f"Hardware: {gpu}, {cores} of {machine['cpu']}, {memory}",
        f"Versions: {versions}",
        f"Measured: {facts['started_at'][:10]}; dataset {dataset['name']}, "
        f"sha256 {dataset['sha256'][:12]}…",
    ]


# ------------------------------------------------------------------------------------------- tables


def first_table(comparison: Comparison) -> Table:
    """Return the first table, which for a simulation has memory only.

    A strategy that did not complete has a dash in every column.
    """
    reference = comparison.reference.strategy if comparison.reference else "dp"
    columns = (_memory_columns if comparison.simulated else _cost_columns)(comparison, reference)
    cells = [
        [
            row.strategy,
            row.status.replace("_", " "),
            *[cell(row) if row.completed else "—" for _, cell in columns],
        ]
        for row in comparison.rows
    ]
    return cells, ["\nstrategy", "\nstatus", *[header for header, _ in columns]]


def _memory_columns(comparison: Comparison, reference: str) -> Columns:
    """Return the columns of a simulation: memory of rank 0 by kind, next to the memory estimate."""
    return [
        ("para-\nmeters", lambda row: _size(row.categories["parameters"])),
        ("gradi-\nents", lambda row: _size(row.categories["gradients"])),
        ("opti-\nmizer", lambda row: _size(row.categories["optimizer"])),
        ("model\nstates", lambda row: _size(state_bytes(row.categories))),
        ("\nplanned", lambda row: _size(state_bytes(row.planned) if row.planned else None)),
        (f"saved\nvs {reference}", _saved),
        ("buffers,\nother", lambda row: _size(row.categories["buffers"] + row.categories["other"])),
        ("activa-\ntions", lambda row: _size(row.activations)),
        ("\nlogits", lambda row: _size(row.logits)),
        ("peak of\na step", lambda row: _size(row.step_peak_bytes)),
        ("\nplanned", lambda row: _size(row.planned.get("peak") if row.step_peak_bytes else None)),
    ]


def _cost_columns(comparison: Comparison, reference: str) -> Columns:
    """Return the columns of measured runs: memory, speed and loss difference."""
    if comparison.on_gpu:
        unit, memory, rate = GB, "GPU\npeak\nGB", "\ntokens/s\n/GPU"
    else:
        unit, memory, rate = MB, "model\nstate\nMB/rank", "\ntokens/s\n/rank"
    of = "repeats" if comparison.repeated else "steps"
    speed = f"speed vs {reference}\n(spread of\n{of})"

    def difference(row: Row) -> str:
        if row is comparison.reference and not row.difference:
            return "reference"
        return f"{row.difference:.1e}{' ❌' if row.departs_at else ''}"

    return [
        (memory, lambda row: _size(row.memory_bytes, unit)),
        ("\n\nplanned", lambda row: _size(row.planned_bytes, unit)),
        (f"saved\nvs\n{reference}", _saved),
        ("host\npeak\nGB/rank", lambda row: _size(row.host_bytes, GB)),
        ("\nNVMe\nMB", lambda row: f"{row.nvme_bytes / MB:.0f}" if row.nvme_bytes else "—"),
        ("\nsamples\n/s", lambda row: human_rate(row.samples_per_second)),
        (rate, lambda row: f"{row.tokens_per_second_per_gpu:,.0f}"),
        (speed, lambda row: f"{row.speed:.2f}× ({row.speed_low:.2f}–{row.speed_high:.2f})"),
        ("\nfinal\nloss", lambda row: f"{row.final_loss:.4f}"),
        ("largest\nloss\ndifference", difference),
    ]


def _saved(row: Row) -> str:
    return "—" if row.saved is None else f"{100 * row.saved:.0f}%"


def _size(size: float | None, unit: int = MB) -> str:
    """Format bytes in MB (2^20 bytes) or GB; an unknown size as a dash."""
    return "—" if size is None else f"{size / unit:,.{1 if unit == MB else 2}f}"


def why_table(comparison: Comparison) -> Table:
    """Return the second table: communication, and the time of each phase of a step.

    The volume of the ZeRO paper (arXiv 1910.02054, section 7) is in units of the number of
    parameters P. The paper has no gradient accumulation.
    """
    headers = ["strategy", "sent by a rank\nMB/step", "volume\nmeasured", "volume\nZeRO paper"]
    headers += ["step\nms", *[f"{phase}\nms" for phase in PHASES]]
    rows = []
    for row in comparison.rows:
        if row.completed:
            seconds = [sum(row.phases_seconds.values()), *row.phases_seconds.values()]
            volume = "—" if row.volume is None else f"{row.volume:.2f}P"
            of_paper = "3P" if row.definition.shards_parameters else "2P"
            times = [f"{1000 * value:.0f}" for value in seconds]
            rows.append([row.strategy, _size(row.sent_bytes), volume, of_paper, *times])
    return rows, headers
