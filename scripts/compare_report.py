#!/usr/bin/env python3
"""Report on the runs of a comparison of strategies: tables, a verdict, files and a figure.

    python scripts/compare_report.py comparison_runs/tiny-gpt2

The script reads results.json, metrics.jsonl, outcome.txt and command.txt in each folder
DIR/<strategy>/<repeat>/. It prints the report and writes comparison_results_<name>.txt, .json, .md
and .png to the current folder (or --output_dir), where <name> is the name of DIR.

Exit codes: 0; 1 if a loss curve differs by more than the tolerance, a strategy did not complete
(unless it was skipped), or no run completed; 2 for wrong usage, a folder without runs or files that
cannot be written; with --status, 3 if the run did not complete.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process

if __name__ == "__main__":
    process.catch_signals()

from tabulate import tabulate

from support.cli import argument_types as kinds
from support.errors import EXIT_COMPLETED, EXIT_USAGE, UserError
from support.files.atomic import write_atomically, write_text
from support.report import compare as comparing
from support.report.compare import Attempt, Comparison, Row
from support.units import GB, MB, human_rate

EXIT_NOT_COMPLETED = 3

# The palette of Okabe and Ito, whose colours can be told apart with colour-blindness: one colour
# for each kind of memory, and one for each strategy.
KIND_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#E69F00",
    "buffers and other": "#999999",
    "activations and temporary": "#009E73",
    "activations": "#009E73",
    "logits": "#CC79A7",
}
STRATEGY_COLOURS = {
    "dp": "#000000",
    "zero1": "#E69F00",
    "zero2": "#56B4E9",
    "zero3": "#009E73",
    "offload": "#F0E442",
    "infinity": "#D55E00",
    "fsdp": "#CC79A7",
}
MARKERS = dict(zip(STRATEGY_COLOURS, "os^DvPX", strict=True))


def main() -> None:
    """Read the arguments, print the report and write its files."""
    parser = kinds.Parser(
        description="Report on the runs of compare_strategies.sh.", allow_abbrev=False
    )
    parser.add_argument(
        "folder",
        type=kinds.path,
        metavar="DIR",
        help="folder with <strategy>/<repeat>/results.json",
    )
    parser.add_argument(
        "--output_dir", type=kinds.path, default=Path(), help="where the files go (default: here)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest relative loss difference that counts as the same model",
    )
    parser.add_argument(
        "--status",
        action="store_true",
        help="DIR is one run: print its status; exit code 3 if not completed",
    )
    try:
        args = parser.parse_args()
    except UserError as error:
        fail(str(error))
    if not args.folder.is_dir():
        fail(f"{args.folder}: no such folder.")
    if args.tolerance is not None and not args.tolerance > 0:
        fail(f"--tolerance {args.tolerance} must be above 0.")
    if args.status:
        attempt = comparing.read_attempt(args.folder)
        print(describe_attempt(attempt))
        sys.exit(EXIT_COMPLETED if attempt.completed else EXIT_NOT_COMPLETED)
    comparison = comparing.read_comparison(args.folder, args.tolerance)
    if not comparison.rows:
        fail(
            f"{args.folder} holds no runs: compare_strategies.sh leaves them as "
            "DIR/<strategy>/<repeat>/results.json."
        )
    body = body_text(comparison)
    try:
        files = write_report(comparison, body, args.output_dir)
        print(body, flush=True)
        files += draw_figure(comparison, args.output_dir)
    except OSError as error:
        fail(f"{error.filename or args.output_dir} cannot be written: {error.strerror}.")
    print("\n".join(f"📁 {file}" for file in files))
    sys.exit(comparison.exit_code)


def fail(message: str) -> None:
    """Print one line to stderr and exit with code 2."""
    print(f"❌ {message}", file=sys.stderr)
    sys.exit(EXIT_USAGE)


def describe_attempt(attempt: Attempt) -> str:
    """Describe the outcome of one run in one line, for the terminal."""
    if not attempt.completed:
        return f"{attempt.status}: {attempt.reason}"
    if attempt.results.get("simulated_world_size"):
        states = sum(
            attempt.results["memory"]["device_categories_bytes_by_rank"][0][kind]
            for kind in comparing.STATES
        )
        return f"completed: {states / MB:,.1f} MB of model states"
    speed, loss = attempt.results["samples_per_second"], attempt.results["train_loss_last"]
    return (
        f"completed: {human_rate(speed)} samples/s, "
        f"loss {attempt.results['train_loss_first']:.4f} to {loss:.4f}"
    )


# -------------------------------------------------------------------------------------------- files


def write_report(comparison: Comparison, body: str, folder: Path) -> list[Path]:
    """Write the .txt, .json and .md files.

    Returns:
        Their paths.
    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        ".txt": full_text(comparison, body),
        ".json": as_json(comparison),
        ".md": as_markdown(comparison),
    }
    written = []
    for suffix, text in files.items():
        written.append(folder / f"comparison_results_{comparison.name}{suffix}")
        write_text(written[-1], text)
    return written


def draw_figure(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the .png file; without a completed run, remove an older one instead.

    Returns:
        [path], or [] if no figure was drawn.
    Raises:
        OSError: the folder cannot be written.
    """
    figure = folder / f"comparison_results_{comparison.name}.png"
    if comparison.reference is None:
        figure.unlink(missing_ok=True)
        return []
    write_atomically(figure, lambda path: draw(comparison, path))
    return [figure]


def body_text(comparison: Comparison) -> str:
    """Return the text for the terminal: both tables, the verdict, and the explanation."""
    parts = [title(comparison)]
    parts.append(tabulate(*first_table(comparison), tablefmt="simple", disable_numparse=True))
    parts.append(wrapped(comparing.verdict(comparison)))
    if comparison.reference and not comparison.simulated:
        parts.append("Where the time of a step goes, and what a rank sends:")
        parts.append(tabulate(*why_table(comparison), tablefmt="simple", disable_numparse=True))
        parts.append(wrapped(comparing.explain_traffic(comparison)))
    return "\n\n".join(parts) + "\n"


def wrapped(sentences: list[str]) -> str:
    """Wrap each sentence to lines of at most 110 characters, the width of the table."""
    return "\n".join(
        textwrap.fill(line, 110, subsequent_indent="   ", break_on_hyphens=False)
        for line in sentences
    )


def full_text(comparison: Comparison, body: str) -> str:
    """Return the .txt file: the terminal's text, hardware, versions, date and the commands."""
    lines = [body, *provenance(comparison), "", "Commands:"]
    lines += [f"  {command}" for command in commands(comparison)]
    return "\n".join(lines) + "\n"


def commands(comparison: Comparison) -> list[str]:
    """Return the command line of each run."""
    return [
        attempt.command for row in comparison.rows for attempt in row.attempts if attempt.command
    ]


def as_markdown(comparison: Comparison) -> str:
    """Return the .md file, for a README or a lab notebook."""
    parts = [f"## {title(comparison)}", markdown_table(*first_table(comparison))]
    parts.append("\n".join(f"- {sentence}" for sentence in comparing.verdict(comparison)))
    if comparison.reference:
        parts.append(f"![Memory, throughput and losses](comparison_results_{comparison.name}.png)")
    if comparison.reference and not comparison.simulated:
        parts.append("### Where the time of a step goes, and what a rank sends")
        parts.append(markdown_table(*why_table(comparison)))
        parts.append("\n".join(f"- {line}" for line in comparing.explain_traffic(comparison)))
    parts.append("\n".join(f"- {line}" for line in provenance(comparison)))
    parts.append("```bash\n" + "\n".join(commands(comparison)) + "\n```")
    return "\n\n".join(parts) + "\n"


def markdown_table(rows: list[list[str]], headers: list[str]) -> str:
    """Return a GitHub table, with each header on one line."""
    return tabulate(
        rows,
        [" ".join(header.split()) for header in headers],
        tablefmt="github",
        disable_numparse=True,
    )


def as_json(comparison: Comparison) -> str:
    """Return the .json file; docs/MEMORY_COMPARISON.md explains its keys."""
    facts = comparison.facts
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
        "hardware": facts.get("hardware"),
        "versions": facts.get("versions"),
        "verdict": comparing.verdict(comparison),
        "communication": [] if comparison.simulated else comparing.explain_traffic(comparison),
        "control": row_as_dict(comparison.control) if comparison.control else None,
        "strategies": [row_as_dict(row) for row in comparison.rows],
    }
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"


def row_as_dict(row: Row) -> dict:
    """Return a strategy's entry in the .json file: its numbers, and a summary of each run."""
    numbers = {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(row)
        if field.name != "attempts"
    }
    numbers["attempts"] = [
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
    return numbers


# ------------------------------------------------------------------------------------------- tables


def title(comparison: Comparison) -> str:
    """Describe what was compared in one line: model, ranks, precision, batch, steps."""
    work = comparison.work
    if not work:
        return f"Comparison of strategies: {comparison.name}"
    one, several = ("GPU", "GPUs") if work["device"] == "cuda" else ("CPU process", "CPU processes")
    ranks = f"{work['world_size']} {one if work['world_size'] == 1 else several}"
    if comparison.simulated:
        ranks = f"1 of {work['simulated_world_size']} simulated {several}"
    micro_steps, repeats = (
        work["gradient_accumulation_steps"],
        max(len(row.attempts) for row in comparison.rows),
    )
    accumulated = f" × {micro_steps} micro-batches" if micro_steps > 1 else ""
    capped = " (the comparison's default cap)" if comparison.step_cap == work["steps"] else ""
    repeated = f", {repeats} repeats" if repeats > 1 else ""
    batch = (
        f"{work['batch_size']} block{'s' * (work['batch_size'] > 1)} of "
        f"{work['seq_length']} tokens each{accumulated}"
    )
    return (
        f"{work['model']} ({work['parameters'] / 1e6:.1f}M parameters) on {ranks}, "
        f"{work['precision']}, {batch}, {work['steps']} steps{capped}{repeated}"
    )


def provenance(comparison: Comparison) -> list[str]:
    """Return lines with the hardware, the versions and the date of the measurements."""
    facts = comparison.facts
    if not facts:
        return []
    machine = facts["hardware"]
    gpu = (
        f"{machine['gpu']} ({machine['gpu_memory_bytes'] / GB:.1f} GB), "
        if machine["gpu"]
        else "no GPU, "
    )
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    return [
        f"Hardware: {gpu}{cores} of {machine['cpu']}, {machine['ram_bytes'] / GB:.1f} GB of memory",
        "Versions: " + ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
        f"Measured: {facts['started_at'][:10]}; dataset {facts['dataset']['name']}, "
        f"sha256 {facts['dataset']['sha256'][:12]}…",
    ]


def first_table(comparison: Comparison) -> tuple[list[list[str]], list[str]]:
    """Return rows and headers of the first table; of a simulation it contains memory only."""
    return memory_table(comparison) if comparison.simulated else cost_table(comparison)


def memory_table(comparison: Comparison) -> tuple[list[list[str]], list[str]]:
    """Return the table of a simulation: memory of rank 0 by kind, next to the memory estimate.

    Returns:
        Rows and headers; sizes are in MB (2^20 bytes).
    """
    reference = comparison.reference.strategy if comparison.reference else "dp"
    headers = [
        "\nstrategy",
        "\nstatus",
        "para-\nmeters",
        "gradi-\nents",
        "opti-\nmizer",
        "model\nstates",
        "\nplanned",
        f"saved\nvs {reference}",
        "buffers,\nother",
        "activa-\ntions",
        "\nlogits",
        "peak of\na step",
        "\nplanned",
    ]
    rows = []
    for row in comparison.rows:
        if not row.completed:
            rows.append([row.strategy, row.status.replace("_", " "), *["—"] * (len(headers) - 2)])
            continue
        kinds, states = row.categories, sum(row.categories[kind] for kind in comparing.STATES)
        planned = sum(row.planned[kind] for kind in comparing.STATES) if row.planned else None
        sizes = [*(kinds[kind] for kind in comparing.STATES), states, planned]
        more = [kinds["buffers"] + kinds["other"], row.activations, row.logits, row.step_peak_bytes]
        peak = row.planned.get("peak") if row.step_peak_bytes else None
        rows.append(
            [
                row.strategy,
                row.status,
                *map(in_mb, sizes),
                "—" if row.saved is None else f"{100 * row.saved:.0f}%",
                *map(in_mb, more),
                in_mb(peak),
            ]
        )
    return rows, headers


def in_mb(size: float | None) -> str:
    """Format bytes in MB (2^20 bytes); an unknown size as a dash."""
    return "—" if size is None else f"{size / MB:,.1f}"


def cost_table(comparison: Comparison) -> tuple[list[list[str]], list[str]]:
    """Return the table of measured runs: memory, speed and loss difference of each strategy.

    Returns:
        Rows and headers; the headers contain the units.
    """
    on_gpu = comparison.work.get("device") == "cuda"
    reference = comparison.reference.strategy if comparison.reference else "dp"
    headers = [
        "\nstrategy",
        "\nstatus",
        "GPU\npeak\nGB" if on_gpu else "model\nstate\nMB/rank",
        "\n\nplanned",
        f"saved\nvs\n{reference}",
        "host\npeak\nGB/rank",
        "\nNVMe\nMB",
        "\nsamples\n/s",
        f"\ntokens/s\n/{'GPU' if on_gpu else 'rank'}",
        f"speed vs {reference}\n(spread of\n{'repeats' if comparison.repeated else 'steps'})",
        "\nfinal\nloss",
        "largest\nloss\ndifference",
    ]
    rows = []
    for row in comparison.rows:
        if not row.completed or comparison.reference is None:
            rows.append([row.strategy, row.status.replace("_", " "), *["—"] * (len(headers) - 2)])
            continue
        rows.append(
            [
                row.strategy,
                row.status.replace("_", " "),
                f"{row.memory_bytes / GB:.2f}" if on_gpu else f"{row.memory_bytes / MB:.1f}",
                "—"
                if row.planned_bytes is None
                else f"{row.planned_bytes / (GB if on_gpu else MB):.{2 if on_gpu else 1}f}",
                "—" if row.saved is None else f"{100 * row.saved:.0f}%",
                f"{row.host_bytes / GB:.2f}",
                f"{row.nvme_bytes / MB:.0f}" if row.nvme_bytes else "—",
                human_rate(row.samples_per_second),
                f"{row.tokens_per_second_per_gpu:,.0f}",
                f"{row.speed:.2f}× ({row.speed_low:.2f}–{row.speed_high:.2f})",
                f"{row.final_loss:.4f}",
                "reference"
                if row is comparison.reference and not row.difference
                else f"{row.difference:.1e}{' ❌' if row.departs_at else ''}",
            ]
        )
    return rows, headers


def why_table(comparison: Comparison) -> tuple[list[list[str]], list[str]]:
    """Return the second table: communication, and the time of each phase of a step.

    The volume is given next to that of the ZeRO paper, in units of the number of parameters P.

    Returns:
        Rows and headers; the headers contain the units.
    """
    headers = [
        "strategy",
        "sent by a rank\nMB/step",
        "volume\nmeasured",
        "volume\nZeRO paper",
        "step\nms",
        "data\nms",
        "forward\nms",
        "backward\nms",
        "update\nms",
    ]
    rows = []
    for row in comparison.rows:
        if row.completed:
            rows.append(
                [
                    row.strategy,
                    "—" if row.sent_bytes is None else f"{row.sent_bytes / MB:.1f}",
                    "—" if row.volume is None else f"{row.volume:.2f}P",
                    f"{comparing.PAPER_VOLUMES[row.strategy]}P",
                    f"{1000 * sum(row.phases_seconds.values()):.0f}",
                    *[
                        f"{1000 * row.phases_seconds[phase]:.0f}"
                        for phase in ("data", "forward", "backward", "update")
                    ],
                ]
            )
    return rows, headers


# ------------------------------------------------------------------------------------------- figure


def draw(comparison: Comparison, path: Path) -> None:
    """Draw the figure: memory by category, throughput, losses and their differences.

    Of a simulation only memory is drawn.

    Args:
        comparison: with at least one completed row.
        path: the .png file to write.
    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in comparison.rows if row.completed]
    if comparison.simulated:
        figure, memory = plt.subplots(figsize=(9, 5.5), layout="constrained")
        draw_memory(memory, comparison, rows)
        finish_figure(figure, comparison, path)
        return
    figure, ((memory, speed), (losses, differences)) = plt.subplots(
        2, 2, figsize=(13, 9), layout="constrained"
    )
    draw_memory(memory, comparison, rows)
    draw_speed(speed, comparison, rows)
    draw_losses(losses, rows)
    draw_differences(differences, comparison, rows)
    finish_figure(figure, comparison, path)


def finish_figure(figure, comparison: Comparison, path: Path) -> None:
    """Add the title and the provenance, and write the file."""
    import matplotlib.pyplot as plt

    figure.suptitle(title(comparison), fontsize=12)
    figure.supxlabel("\n".join(provenance(comparison)), fontsize=8, color="#555555")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_memory(axes, comparison: Comparison, rows: list[Row]) -> None:
    """Draw the memory of each strategy as stacked bars.

    On a GPU the bars reach the allocator's peak. On a CPU they show the tensors that a GPU would
    hold, and above those the tensors in host memory, hatched. A line shows the GPU's capacity if it
    is near the bars.
    """
    on_gpu = comparison.work["device"] == "cuda"
    unit, name = (GB, "GB") if on_gpu else (MB, "MB")
    bottoms = [0.0] * len(rows)
    positions = range(len(rows))

    def stack(label: str, sizes: list[float], **style) -> None:
        if any(sizes):
            bars = [
                (position, size / unit, bottoms[position])
                for position, size in enumerate(sizes)
                if size
            ]
            xs, heights, lows = zip(*bars, strict=True)
            axes.bar(xs, heights, 0.65, bottom=lows, label=label, **style)
            bottoms[:] = [bottom + size / unit for bottom, size in zip(bottoms, sizes, strict=True)]

    for kind in comparing.STATES:
        stack(kind, [row.categories[kind] for row in rows], color=KIND_COLOURS[kind])
    planned = [row.planned_bytes for row in rows]
    if comparison.simulated and not on_gpu:
        for kind in ("activations", "logits"):
            stack(kind, [getattr(row, kind) or 0 for row in rows], color=KIND_COLOURS[kind])
        planned = [
            sum(row.planned.get(kind, 0) for kind in (*comparing.STATES, "activations", "logits"))
            for row in rows
        ]
    if on_gpu:
        stack(
            "buffers and other",
            [row.categories["buffers"] + row.categories["other"] for row in rows],
            color=KIND_COLOURS["buffers and other"],
        )
        remainders = [max(0.0, row.memory_bytes - sum(row.categories.values())) for row in rows]
        stack(
            "activations and temporary", remainders, color=KIND_COLOURS["activations and temporary"]
        )
    for position, bottom in zip(positions, list(bottoms), strict=True):
        axes.annotate(
            f"{bottom:.2f}" if on_gpu else f"{bottom:.1f}",
            (position, bottom),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    if any(planned):
        marks = [
            (position, size / unit)
            for position, size in zip(positions, planned, strict=True)
            if size
        ]
        axes.plot(
            *zip(*marks, strict=True),
            linestyle="none",
            marker="_",
            markersize=26,
            color="black",
            label="planned",
        )
    if not on_gpu:  # what GPU runs keep in host memory: hatched, above the number
        gap = 0.07 * max(bottoms)
        bottoms[:] = [
            bottom + gap * any(row.host_categories.values())
            for bottom, row in zip(bottoms, rows, strict=True)
        ]
        for kind in ("gradients", "optimizer"):
            stack(
                f"{kind}, in host memory",
                [row.host_categories.get(kind, 0) for row in rows],
                facecolor="white",
                edgecolor=KIND_COLOURS[kind],
                hatch="///",
            )
    axes.set_ylim(0, 1.3 * max(bottoms))
    capacity = comparison.facts["hardware"]["gpu_memory_bytes"]
    if capacity and capacity / unit < 4 * max(bottoms):
        axes.axhline(
            capacity / unit,
            color="#D55E00",
            linestyle="--",
            label=f"capacity of the GPU, {capacity / unit:.1f} GB",
        )
        axes.set_ylim(0, 1.25 * max(capacity / unit, max(bottoms)))
    elif capacity:
        axes.text(
            0.99,
            0.70,
            f"capacity of the GPU: {capacity / unit:.1f} GB, far above",
            transform=axes.transAxes,
            ha="right",
            fontsize=9,
        )
    label_strategies(axes, rows)
    axes.set_ylabel(f"{name} on the fullest rank")
    counted = "Model state and activations" if comparison.simulated else "Model state"
    axes.set_title(
        "GPU memory at its peak" if on_gpu else f"{counted} per rank (counted; a GPU would hold it)"
    )
    axes.legend(fontsize=8, ncols=2, loc="upper right")


def draw_speed(axes, comparison: Comparison, rows: list[Row]) -> None:
    """Draw the throughput of each strategy as bars, with the spread as error bars."""
    rates = [row.samples_per_second for row in rows]
    below = [max(0.0, row.samples_per_second - row.samples_per_second_low) for row in rows]
    above = [max(0.0, row.samples_per_second_high - row.samples_per_second) for row in rows]
    axes.bar(
        range(len(rows)),
        rates,
        0.65,
        yerr=[below, above],
        capsize=4,
        color="#0072B2",
        ecolor="#333333",
    )
    for position, row in enumerate(rows):
        top = row.samples_per_second + above[position]
        text = human_rate(row.samples_per_second)
        axes.annotate(
            text, (position, top), (0, 4), textcoords="offset points", ha="center", fontsize=9
        )
    label_strategies(axes, rows)
    axes.set_ylabel("samples per second, all ranks")
    if comparison.repeated:
        axes.set_title("Throughput (bar: median; line: slowest to fastest repeat)")
    else:
        axes.set_title("Throughput (bar: mean; line: 10th to 90th percentile of the steps)")


def draw_losses(axes, rows: list[Row]) -> None:
    """Draw all loss curves, each thinner than the one below it, so that none hides another."""
    for number, row in enumerate(rows):
        width = 1.5 + 1.7 * (len(rows) - 1 - number)
        for repeat, attempt in enumerate(row.completed):
            label = row.strategy if repeat == 0 else None
            axes.plot(
                steps_of(attempt),
                attempt.losses,
                label=label,
                color=STRATEGY_COLOURS[row.strategy],
                linewidth=width,
            )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss (nats per token)")
    axes.set_title("Loss (curves that are alike lie over each other, the first one widest)")
    axes.legend(fontsize=8, ncols=2)
    whole_steps(axes)


def draw_differences(axes, comparison: Comparison, rows: list[Row]) -> None:
    """Draw the relative loss differences from the reference, and the tolerance, on a log axis."""
    reference_run = comparison.reference.completed[0]
    floor = 1e-8  # drawn for equal losses: 0 has no logarithm
    shown = rows + ([comparison.control] if comparison.control else [])
    for row in shown:
        style = {
            "color": STRATEGY_COLOURS.get(row.strategy, "#777777"),
            "marker": MARKERS.get(row.strategy, "."),
        }
        name = "control: higher lr" if row is comparison.control else row.strategy
        for attempt in row.completed:
            if attempt is reference_run:
                continue
            clamped = [
                max(floor, difference)
                for difference in comparing.differences(attempt, reference_run, comparison.lasting)
            ]
            axes.plot(
                steps_of(attempt),
                clamped,
                label=name,
                linewidth=1.3,
                markersize=4,
                markeredgecolor="#333333",
                **style,
            )
            name = None  # one legend entry for all repeats
    axes.axhline(
        comparison.tolerance,
        color="#D55E00",
        linestyle="--",
        label=f"tolerance, {comparison.tolerance:g}",
    )
    axes.set_yscale("log")
    axes.set_ylim(
        floor / 2, 100 * max(comparison.tolerance, *(row.difference or 0 for row in shown))
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("relative difference of the loss")
    lasting = f", medians of {comparison.lasting} steps" if comparison.lasting > 1 else ""
    axes.set_title(f"Difference from {comparison.reference.strategy}{lasting} (none: {floor:.0e})")
    axes.legend(fontsize=8, ncols=4, loc="upper center")
    whole_steps(axes)


def steps_of(attempt: Attempt) -> range:
    """Return the numbers of the optimizer steps of a run, counted from 1."""
    return range(1, len(attempt.losses) + 1)


def label_strategies(axes, rows: list[Row]) -> None:
    """Label the bars with the strategies, and with the bytes that a strategy keeps on NVMe."""
    names = [
        f"{row.strategy}\n{row.nvme_bytes / MB:.0f} MB NVMe" if row.nvme_bytes else row.strategy
        for row in rows
    ]
    axes.set_xticks(range(len(rows)), names, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def whole_steps(axes) -> None:
    """Mark only whole steps on the x axis, and draw a light grid."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    process.run_command_line(main, printed=False)
