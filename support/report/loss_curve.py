"""loss.png: the losses of a run, drawn after each evaluation and at the end."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from support.files.atomic import write_atomically
from support.report.metrics_file import read_metrics


def draw_losses(metrics: Path) -> None:
    """Draw the training and evaluation losses over the steps into loss.png, next to metrics.jsonl.

    Does nothing if fewer than two steps are logged.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: a file cannot be read or written.
    """
    records, _ = read_metrics(metrics)
    trained, evaluated = (
        [(record["step"], record[key]) for record in records if record.get(key) is not None]
        for key in ("loss", "eval_loss")
    )
    if len(trained) < 2:
        return
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces its font cache
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.plot(*zip(*trained, strict=True), color="#56B4E9", linewidth=1, label="training")
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color="#D55E00", label="evaluation")
    axes.legend(frameon=False)
    save = partial(figure.savefig, format="png", dpi=100)
    write_atomically(metrics.with_name("loss.png"), save)
