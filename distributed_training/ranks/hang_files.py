"""The files of a hang report: the stacks of each rank, and report.txt with a table of the ranks."""

import contextlib
import faulthandler
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO

from distributed_training import console
from distributed_training.errors import redact


class HangFiles:
    """What this rank writes to <output_dir>/hang, or to stderr before the folder is known."""

    def __init__(self, rank: int):
        self.rank = rank
        self._folder: Path | None = None  # the output folder
        self._stacks: IO | None = None  # rank-N.txt

    def write_to(self, folder: Path) -> None:
        """Write the files into this output folder from now on."""
        self._folder = folder

    def dump_later(self, seconds: int) -> None:
        """Write the stacks after so many seconds, by faulthandler's timer in C."""
        self._stacks = self._stacks or self._open_stacks()
        faulthandler.dump_traceback_later(seconds, file=self._stacks)

    def cancel(self) -> None:
        """Stop the timer."""
        faulthandler.cancel_dump_traceback_later()

    def dump(self, reason: str) -> None:
        """Write the stacks of all threads of this process now."""
        file = self._stacks = self._stacks or self._open_stacks()
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n"
        # Not console.write: the main thread may block while it holds the lock of the bars.
        try:
            os.write(file.fileno(), line.encode())
            faulthandler.dump_traceback(file)
        except OSError as error:  # also a full disk: the run continues
            with contextlib.suppress(OSError):
                os.write(2, f"ℹ️  The stacks cannot be written: {error.strerror}\n".encode())

    def write_table(self, reason: str, states: dict[int, dict]) -> None:
        """Append the table of all ranks to report.txt, and print one line.

        Args:
            states: of all ranks.
        """
        from distributed_training.ranks.hang_report import table_of

        head = f"Hang report of {time.strftime('%Y-%m-%d %H:%M:%S')}\n{reason}"
        text = redact(f"{head}\n\n{table_of(states)}\n\n")
        if self._folder:
            path = self._folder / "hang" / "report.txt"
            try:
                path.parent.mkdir(exist_ok=True)
                with open(path, "a", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:  # also a full disk: the run continues
                console.write(f"ℹ️  {path} cannot be written ({error.strerror}); its text:")
            else:
                place = f"{path.parent} on {socket.gethostname()}"
                console.write(f"ℹ️  {reason}: the stacks of the ranks are in {place}")
                return
        console.write(text, sys.stderr)

    def close(self) -> None:
        """Stop the timer, and remove rank-N.txt if nothing was written to it."""
        self.cancel()
        if self._stacks is None or self._stacks is sys.stderr:
            return
        with contextlib.suppress(OSError):
            path = Path(self._stacks.name)
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()  # fails if another rank has its file there

    def _open_stacks(self) -> IO:
        """Open rank-N.txt without a buffer, whose flush would fail on a full disk; else stderr."""
        if self._folder:
            with contextlib.suppress(OSError):  # a node that does not see the output folder
                (self._folder / "hang").mkdir(exist_ok=True)
                return open(self._folder / "hang" / f"rank-{self.rank}.txt", "ab", buffering=0)
        return sys.stderr
