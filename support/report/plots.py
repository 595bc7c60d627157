"""Figures: of a comparison, of the difference of two runs, and the charts of a page."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from support.report.compare import STATES, Attempt, Comparison, Row, differences
from support.report.divergence import Divergence
from support.report.tables import provenance, title
from support.units import GB, MB, human_rate

# The palette of Okabe and Ito, whose colors can be told apart with color-blindness: one color
# for each kind of memory, and one for each strategy.
KIND_COLORS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#E69F00",
    "buffers and other": "#999999",
    "activations and temporary": "#009E73",
    "activations": "#009E73",
    "logits": "#CC79A7",
}
STRATEGY_STYLES = {
    "dp": {"color": "#000000", "marker": "o"},
    "zero1": {"color": "#E69F00", "marker": "s"},
    "zero2": {"color": "#56B4E9", "marker": "^"},
    "zero3": {"color": "#009E73", "marker": "D"},
    "offload": {"color": "#F0E442", "marker": "v"},
    "infinity": {"color": "#D55E00", "marker": "P"},
    "fsdp": {"color": "#CC79A7", "marker": "X"},
    "control": {"color": "#777777", "marker": "."},
}
COLORS = ("#0072B2", "#D55E00")  # of two runs
# Text stays text, so that a page is small and can be searched.
SVG_SETTINGS = {"svg.fonttype": "none", "legend.frameon": False}
SVG_SETTINGS |= {"svg.hashsalt": "page", "font.size": 9}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
LIMIT_STYLE = {"color": "#D55E00", "linestyle": "--"}
SMALLEST_DIFFERENCE = 1e-8  # drawn for equal losses: 0 has no logarithm


def draw(comparison: Comparison, path: Path) -> None:
    """Draw the figure; of a simulation only memory is drawn.

    Args:
        comparison: with at least one completed row.
    """
    size, rows = ((9, 5.5), 1) if comparison.simulated else ((13, 9), 2)
    figure = Figure(figsize=size, layout="constrained")
    every_axes = figure.subplots(rows, rows, squeeze=False).flat
    for axes, chart in zip(every_axes, charts_of(comparison).values(), strict=True):
        chart(axes)
    figure.suptitle(title(comparison), fontsize=12)
    figure.supxlabel("\n".join(provenance(comparison)), fontsize=8, color="#555555")
    figure.savefig(path, dpi=110)


def charts_of(comparison: Comparison) -> dict[str, Callable[[Axes], None]]:
    """Return the functions that draw the charts of a comparison, by caption."""
    rows = [row for row in comparison.rows if row.completed]
    charts: dict[str, Callable[[Axes], None]] = {
        "Memory": lambda axes: draw_memory(axes, comparison, rows)
    }
    if not comparison.simulated:
        charts["Speed"] = lambda axes: draw_speed(axes, comparison, rows)
        charts["Losses"] = lambda axes: draw_losses(axes, rows)
        charts["Loss differences"] = lambda axes: draw_differences(axes, comparison, rows)
    return charts


# ------------------------------------------------------------------------------------------- memory


def draw_memory(axes: Axes, comparison: Comparison, rows: list[Row]) -> None:
    """Draw the memory of each strategy as stacked bars.

    On a GPU the bars reach the allocator's peak. On a CPU they show the tensors that a GPU would
    hold, and above those the tensors in host memory, hatched. A line shows the GPU's capacity if it
    is near the bars.
    """
    unit, unit_name = (GB, "GB") if comparison.on_gpu else (MB, "MB")
    tops = [0.0] * len(rows)
    for kind, sizes in _device_sizes(comparison, rows).items():
        _stack(axes, kind, [size / unit for size in sizes], tops, color=KIND_COLORS[kind])
    _label_bars(axes, tops, [f"{top:.2f}" if comparison.on_gpu else f"{top:.1f}" for top in tops])
    _mark_planned(axes, comparison, rows, unit)
    if not comparison.on_gpu:  # above the number, because a GPU would not hold it
        gap = 0.07 * max(tops)
        for bar, row in enumerate(rows):
            tops[bar] += gap * any(row.host_categories.values())
        for kind in ("gradients", "optimizer"):
            heights = [row.host_categories.get(kind, 0) / unit for row in rows]
            style = {"facecolor": "white", "edgecolor": KIND_COLORS[kind], "hatch": "///"}
            _stack(axes, f"{kind}, in host memory", heights, tops, **style)
    axes.set_ylim(0, 1.3 * max(tops))
    if capacity := comparison.facts["hardware"]["gpu_memory_bytes"]:
        _mark_capacity(axes, capacity / unit, max(tops))
    _name_strategies(axes, rows)
    axes.set_ylabel(f"{unit_name} on the fullest rank")
    counted = "Model state and activations" if comparison.simulated else "Model state"
    counted += " per rank (counted; a GPU would hold it)"
    axes.set_title("GPU memory at its peak" if comparison.on_gpu else counted)
    axes.legend(fontsize=8, ncols=2, loc="upper right")


def _device_sizes(comparison: Comparison, rows: list[Row]) -> dict[str, list[float]]:
    """Return the bytes of each strategy on the device, or on a CPU what would be, by kind."""
    sizes = {kind: [row.categories[kind] for row in rows] for kind in STATES}
    if comparison.on_gpu:
        sizes["buffers and other"] = [
            row.categories["buffers"] + row.categories["other"] for row in rows
        ]
        sizes["activations and temporary"] = [
            max(0.0, row.memory_bytes - sum(row.categories.values())) for row in rows
        ]
    elif comparison.simulated:
        sizes["activations"] = [row.activations or 0 for row in rows]
        sizes["logits"] = [row.logits or 0 for row in rows]
    return sizes


def _stack(axes: Axes, label: str, heights: list[float], tops: list[float], **style) -> None:
    """Draw a part on top of the bars, and raise `tops`, the heights of the bars, by it."""
    if parts := {bar: height for bar, height in enumerate(heights) if height}:
        below = [tops[bar] for bar in parts]
        axes.bar(list(parts), list(parts.values()), 0.65, bottom=below, label=label, **style)
    for bar, height in parts.items():
        tops[bar] += height


def _mark_planned(axes: Axes, comparison: Comparison, rows: list[Row], unit: int) -> None:
    """Draw the memory estimate of each strategy that has one as a short line."""
    planned = [row.planned_bytes for row in rows]
    if comparison.simulated and not comparison.on_gpu:
        kinds = (*STATES, "activations", "logits")
        planned = [sum(row.planned.get(kind, 0) for kind in kinds) for row in rows]
    if marks := {bar: size / unit for bar, size in enumerate(planned) if size}:
        style = {"linestyle": "none", "marker": "_", "markersize": 26, "color": "black"}
        axes.plot(list(marks), list(marks.values()), label="planned", **style)


def _mark_capacity(axes: Axes, capacity: float, top: float) -> None:
    """Draw the GPU's capacity as a line, or as text if it is far above the bars.

    Args:
        capacity, top: in the unit of the axis; `top` is the height of the highest bar.
    """
    if capacity < 4 * top:
        label = f"capacity of the GPU, {capacity:.1f} GB"
        axes.axhline(capacity, label=label, **LIMIT_STYLE)
        axes.set_ylim(0, 1.25 * max(capacity, top))
    else:
        text = f"capacity of the GPU: {capacity:.1f} GB, far above"
        axes.text(0.99, 0.70, text, transform=axes.transAxes, ha="right", fontsize=9)


def _label_bars(axes: Axes, tops: list[float], texts: list[str], gap: int = 3) -> None:
    """Write a text above each bar, `gap` points above its top."""
    style = {"textcoords": "offset points", "ha": "center", "fontsize": 9}
    for bar, (top, text) in enumerate(zip(tops, texts, strict=True)):
        axes.annotate(text, (bar, top), (0, gap), **style)


def _name_strategies(axes: Axes, rows: list[Row]) -> None:
    """Label the bars with the strategies, and with the bytes that a strategy keeps on NVMe."""
    names = [
        f"{row.strategy}\n{row.nvme_bytes / MB:.0f} MB NVMe" if row.nvme_bytes else row.strategy
        for row in rows
    ]
    axes.set_xticks(range(len(rows)), names, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


# --------------------------------------------------------------------------------- speed and losses


def draw_speed(axes: Axes, comparison: Comparison, rows: list[Row]) -> None:
    """Draw the throughput of each strategy as bars, with the spread as error bars."""
    rates = [row.samples_per_second for row in rows]
    below = [max(0.0, row.samples_per_second - row.samples_per_second_low) for row in rows]
    above = [max(0.0, row.samples_per_second_high - row.samples_per_second) for row in rows]
    style = {"capsize": 4, "color": "#0072B2", "ecolor": "#333333"}
    axes.bar(range(len(rows)), rates, 0.65, yerr=[below, above], **style)
    tops = [rate + spread for rate, spread in zip(rates, above, strict=True)]
    _label_bars(axes, tops, [human_rate(rate) for rate in rates], gap=4)
    _name_strategies(axes, rows)
    axes.set_ylabel("samples per second, all ranks")
    of_repeats = "bar: median; line: slowest to fastest repeat"
    of_steps = "bar: mean; line: 10th to 90th percentile of the steps"
    axes.set_title(f"Throughput ({of_repeats if comparison.repeated else of_steps})")


def draw_losses(axes: Axes, rows: list[Row]) -> None:
    """Draw all loss curves, each thinner than the one below it, so that none hides another."""
    for number, row in enumerate(rows):
        color, width = STRATEGY_STYLES[row.strategy]["color"], 1.5 + 1.7 * (len(rows) - 1 - number)
        for attempt in row.completed:
            label = row.strategy if attempt is row.completed[0] else ""
            steps = _steps_of(attempt)
            axes.plot(steps, attempt.losses, label=label, color=color, linewidth=width)
    axes.set_ylabel("training loss (nats per token)")
    axes.set_title("Loss (curves that are alike lie over each other, the first one widest)")
    axes.legend(fontsize=8, ncols=2)
    show_steps(axes)


def draw_differences(axes: Axes, comparison: Comparison, rows: list[Row]) -> None:
    """Draw the relative loss differences from the reference, and the tolerance, on a log axis.

    Args:
        rows: those that completed; the first is the reference.
    """
    reference = rows[0]
    rows = rows + ([comparison.control] if comparison.control else [])
    for row in rows:
        style = {"markersize": 4, "markeredgecolor": "#333333", "linewidth": 1.3}
        style |= STRATEGY_STYLES[row.strategy]
        label = "control: higher lr" if row is comparison.control else row.strategy
        for attempt in row.completed:
            if attempt is reference.completed[0]:
                continue
            values = differences(attempt, reference.completed[0], comparison.lasting)
            values = [max(SMALLEST_DIFFERENCE, value) for value in values]
            axes.plot(_steps_of(attempt), values, label=label, **style)
            label = ""  # one legend entry for all repeats
    tolerance, lasting = comparison.tolerance, comparison.lasting
    axes.axhline(tolerance, label=f"tolerance, {tolerance:g}", **LIMIT_STYLE)
    axes.set_yscale("log")
    largest = max(tolerance, *(row.difference or 0 for row in rows))
    axes.set_ylim(SMALLEST_DIFFERENCE / 2, 100 * largest)
    axes.set_ylabel("relative difference of the loss")
    medians = f", medians of {lasting} steps" if lasting > 1 else ""
    axes.set_title(
        f"Difference from {reference.strategy}{medians} (none: {SMALLEST_DIFFERENCE:.0e})"
    )
    axes.legend(fontsize=8, ncols=4, loc="upper center")
    show_steps(axes)


def _steps_of(attempt: Attempt) -> range:
    """Return the numbers of the optimizer steps of a run, counted from 1."""
    return range(1, len(attempt.losses) + 1)


def show_steps(axes: Axes) -> None:
    """Mark only whole steps on the x axis, and draw a light grid."""
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


# ------------------------------------------------------------- two runs, and the charts of a page


def draw_divergence(found: Divergence, path: Path) -> None:
    """Draw the loss curves of two runs, and below them their difference on a log axis.

    Args:
        path: the .png, .svg or .pdf file to write.
    Raises:
        ValueError: matplotlib does not know the ending of the file's name.
    """
    figure = Figure(figsize=(8, 7), layout="constrained")
    losses, relative = figure.subplots(2, 1, sharex=True)
    for name, run, width, color in zip("AB", (found.a, found.b), (4, 1.5), COLORS, strict=True):
        steps, values = [span.end for span in run.spans], [span.loss for span in run.spans]
        losses.plot(steps, values, label=f"{name}: {run.place}", linewidth=width, color=color)
    losses.set_ylabel("training loss (nats per token)")
    points = [point for point in found.points if point.relative < float("inf")]
    values = [max(SMALLEST_DIFFERENCE, point.relative) for point in points]
    relative.plot([point.last for point in points], values, marker=".", color=COLORS[0])
    relative.axhline(found.tolerance, color=COLORS[1], linestyle="--", label="tolerance")
    relative.set_yscale("log")
    relative.set_ylabel(f"relative difference (none: {SMALLEST_DIFFERENCE:.0e})")
    first = found.first(found.points)
    for axes in (losses, relative):
        if first:
            axes.axvline(first.last, color="#777777", label=f"first difference, {first.steps}")
        show_steps(axes)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


# ------------------------------------------------------------------------------ charts of a page


def svg_of(draw: Callable[[Axes], object], size: tuple[float, float] = (4.6, 2.7)) -> str:
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


def draw_lines(axes: Axes, lines: dict[str, tuple[list[int], list[float]]]) -> None:
    """Draw curves over the optimizer steps.

    Args:
        lines: steps and values by label; few points are marked.
    """
    for color, (label, (steps, values)) in zip(COLORS, lines.items(), strict=False):
        marker = "." if len(steps) < 30 else ""
        if steps:
            axes.plot(steps, values, label=label, color=color, marker=marker, linewidth=1.3)
    if len(lines) > 1:
        axes.legend()
    show_steps(axes)


def draw_bars(
    axes: Axes, names: Sequence[str], bars: dict[str, list[float]], stacked: bool = False
) -> None:
    """Draw horizontal bars, the first name at the top.

    Args:
        bars: the length of each bar, by label.
        stacked: one bar of several parts for each name; otherwise each is drawn over the others,
            the last one lightest.
    """
    left = [0.0] * len(names)
    names = [_literal(name) for name in names]
    for place, (label, values) in enumerate(bars.items()):
        color = KIND_COLORS.get(label, "#999999" if stacked else COLORS[0])
        style = {"color": color, "alpha": 1.0 if stacked or not place else 0.35}
        axes.barh(names, values, left=left if stacked else None, label=_literal(label), **style)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    if len(bars) > 1:
        axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8)


def _literal(label: str) -> str:
    """Return a label of a file in which matplotlib sees no formula between $ and $."""
    return label.replace("$", r"\$")
