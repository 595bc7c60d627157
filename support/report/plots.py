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
from support.units import GB, MB, human_rate

# The palette of Okabe and Ito, whose colors can be told apart with color-blindness.
BLUE, SKY, ORANGE, GREEN, PINK, RED = "#0072B2 #56B4E9 #E69F00 #009E73 #CC79A7 #D55E00".split()
COLORS = ("#000000", ORANGE, SKY, GREEN, "#F0E442", RED, PINK, BLUE)
HOST = "in host memory"
KIND_COLORS = {"": BLUE, "parameters": BLUE, "gradients": SKY, "optimizer": ORANGE}
KIND_COLORS |= {"activations": GREEN, "logits": PINK, HOST: "#dddddd"}
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
    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(6.5 * columns + (columns == 1), 4.5 * rows), layout="constrained")
    for number, (caption, chart) in enumerate(charts.items(), 1):
        axes = figure.add_subplot(rows, columns, number)
        chart(axes)
        axes.set_title(caption, fontsize=10)
    figure.suptitle(title(comparison), fontsize=11, wrap=True)
    figure.supxlabel("\n".join(provenance(comparison)), fontsize=8, color="#555555")
    figure.savefig(path, dpi=110)


def charts_of(comparison: Comparison) -> dict[str, Chart]:
    """Return the functions that draw the charts of a comparison, by caption."""
    charts: dict[str, Chart] = {}
    if measured := [row for row in comparison.rows if row.measured]:
        kind = "GPU memory at its peak (GB" if comparison.on_gpu else "Model states (MB"
        chart = partial(draw_memory, rows=measured, on_gpu=comparison.on_gpu)
        charts[f"{kind} on the fullest rank)"] = chart
    if timed := [row for row in measured if row.numbers["samples_per_second"]]:
        repeated = any(len(row.runs) > 1 for row in comparison.rows)
        caption = f"Samples per second (line: spread of {'repeats' if repeated else 'steps'})"
        charts[caption] = partial(draw_speed, rows=timed)
    if rows := [row for row in comparison.rows if row.points]:
        runs = {row.name: (row.completed or row.runs)[0] for row in rows}
        losses = {name: [(s.end, s.loss) for s in run.losses] for name, run in runs.items()}
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
    if on_gpu:
        states = [sum(column) for column in zip(*parts.values(), strict=True)]
        peaks = [n["memory_bytes"] / unit for n in numbers]
        parts["other"] = [max(0.0, p - s) for p, s in zip(peaks, states, strict=True)]
    in_host = [sum(n["host_categories"].values()) / unit for n in numbers]
    draw_bars(axes, [row.name for row in rows], parts | ({HOST: in_host} if any(in_host) else {}))
    plans = {r.name: r.numbers["planned_bytes"] / unit for r in rows if r.numbers["planned_bytes"]}
    axes.plot([*plans.values()], [*plans], "k|", markersize=18, label="plan")
    below_axes(axes)


def draw_speed(axes: Axes, rows: list[Row]) -> None:
    """Draw the throughput of each row as a bar, with its spread."""
    ends = [[row.numbers[f"samples_per_second{e}"] for e in ("", "_low", "_high")] for row in rows]
    spread = [[max(0.0, r - low) for r, low, _ in ends], [max(0.0, h - r) for r, _, h in ends]]
    rates = [rate for rate, _, _ in ends]
    names = [f"{row.name}\n{human_rate(rate)}" for row, rate in zip(rows, rates, strict=True)]
    draw_bars(axes, names, {"": rates})
    axes.errorbar(rates, names, xerr=spread, fmt="none", capsize=4, ecolor="#333333")


def draw_differences(axes: Axes, comparison: Comparison, rows: list[Row]) -> None:
    """Draw the relative loss differences from the reference, and the tolerance, on a log axis."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in [*rows, *filter(None, [comparison.control])]:
        name = "control: higher lr" if row is comparison.control else row.name
        points = sorted((p.last, p.relative) for p in row.points if math.isfinite(p.relative))
        if row is comparison.reference:
            name, points = f"_{name}", []  # not in the legend; the others keep their colors
        lines[name] = [(step, max(SMALLEST_DIFFERENCE, value)) for step, value in points]
    largest = [value for points in lines.values() for _, value in points]
    if comparison.tolerance:
        axes.axhline(comparison.tolerance, label="tolerance", color=RED, linestyle="--")
        largest.append(comparison.tolerance)
    draw_lines(axes, lines)
    axes.set_yscale("log")
    axes.set_ylim(SMALLEST_DIFFERENCE / 2, 100 * max(largest, default=1.0))
    medians = f"medians of {comparison.lasting} steps; " if comparison.lasting > 1 else ""
    axes.set_ylabel(f"{medians}none: {SMALLEST_DIFFERENCE:.0e}")
    axes.legend(fontsize=8, ncols=3, loc="upper center")


def draw_lines(axes: Axes, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Draw curves over the optimizer steps, each thinner than the one below it.

    Args:
        lines: the steps and the values of their points, by label.
    """
    for number, (label, points) in enumerate(lines.items()):
        steps, values = [step for step, _ in points], [value for _, value in points]
        width, marker = 1.3 + 4 * (1 - (number + 1) / len(lines)), "." if len(points) < 30 else ""
        color = COLORS[number % len(COLORS)]
        axes.plot(steps, values, label=label, color=color, marker=marker, linewidth=width)
    if len(lines) > 1:
        axes.legend(fontsize=8, ncols=2)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_bars(axes: Axes, names: list[str], bars: dict[str, list[float]]) -> None:
    """Draw stacked horizontal bars, the first name at the top.

    Args:
        bars: the length of each part of the bars, by label.
    """
    left = [0.0] * len(names)
    # Between $ and $ matplotlib would see a formula.
    names = [name.replace("$", r"\$") for name in names]
    for label, values in bars.items():
        color = KIND_COLORS.get(label, "#999999")
        axes.barh(names, values, left=left, label=label.replace("$", r"\$"), color=color)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    if len(bars) > 1:
        below_axes(axes)


def below_axes(axes: Axes) -> None:
    """Draw the legend below the axes, where it covers no bar."""
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
