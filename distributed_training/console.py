"""Console output: lines, notices and progress bars of rank 0; which characters are shown."""

from __future__ import annotations

import contextlib
import sys
import threading
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

RULE = 60 * "="  # a line between the parts of a run's output

is_main, quiet, verbose = True, False, False  # see `configure`


def printable(text: str) -> str:
    """Return a text on one line, with escape sequences for characters that are not printable."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def visible(text: str) -> str:
    """Return a text of data or of a model for a terminal or a page, with its lines and tabs.

    Escape sequences replace characters that a terminal obeys, and that hide or reorder text.
    """
    # Spaces are visible, although Python prints those of Chinese text as escape sequences.
    kept = {char for char in {*text} if char in "\n\t" or unicodedata.category(char) == "Zs"}
    return "".join(char if char in kept else printable(char) for char in text)


def configure(rank: int, be_quiet: bool, be_verbose: bool) -> None:
    """Set what this process prints: nothing but errors on other ranks than 0.

    Args:
        be_quiet: print only notices and errors (--quiet).
        be_verbose: also print tracebacks (--verbose).
    """
    global is_main, quiet, verbose
    is_main, quiet, verbose = rank == 0, be_quiet, be_verbose


def print0(text: str) -> None:
    """Print on rank 0 only, unless --quiet is set."""
    if is_main and not quiet:
        write(text)


def warn(text: str) -> None:
    """Print a notice for the user, on rank 0 only, also under --quiet."""
    if is_main:
        write(f"ℹ️  {text}")


def on_terminal() -> bool:
    """Return whether stdout and stderr are both a terminal."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def bar(what: str, total: int | None = None, unit: str = "step", done: int = 0) -> tqdm:
    """Return a progress bar, or without a total a counter; it disappears when it is closed.

    It is visible on rank 0 if that writes to a terminal, without --quiet.

    Args:
        what: description in front of the bar.
        unit: name of a unit; empty, without a total, shows the description only.
        done: units that are done already.
    """
    from tqdm import tqdm  # not for programs that print tables only

    bar_format = "{desc} {n_fmt} {unit}, {elapsed}" if unit else "{desc} …"
    if total is not None:  # short, so that the loss fits into 80 columns, too
        bar_format = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
    return tqdm(
        desc=what,
        total=total,
        initial=done,
        unit=unit,
        disable=quiet or not (is_main and on_terminal()),
        leave=False,
        dynamic_ncols=True,
        mininterval=0.5,
        file=sys.stderr,
        unit_scale=total is None,
        bar_format=bar_format,
    )


@contextlib.contextmanager
def timer(what: str) -> Iterator[None]:
    """Show the elapsed time on a terminal, for work that does not report its progress."""
    with bar(what, unit="") as shown:
        shown.bar_format = "{desc}, {elapsed}"
        finished = threading.Event()

        def refresh() -> None:
            while not finished.wait(1):  # seconds
                shown.refresh()

        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()


def write(text: str, stream=None) -> None:
    """Print a line above the progress bars, if there are any; `stream` is sys.stdout if None."""
    from tqdm import tqdm

    tqdm.write(visible(text), file=stream or sys.stdout)
    (stream or sys.stdout).flush()
