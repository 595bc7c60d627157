"""Live bars for who watches a terminal. Where output goes to a file there are none, only lines."""

from __future__ import annotations

import sys

from tqdm import tqdm


def on_terminal() -> bool:
    """Whether somebody watches: both streams are a terminal."""
    return sys.stdout.isatty() and sys.stderr.isatty()


class Bar:
    """A bar that fills; without a total it counts, and without a unit it only stands there. It
    vanishes when it is closed.
    """

    def __init__(self, what: str, total: int | None, unit: str, active: bool, done: int = 0):
        if total is not None:  # as short as it can be: 80 columns hold the loss, too
            shown = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
        else:
            shown = "{desc} {n_fmt} {unit}, {elapsed}" if unit else "{desc} …"
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
            bar_format=shown,
        )

    @property
    def active(self) -> bool:
        """Whether anybody sees it."""
        return not self._bar.disable

    def advance(self, by: int = 1) -> None:
        """So much more is done."""
        self._bar.update(by)

    def show(self, text: str) -> None:
        """Say something at the bar's end."""
        self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """Remove it."""
        self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_error) -> None:
        self.close()


def write(text: str, stream=None) -> None:
    """A line above the bars, if there are any; on stdout if nothing else is said."""
    stream = stream or sys.stdout
    tqdm.write(text, file=stream)
    stream.flush()
