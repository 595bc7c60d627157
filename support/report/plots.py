"""The figure of a comparison, and the charts of a page: each function draws on given axes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from support.report.compare import STATES, Comparison, Row
from support.report.comparison_text import provenance, title
from support.units import GB, MB

# The palette of Okabe and Ito, whose colors can be told apart with color-blindness.
BLUE, SKY, ORANGE, GREEN, PINK, RED = "#0072B2 #56B4E9 #E69F00 #009E73 #CC79A7 #D55E00".split()
COLORS = ("#000000", ORANGE, SKY, GREEN, "#F0E442", RED, PINK, BLUE)
KIND_COLORS = {"": BLUE, "parameters": BLUE, "gradients": SKY, "optimizer": ORANGE}
KIND_COLORS |= {"activations": GREEN, "logits": PINK, "in host memory": "#dddddd"}
# Text stays text, so that a page is small and can be searched.
SVG_SETTINGS = {"svg.fonttype": "none", "legend.frameon": False, "svg.hashsalt": "page"}
SMALLEST_DIFFERENCE = 1e-8  # drawn for equal losses: 0 has no logarithm

Chart = Callable[[Axes], object]


def draw(comparison: Comparison, path: Path) -> None:
    """Draw all charts of a comparison into one file.

    Args:
        path: the .png, .svg or .pdf file to write.
    Raises:
        ValueError: matplotlib does not know the ending of the file's name.
    """
    charts = charts_of(comparison)
    rows = math.ceil(len(charts) / 2)
    figure = Figure(figsize=(13, 4.5 * rows), layout="constrained")
    for number, (caption, chart) in enumerate(charts.items(), 1):
        # The last of an odd number of charts is as wide as the figure.
        alone = number == len(charts) and number % 2
        axes = figure.add_subplot(rows, 2, (number, number + 1) if alone else number)
        chart(axes)
        axes.set_title(caption, fontsize=10)
    figure.suptitle(title(comparison), fontsize=11, wrap=True, parse_math=False)
    figure.supxlabel("\n".join(provenance(comparison)), fontsize=8, color="#555555")
    figure.savefig(path, dpi=110)


def charts_of(comparison: Comparison) -> dict[str, Chart]:
    """Return the functions that draw the charts of a comparison, by caption."""
    charts: dict[str, Chart] = {}
    if measured := [row for row in comparison.rows if row.numbers]:
        kind = "GPU memory at its peak (GB" if comparison.on_gpu else "Model states (MB"
        chart = partial(draw_memory, rows=measured, on_gpu=comparison.on_gpu)
        charts[f"{kind} on the fullest rank)"] = chart
    if measured and not comparison.simulated:
        charts["Samples per second, with the spread"] = partial(draw_speed, rows=measured)
    if rows := [row for row in comparison.rows if row.points]:
        if not comparison.of_strategies:
            losses = {
                row.name: [(last, loss) for (_, last), loss in row.runs[0].losses().items()]
                for row in rows
            }
            charts["Training loss (nats per token)"] = partial(draw_lines, lines=losses)
        chart = partial(draw_differences, comparison=comparison, rows=rows)
        charts["Relative difference of the loss"] = chart
    return charts


def draw_memory(axes: Axes, rows: list[Row], on_gpu: bool) -> None:
    """Draw the kinds of memory of each row as stacked bars, and the plan.

    On a GPU the bars reach the allocator's peak; memory of the host is added.
    """
    unit, numbers = (GB if on_gpu else MB), [row.numbers for row in rows]
    parts = {kind: [n["categories"][kind] / unit for n in numbers] for kind in STATES}
    parts["other"] = [
        max(0.0, n["memory_bytes"] - sum(n["categories"].values())) / unit for n in numbers
    ]
    parts["in host memory"] = [sum(n["host_categories"].values()) / unit for n in numbers]
    plans = [n["planned_bytes"] / unit if n["planned_bytes"] else math.nan for n in numbers]
    draw_bars(axes, [row.name for row in rows], parts, plans)


def draw_speed(axes: Axes, rows: list[Row]) -> None:
    """Draw the throughput of each row as a bar, with its spread."""
    names = [row.name for row in rows]
    rates, low, high = (
        [row.numbers[f"samples_per_second{end}"] for row in rows] for end in ("", "_low", "_high")
    )
    draw_bars(axes, names, {"": rates})
    middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    half = [(b - a) / 2 for a, b in zip(low, high, strict=True)]
    axes.errorbar(middle, names, xerr=half, fmt="none", capsize=4, ecolor="#333333")


def draw_differences(axes: Axes, comparison: Comparison, rows: list[Row]) -> None:
    """Draw the relative loss differences from the reference, and the tolerance, on a log axis."""
    drawn = {row.name: row for row in rows if row is not comparison.reference}
    if comparison.control:
        drawn["control: higher lr"] = comparison.control
    lines = {
        name: [
            (point.last, max(SMALLEST_DIFFERENCE, point.relative))
            for point in row.points
            if point.of == "loss" and math.isfinite(point.relative)
        ]
        for name, row in drawn.items()
    }
    limit = comparison.tolerance or SMALLEST_DIFFERENCE
    axes.axhline(limit, label="tolerance", color=RED, linestyle="--")
    draw_lines(axes, lines)
    axes.set_yscale("log")
    largest = max([limit, *(value for points in lines.values() for _, value in points)])
    axes.set_ylim(SMALLEST_DIFFERENCE / 2, 100 * largest)  # space for the legend
    medians = f"medians of {comparison.lasting} steps; " if comparison.lasting > 1 else ""
    axes.set_ylabel(f"{medians}none: {SMALLEST_DIFFERENCE:.0e}")
    axes.legend(fontsize=8, ncols=3, loc="upper center")


def draw_lines(axes: Axes, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Draw curves over the optimizer steps, each thinner than the one below it.

    Args:
        lines: the steps and the values of their points, by label.
    """
    for number, (label, points) in enumerate(lines.items()):
        width, marker = 1.3 + 4 * (1 - (number + 1) / len(lines)), "." if len(points) < 30 else ""
        color = COLORS[number % len(COLORS)]
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, label=label, color=color, marker=marker, linewidth=width)
    if len(lines) > 1:
        axes.legend(fontsize=8, ncols=2)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_bars(
    axes: Axes, names: list[str], bars: dict[str, list[float]], plans: list[float] | None = None
) -> None:
    """Draw stacked horizontal bars, the first name at the top.

    Args:
        bars: the length of each part of the bars, by label.
        plans: where a mark shows the planned length.
    """
    left = [0.0] * len(names)
    for label, values in bars.items():
        if any(values):
            color = KIND_COLORS.get(label, "#999999")
            axes.barh(names, values, left=left, label=label, color=color)
            left = [start + value for start, value in zip(left, values, strict=True)]
    if plans:
        axes.plot(plans, names, "k|", markersize=14, label="plan")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    if len(bars) > 1:  # below the axes, where it covers no bar
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)


def svg_of(chart: Chart, size: tuple[float, float]) -> str:
    """Return a chart as an SVG element whose text has the text color of the page.

    Args:
        size: width and height in inches.
    """
    with matplotlib.rc_context({**SVG_SETTINGS, "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        chart(figure.subplots())
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration, whose DTD has an address
    return svg.replace("#000000", "currentColor").replace("#333333", "currentColor")
