"""The figure of a run's losses, loss.png, drawn with matplotlib from metrics.jsonl."""

import functools
import logging
import os
import tempfile
from functools import partial
from pathlib import Path

from distributed_training import console
from distributed_training.errors import first_line
from distributed_training.files.atomic import TemporaryFolder, write_atomically
from distributed_training.records.metrics_reader import read_metrics, unreadable_lines


def use_writable_matplotlib_folder() -> None:
    """Before matplotlib is imported: give it a temporary folder if it cannot write to its own.

    It would create one itself, which remains: a run ends without the interpreter's shutdown.
    """
    given, env = os.environ.get("MPLCONFIGDIR"), os.environ
    homes = [env.get("XDG_CONFIG_HOME") or "~/.config", env.get("XDG_CACHE_HOME") or "~/.cache"]
    if not all(map(_can_write, [given] if given else homes)):
        parent = Path(tempfile.gettempdir())
        temporary = TemporaryFolder(parent, "distributed_training_matplotlib_", mode=0o700)
        env["MPLCONFIGDIR"] = str(temporary.path)


def _can_write(folder: str) -> bool:
    """Return whether a folder is writable, or can be created."""
    path = Path(os.path.expanduser(folder))
    if not path.is_absolute():  # there is no home folder
        return False
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    return there.is_dir() and os.access(there, os.W_OK)


def why_no_figure() -> str:
    """Return why no figure can be drawn, and the remedy; "" if matplotlib can be imported."""
    use_writable_matplotlib_folder()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces its font cache
    try:
        import matplotlib.figure  # noqa: F401  # takes a second
    except ImportError as error:
        return f"{first_line(error)}: pip install matplotlib."
    return ""


@functools.cache
def _warn_once(text: str) -> None:
    console.warn(text)


def draw_losses(metrics: Path) -> None:
    """Draw the training and evaluation losses over the steps into loss.png, next to metrics.jsonl.

    Does nothing if fewer than two steps are logged. Prints a notice if lines cannot be read, or if
    matplotlib is missing.

    Raises:
        OSError: a file cannot be read or written.
    """
    records, unreadable = read_metrics(metrics)
    if unreadable:
        console.warn(unreadable_lines(metrics, unreadable))
    trained, evaluated = (
        [(record["step"], record[key]) for record in records if record.get(key) is not None]
        for key in ("loss", "eval_loss")
    )
    if len(trained) < 2:
        return
    if problem := why_no_figure():
        _warn_once(f"{metrics.with_name('loss.png')} is not drawn: {problem}")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.plot(*zip(*trained, strict=True), color="#56B4E9", linewidth=1, label="training")
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color="#D55E00", label="evaluation")
    axes.legend(frameon=False)
    save = partial(figure.savefig, format="png", dpi=100)
    write_atomically(metrics.with_name("loss.png"), save)
