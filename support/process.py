"""What holds from a program's first line on: output that cannot fail, and one line when a signal
ends it.

Only small modules of the standard library are imported here, so that little time passes before a
signal is handled.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

from support.errors import EXIT_COMPLETED, EXIT_FAILED, TrainingError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
ALSO_IF_IGNORED = STOP_SIGNALS[:3]  # not SIGHUP, which nohup sets to be ignored


class LossyFile(io.FileIO):
    """A stream that drops what cannot be written: a full disk, a closed pipe or a lost terminal
    must not end a run.

    Attributes:
        lost: the first error, or None.
    """

    lost: OSError | None = None

    def write(self, data) -> int:
        """Write `data`, or a part of it as FileIO does; after an error nothing is written, and all
        counts as written.
        """
        try:
            while (
                written := super().write(data)
            ) is None:  # another program made this pipe non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            self.lost = self.lost or error
            return len(data)


def protect_output() -> None:
    """Replace sys.stdout and sys.stderr by streams whose errors are ignored, also in the
    interpreter's shutdown.

    A descriptor that was closed at the start (`>&-`) is opened on /dev/null: otherwise the next
    file or socket would get its number, and what a library prints would go into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (it stays open)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None and isinstance(
            getattr(getattr(stream, "buffer", None), "raw", None), LossyFile
        ):
            continue
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()
        encoding = getattr(stream, "encoding", None) or "utf-8"
        lossy = io.BufferedWriter(LossyFile(number, "w", closefd=False))
        # errors: a terminal without UTF-8 must not end the run either.
        wrapped = io.TextIOWrapper(lossy, encoding, errors="replace", line_buffering=True)
        setattr(sys, name, wrapped)
        setattr(sys, f"__{name}__", wrapped)


def check_output() -> None:
    """For a program whose result is what it prints.

    Raises:
        TrainingError: a part of stdout was lost, and not because its reader wanted no more (`|
            head`).
    """
    sys.stdout.flush()
    lost = sys.stdout.buffer.raw.lost
    if lost is not None and not isinstance(lost, BrokenPipeError):
        raise TrainingError(f"Standard output cannot be written: {lost.strerror}.")


def run_command_line(main: Callable[[], None], printed: bool = True) -> NoReturn:
    """Run the `main` of a small program; a full disk, `| head` and Ctrl-C give a proper exit code
    and no traceback.

    Args:
        printed: the program's result is what it prints, and not in files; it has failed if that
            cannot be written.
    """
    code: int | str | None = EXIT_COMPLETED
    protect_output()
    for number in STOP_SIGNALS:
        if (
            signal.getsignal(number) != signal.SIG_IGN
        ):  # compare_strategies.sh lets its report end undisturbed
            signal.signal(number, _raise_at_signal)
    try:
        main()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        print("❌ Interrupted.", file=sys.stderr)
        code = 128 + signal.SIGINT
    try:
        if printed:
            check_output()
    except TrainingError as error:
        print(f"❌ {error}", file=sys.stderr)
        code = code or error.exit_code
    sys.exit(code)


def _raise_at_signal(number: int, _frame) -> NoReturn:
    """An exception, so that `finally` removes what is half written."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def catch_signals(numbers: Iterable[int] = ()) -> None:
    """End the process with one line at a signal, until the run has handlers of its own
    (distributed.StopSignal).

    Args:
        numbers: signals to handle although the parent process set them to be ignored, as a shell
            does with SIGINT for `&`.
    """
    for number in STOP_SIGNALS:
        if number in numbers or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end_before_start)


def _end_before_start(number: int, _frame) -> NoReturn:
    """Nothing is written yet, so nothing needs to be removed. A launcher signals all ranks, so rank
    0 speaks for all.
    """
    if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0":
        line = (
            f"❌ Stopped by {signal.Signals(number).name} during the start; nothing was written.\n"
        )
        with contextlib.suppress(
            OSError
        ):  # os.write: a handler may interrupt a write to the same buffer
            os.write(2, line.encode())
    os._exit(EXIT_FAILED)
