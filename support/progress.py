"""Progress bars on a terminal; where the output goes to a file, lines are printed instead."""

from __future__ import annotations

import sys

from tqdm import tqdm


def on_terminal() -> bool:
    """Return whether stdout and stderr are both a terminal."""
    return sys.stdout.isatty() and sys.stderr.isatty()


class Bar:
    """A progress bar, a counter, or a line; it disappears when it is closed.

    Args:
        what: description in front of the bar.
        total: number of units until the end; None shows a counter.
        unit: name of a unit; empty, without a total, shows the description only.
        done: units that are done already.
    """

    def __init__(self, what: str, total: int | None, unit: str, active: bool, done: int = 0):
        if total is not None:  # short, so that the loss fits into 80 columns, too
            bar_format = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
        else:
            bar_format = "{desc} {n_fmt} {unit}, {elapsed}" if unit else "{desc} …"
        self._bar = tqdm(
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

    @property
    def active(self) -> bool:
        """Whether the bar is shown."""
        return not self._bar.disable

    def advance(self, by: int = 1) -> None:
        """Add `by` units to the units done."""
        self._bar.update(by)

    def show(self, text: str) -> None:
        """Set the text at the end of the bar; it appears with the next refresh."""
        self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_error) -> None:
        self.close()


def write(text: str, stream=None) -> None:
    """Print a line above the progress bars, if there are any.

    Args:
        stream: where to write it (default: sys.stdout).
    """
    stream = stream or sys.stdout
    tqdm.write(text, file=stream)
    stream.flush()
