"""Console output of a run: lines, notices and progress bars of rank 0."""

from __future__ import annotations

from dataclasses import dataclass

from support import progress


@dataclass(frozen=True)
class Console:
    """What one rank prints."""

    is_main: bool  # whether this is rank 0
    quiet: bool = False  # print only notices and errors (--quiet)
    verbose: bool = False  # also print tracebacks and the libraries' own lines (--verbose)

    def print0(self, text: str) -> None:
        """Print on rank 0 only, unless --quiet is set."""
        if self.is_main and not self.quiet:
            self.print(text)

    def print(self, text: str) -> None:
        """Print on this rank, also under --quiet."""
        progress.write(text)  # `print` would overwrite a progress bar

    def warn(self, text: str) -> None:
        """Print a notice for the user, on rank 0 only, also under --quiet."""
        if self.is_main:
            self.print(f"ℹ️  {text}")

    def bar(self, what: str, total: int | None = None, unit: str = "step", done: int = 0):
        """Return a `progress.bar`, visible if rank 0 writes to a terminal and without --quiet."""
        visible = self.is_main and not self.quiet and progress.on_terminal()
        return progress.bar(what, total, unit, visible, done)
