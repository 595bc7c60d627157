"""Progress bars on a terminal; where the output goes to a file, lines are printed instead."""

from __future__ import annotations

import sys

from tqdm import tqdm


def on_terminal() -> bool:
    """Return whether stdout and stderr are both a terminal."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def bar(what: str, total: int | None, unit: str, active: bool, done: int = 0) -> tqdm:
    """Return a progress bar, a counter, or a line; it disappears when it is closed.

    Args:
        what: description in front of the bar.
        total: number of units until the end; None shows a counter.
        unit: name of a unit; empty, without a total, shows the description only.
        active: False shows nothing.
        done: units that are done already.
    """
    bar_format = "{desc} {n_fmt} {unit}, {elapsed}" if unit else "{desc} …"
    if total is not None:  # short, so that the loss fits into 80 columns, too
        bar_format = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
    return tqdm(
        desc=what,
        total=total,
        initial=done,
        unit=unit,
        disable=not active,
        leave=False,
        dynamic_ncols=True,
        mininterval=0.5,
        file=sys.stderr,
        unit_scale=total is None,
        bar_format=bar_format,
    )


def write(text: str, stream=None) -> None:
    """Print a line above the progress bars, if there are any.

    Args:
        stream: where to write it (default: sys.stdout).
    """
    stream = stream or sys.stdout
    tqdm.write(text, file=stream)
    stream.flush()
