"""The figure of a comparison, and the charts of a page: each function draws on given axes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from support.report.compare import STATES, Comparison, Row
from support.report.comparison_text import provenance, title
from support.units import GB, MB, human_rate

# The palette of Okabe and Ito, whose colors can be told apart with color-blindness.
COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7", "#0072B2")
MARKERS = "os^DvPX."
KIND_COLORS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#E69F00",
    "activations": "#009E73",
    "logits": "#CC79A7",
}
LIMIT_STYLE = {"color": "#D55E00", "linestyle": "--"}
# Text stays text, so that a page is small and can be searched.
SVG_SETTINGS = {"svg.fonttype": "none", "legend.frameon": False}
SVG_SETTINGS |= {"svg.hashsalt": "page", "font.size": 9}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
SMALLEST_DIFFERENCE = 1e-8  # drawn for equal losses: 0 has no logarithm
MOST_RANKS = 16  # whose memory is drawn

Chart = Callable[[Axes], object]


def draw(comparison: Comparison, path: Path) -> None:
    """Draw all charts of a comparison into one file.

    Args:
        path: the .png, .svg or .pdf file to write.
    Raises:
        ValueError: matplotlib does not know the ending of the file's name.
    """
    charts = charts_of(comparison)
    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(6.5 * columns + (columns == 1), 4.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (caption, chart) in zip(grid, charts.items(), strict=False):
        chart(axes)
        axes.set_title(caption, fontsize=10)
    for axes in [*grid][len(charts) :]:
        axes.set_axis_off()
    figure.suptitle(title(comparison), fontsize=11, wrap=True)
    figure.supxlabel("\n".join(provenance(comparison)), fontsize=8, color="#555555")
    figure.savefig(path, dpi=110)


def charts_of(comparison: Comparison) -> dict[str, Chart]:
    """Return the functions that draw the charts of a comparison, by caption."""
    measured = [row for row in comparison.rows if row.measured]
    charts: dict[str, Chart] = {}
    if measured:
        unit = "GB" if comparison.on_gpu else "MB"
        kind = "GPU memory at its peak" if comparison.on_gpu else "Model states"
        charts[f"{kind} ({unit} on the fullest rank)"] = lambda axes: draw_memory(
            axes, comparison, measured
        )
    if timed := [row for row in measured if row.numbers["samples_per_second"]]:
        spread = "repeats" if comparison.repeated else "steps"
        charts[f"Samples per second (line: spread of {spread})"] = lambda axes: draw_speed(
            axes, timed
        )
    if with_losses := [row for row in comparison.rows if row.points]:
        charts["Training loss (nats per token)"] = lambda axes: draw_losses(axes, with_losses)
        charts["Relative difference of the loss"] = lambda axes: draw_differences(axes, comparison)
    return charts


def draw_memory(axes: Axes, comparison: Comparison, rows: list[Row]) -> None:
    """Draw memory by kind as stacked bars, the part in host memory above it, and the plan.

    On a GPU the bars reach the allocator's peak.
    """
    unit, names = (GB if comparison.on_gpu else MB), [row.name for row in rows]
    parts = {kind: [row.numbers["categories"][kind] / unit for row in rows] for kind in STATES}
    planned = [row.numbers["planned_bytes"] for row in rows]
    if comparison.on_gpu:
        states = [sum(row.numbers["categories"][kind] for kind in STATES) for row in rows]
        peaks = [row.numbers["memory_bytes"] for row in rows]
        rest = [max(0.0, peak - size) / unit for peak, size in zip(peaks, states, strict=True)]
        parts["activations and other"] = rest
    elif comparison.simulated:
        for kind in ("activations", "logits"):
            parts[kind] = [(row.numbers[kind] or 0) / unit for row in rows]
            extra = [(row.numbers["planned"] or {}).get(kind, 0) for row in rows]
            planned = [p and p + size for p, size in zip(planned, extra, strict=True)]
    draw_bars(axes, names, parts)
    lengths = [sum(column) for column in zip(*parts.values(), strict=True)]
    in_host = [sum((row.numbers["host_categories"] or {}).values()) / unit for row in rows]
    if any(in_host):
        style = {"facecolor": "white", "edgecolor": "#777777", "hatch": "///"}
        axes.barh(names, in_host, left=lengths, label="in host memory", **style)
    marks = {name: size / unit for name, size in zip(names, planned, strict=True) if size}
    if marks:
        axes.plot([*marks.values()], [*marks], "k|", markersize=18, label="plan")
    capacity = (comparison.facts["hardware"].get("gpu_memory_bytes") or 0) / unit
    if capacity and capacity < 4 * max(lengths):
        axes.axvline(capacity, label=f"capacity, {capacity:.1f} GB", **LIMIT_STYLE)
    below_axes(axes)


def draw_speed(axes: Axes, rows: list[Row]) -> None:
    """Draw the throughput of each row as bars, with the spread as error bars."""
    numbers = [row.numbers for row in rows]
    rates = [row["samples_per_second"] for row in numbers]
    below = [max(0.0, row["samples_per_second"] - row["samples_per_second_low"]) for row in numbers]
    above = [
        max(0.0, row["samples_per_second_high"] - row["samples_per_second"]) for row in numbers
    ]
    style = {"capsize": 4, "color": "#0072B2", "ecolor": "#333333"}
    names = [f"{row.name}\n{human_rate(rate)}" for row, rate in zip(rows, rates, strict=True)]
    axes.barh(names, rates, xerr=[below, above], **style)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def draw_losses(axes: Axes, rows: list[Row]) -> None:
    """Draw all loss curves, each thinner than the one below it, so that none hides another."""
    for number, row in enumerate(rows):
        width = 1.3 + 1.2 * (len(rows) - 1 - number)
        for run in row.completed or row.runs:
            label = row.name if run is (row.completed or row.runs)[0] else ""
            steps, losses = [span.end for span in run.spans], [span.loss for span in run.spans]
            axes.plot(steps, losses, label=label, color=COLORS[number % 8], linewidth=width)
    axes.legend(fontsize=8, ncols=2)
    show_steps(axes)


def draw_differences(axes: Axes, comparison: Comparison) -> None:
    """Draw the relative loss differences from the reference, and the tolerance, on a log axis."""
    rows = comparison.rows + ([comparison.control] if comparison.control else [])
    largest = comparison.tolerance or SMALLEST_DIFFERENCE
    for number, row in enumerate(rows):
        points = [point for point in row.points if math.isfinite(point.relative)]
        if row is comparison.reference or not points:
            continue
        values = [max(SMALLEST_DIFFERENCE, point.relative) for point in points]
        line = "-" if len(row.runs) == 1 else "none"
        style: dict[str, Any] = {"marker": MARKERS[number % 8], "linestyle": line}
        label = "control: higher lr" if row is comparison.control else row.name
        color = COLORS[number % 8]
        steps = [point.last for point in points]
        axes.plot(steps, values, label=label, color=color, markersize=4, linewidth=1.2, **style)
        largest = max(largest, *values)
    if comparison.tolerance:
        axes.axhline(comparison.tolerance, label="tolerance", **LIMIT_STYLE)
    axes.set_yscale("log")
    axes.set_ylim(SMALLEST_DIFFERENCE / 2, 100 * largest)
    medians = f"medians of {comparison.lasting} steps; " if comparison.lasting > 1 else ""
    axes.set_ylabel(f"{medians}none: {SMALLEST_DIFFERENCE:.0e}")
    axes.legend(fontsize=8, ncols=3, loc="upper center")
    show_steps(axes)


def draw_lines(axes: Axes, lines: dict[str, tuple[list[int], list[float]]]) -> None:
    """Draw curves over the optimizer steps.

    Args:
        lines: steps and values by label; few points are marked.
    """
    for color, (label, (steps, values)) in zip(("#0072B2", "#D55E00"), lines.items(), strict=False):
        marker = "." if len(steps) < 30 else ""
        if steps:
            axes.plot(steps, values, label=label, color=color, marker=marker, linewidth=1.3)
    if len(lines) > 1:
        axes.legend()
    show_steps(axes)


def draw_bars(axes: Axes, names: Sequence[str], bars: dict[str, list[float]]) -> None:
    """Draw horizontal bars, the first name at the top.

    Args:
        bars: the length of each part of the bars, by label.
    """
    left = [0.0] * len(names)
    names = [literal(name) for name in names]
    for label, values in bars.items():
        color = KIND_COLORS.get(label, "#999999" if label else "#0072B2")
        axes.barh(names, values, left=left, label=literal(label), color=color)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    if len(bars) > 1:
        below_axes(axes)


def below_axes(axes: Axes) -> None:
    """Draw the legend below the axes, where it covers no bar."""
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)


def show_steps(axes: Axes) -> None:
    """Mark only whole steps on the x axis, and draw a light grid."""
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def literal(label: str) -> str:
    """Return a label of a file in which matplotlib sees no formula between $ and $."""
    return label.replace("$", r"\$")


def svg_of(draw: Chart, size: tuple[float, float] = (4.6, 2.7)) -> str:
    """Return a chart as an SVG element, in the text color of the page that it becomes part of.

    Black and #333333 become that color.

    Args:
        draw: draws on the axes that it gets.
        size: width and height in inches.
    """
    with matplotlib.rc_context(SVG_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=NO_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration, whose DTD has an address
    return svg.replace("#000000", "currentColor").replace("#333333", "currentColor")
