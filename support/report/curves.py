"""Figures of runs: the difference of two runs, and the charts of a page (see page.py)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from support.report import plots
from support.report.compare import Comparison
from support.report.divergence import Divergence
from support.report.plots import KIND_COLORS, SMALLEST_DIFFERENCE, show_steps

COLORS = ("#0072B2", "#D55E00")  # of Okabe and Ito, as in plots.py
# Text stays text, so that a page is small and can be searched.
SVG_SETTINGS = {"svg.fonttype": "none", "legend.frameon": False}
SVG_SETTINGS |= {"svg.hashsalt": "page", "font.size": 9}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


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


def comparison_drawings(comparison: Comparison) -> dict[str, str]:
    """Return the charts of plots.draw as SVG, by caption."""
    charts = plots.charts_of(comparison)
    return {caption: svg_of(draw, (6.5, 4.2)) for caption, draw in charts.items()}
