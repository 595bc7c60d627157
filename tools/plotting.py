"""Colors and bars that the figures of several tools have in common.

matplotlib may be missing, so only what draws imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The palette of Okabe and Ito, whose colors can be told apart with color-blindness.
BLUE, SKY, ORANGE, GREEN, PINK, RED = "#0072B2 #56B4E9 #E69F00 #009E73 #CC79A7 #D55E00".split()
COLORS = ("#000000", ORANGE, SKY, GREEN, "#F0E442", RED, PINK, BLUE)
KIND_COLORS = {"": BLUE, "parameters": BLUE, "gradients": SKY, "optimizer": ORANGE}
KIND_COLORS |= {
    "activations": GREEN,
    "logits": PINK,
    "in host memory": "#dddddd",
    "on NVMe": "#eeeeee",
}
# Text stays text, so that a page is small and can be searched.
SVG_SETTINGS = {"svg.fonttype": "none", "legend.frameon": False, "svg.hashsalt": "page"}


def draw_bars(
    axes: Axes,
    names: list[str],
    bars: dict[str, list[float]],
    plans: list[float] | None = None,
    spread: tuple[list[float], list[float]] | None = None,
) -> None:
    """Draw stacked horizontal bars, the first name at the top.

    Args:
        bars: the length of each part of the bars, by label.
        plans: where a mark shows the planned length.
        spread: where a line over each bar begins and ends.
    """
    left = [0.0] * len(names)
    for label, values in bars.items():
        if any(values):
            color = KIND_COLORS.get(label, "#999999")
            axes.barh(names, values, left=left, label=label, color=color)
            left = [start + value for start, value in zip(left, values, strict=True)]
    if plans:
        axes.plot(plans, names, "k|", markersize=14, label="plan")
    if spread:
        axes.hlines(names, *spread, color="#333333")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    if len(bars) > 1:  # below the axes, where it covers no bar
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
