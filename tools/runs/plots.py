"""The figure of a comparison, and the charts of a page: each function draws on given axes.

matplotlib may be missing (`loss_figure.why_no_figure`), so only what draws imports it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training.records.compare import Comparison
from distributed_training.records.recorded_run import STATES, RecordedRun
from distributed_training.units import GB, MB
from tools.plotting import COLORS, RED, SVG_SETTINGS, draw_bars
from tools.runs.comparison_text import provenance, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EQUAL = 1e-8  # drawn as the difference of equal losses: 0 has no logarithm

Chart = Callable[["Axes"], object]


def draw(comparison: Comparison, path: Path) -> None:
    """Draw all charts of a comparison into a .png, .svg or .pdf file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not know the ending of the file's name.
    """
    from matplotlib.figure import Figure

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
    if measured := [run for run in comparison.runs if run.numbers.get("memory_bytes")]:
        unit, kind = (GB, "Peak GPU memory (GB") if comparison.on_gpu else (MB, "Model states (MB")
        charts[f"{kind} on the fullest rank)"] = partial(draw_memory, runs=measured, unit=unit)
        if timed := [run for run in measured if "samples_per_second" in run.numbers]:
            low, rates, high = (
                [run.numbers[f"samples_per_second{end}"] for run in timed]
                for end in ("_low", "", "_high")
            )
            names = [run.name for run in timed]
            chart = partial(draw_bars, names=names, bars={"": rates}, spread=(low, high))
            charts["Samples per second, with the spread"] = chart
    runs = {run.name: run for run in comparison.runs if run.agreement.points}
    if runs and not comparison.of_strategies:
        losses = {
            name: [(last, loss) for (_, last), loss in run.curve("loss").items()]
            for name, run in runs.items()
        }
        charts["Training loss (nats per token)"] = partial(draw_lines, lines=losses)
    if runs:
        if comparison.control:
            runs["control: higher lr"] = comparison.control
        others = {name: run for name, run in runs.items() if run is not comparison.reference}
        charts |= _differences(comparison, others)
    return charts


def _differences(comparison: Comparison, runs: dict[str, RecordedRun]) -> dict[str, Chart]:
    """Return the charts of the differences from the reference: of losses and gradient norms."""
    charts: dict[str, Chart] = {}
    medians = f", medians of {comparison.lasting} steps" if comparison.lasting > 1 else ""
    limits = {"loss": comparison.tolerance, "grad_norm": comparison.norm_tolerance}
    for kind, name in {"loss": "loss", "grad_norm": "gradient norm"}.items():
        lines = {
            label: [(p.last, max(EQUAL, p.relative)) for p in run.agreement.points if p.of == kind]
            for label, run in runs.items()
        }
        if lines := {label: points for label, points in lines.items() if points}:
            chart = partial(draw_lines, lines=lines, limit=limits[kind])
            charts[f"Relative difference of the {name} ({EQUAL:.0e}: none{medians})"] = chart
    return charts


def draw_memory(axes: Axes, runs: list[RecordedRun], unit: int) -> None:
    """Draw the memory of each run by kind and its plan, in GB or MB.

    On a GPU the kinds make the allocator's peak; memory of the host is added.
    """
    numbers = [run.numbers for run in runs]
    parts = {kind: [n["categories"][kind] / unit for n in numbers] for kind in STATES}
    rest = [n["memory_bytes"] - sum(n["categories"].values()) for n in numbers]
    parts["other"] = [max(0.0, size) / unit for size in rest]
    parts["in host memory"] = [sum(n["host_categories"].values()) / unit for n in numbers]
    plans = [(n["planned_bytes"] or math.nan) / unit for n in numbers]
    draw_bars(axes, [run.name for run in runs], parts, plans)


def draw_lines(
    axes: Axes,
    lines: dict[str, list[tuple[int, float]]],
    limit: float | None = None,
    marked: Sequence[tuple[int, float]] = (),
) -> None:
    """Draw curves over the optimizer steps, each thinner than the one below it.

    Args:
        lines: the steps and the values of their points, by label.
        limit: the tolerance of differences, which are drawn on a logarithmic axis.
        marked: points with a circle around them.
    """
    from matplotlib.ticker import MaxNLocator

    for number, (label, points) in enumerate(lines.items()):
        width, marker = 1.3 + 4 * (1 - (number + 1) / len(lines)), "." if len(points) < 30 else ""
        color = COLORS[number % len(COLORS)]
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, label=label, color=color, marker=marker, linewidth=width)
    if marked:
        style = {"marker": "o", "linestyle": "", "markersize": 9, "fillstyle": "none"}
        axes.plot(*zip(*marked, strict=True), color=RED, label="stands out", **style)
    if limit is not None:
        axes.axhline(max(EQUAL, limit), label="tolerance", color=RED, linestyle="--")
        drawn = [value for points in lines.values() for _, value in points]
        # With space for the legend. Before the scale, which cannot choose limits for equal values.
        axes.set_ylim(EQUAL / 2, 100 * max([EQUAL, limit, *filter(math.isfinite, drawn)]))
        axes.set_yscale("log")
    if len(lines) > 1 or limit is not None or marked:
        axes.legend(fontsize=8, ncols=3)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def svg_of(chart: Chart, size: tuple[float, float]) -> str:
    """Return a chart as an SVG element whose text has the text color of the page.

    Args:
        size: width and height in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**SVG_SETTINGS, "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        chart(figure.subplots())
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration, whose DTD has an address
    return svg.replace("#000000", "currentColor").replace("#333333", "currentColor")
