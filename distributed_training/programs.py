"""Command lines that train nothing themselves: the scripts, and the programs that they run."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

from distributed_training.console import visible
from distributed_training.errors import UserError, explain
from distributed_training.process import STOP_SIGNALS, check_output, protect_output

END_SECONDS = 60  # for a program to end after SIGTERM; torchrun kills its ranks after 30 s


def run_command_line(main: Callable[[], int | None], printed: bool = True) -> NoReturn:
    """Run the `main` function of a small program and exit, without a traceback of its errors.

    Args:
        main: the program; see `exit_code_of`.
        printed: True if the program's result is its output on stdout, and not files. Then it fails
            with code 1 if the output cannot be written.
    """

    def run() -> int | None:
        code = main()
        if printed:
            check_output()
        return code

    protect_output()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # compare_strategies.sh ignores some
            signal.signal(number, _raise_at_signal)
    sys.exit(exit_code_of(run))


def _raise_at_signal(number: int, _frame) -> NoReturn:
    """Raise an exception, so that `finally` clauses remove unfinished files."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def exit_code_of(main: Callable[[], int | None]) -> int | str | None:
    """Return the exit code of a program: that of its error, which is printed, or what it returns.

    Args:
        main: returns the exit code, or None for 0. An unexpected exception is not caught.
    """
    try:
        return main()
    except SystemExit as end:  # of argparse, or 128 + the number of a signal
        return end.code
    except UserError as error:
        print(visible(f"❌ {explain(error)}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("❌ Interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT


def run_program(
    command: list[str],
    env: dict[str, str] | None = None,
    on_line: Callable[[str], None] = lambda _: None,
) -> tuple[int, str]:
    """Run a program to its end; return its exit code and what it printed.

    If this process is stopped, so is the program: torchrun forwards SIGTERM to its ranks.

    Args:
        on_line: is called with each line when the program prints it.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    lines = []
    with subprocess.Popen(command, env=env, text=True, **pipes) as program:  # type: ignore
        try:
            for line in program.stdout:
                lines.append(line)
                on_line(line.rstrip("\n"))
            program.wait()
        except BaseException:
            program.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.communicate(timeout=END_SECONDS)  # a full pipe would block it
            program.kill()
            raise
    return program.returncode, "".join(lines)
