"""A process before its heavy imports: output that cannot fail, signal handlers; its versions.

Only small modules of the standard library are imported here, so that signals are handled early.
"""

import contextlib
import hashlib
import io
import os
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from distributed_training.about import PACKAGE, PROJECT
from distributed_training.console import visible
from distributed_training.errors import TrainingError, UserError, explain, redact

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
ALSO_IF_IGNORED = STOP_SIGNALS[:3]  # all but SIGHUP, because nohup sets it to be ignored
# The command and the environment of this process, before anything changes them.
COMMAND, ENVIRONMENT = [sys.executable, *sys.orig_argv[1:]], dict(os.environ)
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
IMPORTED = time.monotonic()
# Set by `accelerate launch` for each process that it starts, also without mixed precision.
ACCELERATE = "ACCELERATE_MIXED_PRECISION"
RESTARTED = "DISTRIBUTED_TRAINING_RESTARTED"  # set by distributed_training/ranks/restart.py


def age() -> float:
    """Return the seconds since this process started, also if the clock is set meanwhile."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # see proc(5)
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return time.monotonic() - IMPORTED


class LossyFile(io.FileIO):
    """A stream that drops what it cannot write: a full disk or a closed pipe must not end a run."""

    lost: OSError | None = None  # the error of the first write that failed, or None

    def write(self, data) -> int:
        """Write `data` or its first bytes; return their number, or after an error that of all."""
        try:
            written = super().write(data)
        except OSError as error:
            self.lost, written = self.lost or error, None
        return len(data) if written is None else written  # None: a full pipe that does not block


class RedactedText(io.TextIOWrapper):
    """A text stream that replaces secrets by ***."""

    def write(self, text: str) -> int:
        """Write a text without its secrets; return the length of the text."""
        super().write(redact(text))
        return len(text)


def protect_output() -> None:
    """Replace sys.stdout and sys.stderr by streams without secrets that ignore errors.

    A standard stream that is closed is replaced by the null device.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed (`>&-`): the next file of the run would get its number
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:  # closed (`<&-`), as by programs that start daemons
        sys.stdin = open(os.devnull)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()
        # errors="replace": a terminal without UTF-8 must not end the run either.
        encoding = getattr(stream, "encoding", None) or "utf-8"
        lossy = io.BufferedWriter(LossyFile(number, "w", closefd=False))
        wrapped = RedactedText(lossy, encoding, errors="replace", line_buffering=True)
        setattr(sys, name, wrapped)
        setattr(sys, f"__{name}__", wrapped)


def check_output() -> None:
    """Check that everything printed so far was written, for a program whose result is its output.

    Raises:
        TrainingError: a write to stdout failed, and not because the reader closed the pipe, as
            `| head` does.
    """
    sys.stdout.flush()
    lost = sys.stdout.buffer.raw.lost  # type: ignore[union-attr]
    if lost is not None and not isinstance(lost, BrokenPipeError):
        raise TrainingError(f"Standard output cannot be written: {lost.strerror}.")


def catch_signals(
    numbers: Iterable[int] = (), stopped: Callable[[str], UserError] | None = None
) -> None:
    """Install handlers that end the process with one line, until the program has its own.

    Args:
        numbers: signals to handle even if the parent process set them to be ignored, as a shell
            does with SIGINT for `&`.
        stopped: returns what a signal of this name means; None: the program fails.
    """

    def end(number: int, _frame: object) -> NoReturn:
        _end_before_start((stopped or _stopped_program)(signal.Signals(number).name))

    for number in STOP_SIGNALS:
        if number in numbers or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    # Its handler is that of ranks/watchdog.py; until then it must not end the process.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    sys.excepthook = _report_missing_package


def print_traceback(error: BaseException) -> None:
    """Print the traceback of `error` on stderr, without secrets."""
    text = redact("".join(traceback.format_exception(error)))
    print(visible(text), file=sys.stderr, end="", flush=True)


def rank_variable() -> str:
    """Return the rank of this process as its launcher wrote it; "0" without a launcher."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"


def reports_first() -> bool:
    """Return whether this process reports an error of the start without waiting for another one.

    Rank 0 does, because all ranks usually have the same error; and so does a process whose rank is
    invalid, because that error is its own.
    """
    rank, ranks = rank_variable(), os.environ.get("WORLD_SIZE") or ""
    is_valid = rank.isdecimal() and not (ranks.isdecimal() and int(ranks) <= int(rank))
    return rank == "0" or not is_valid


def _stopped_program(name: str) -> UserError:
    return TrainingError(f"Stopped by {name} during the start; nothing was written.")


def _end_before_start(error: UserError) -> NoReturn:
    """Exit at once: no file has been written yet. Only rank 0 prints: all ranks get a signal."""
    if reports_first():
        # os.write and not print: a handler may interrupt a write to the same buffer.
        with contextlib.suppress(OSError):
            os.write(2, f"{error.mark} {error}\n".encode())
    os._exit(error.exit_code)


def _report_missing_package(kind, error: BaseException, trace) -> None:
    """Exit with one line if a package cannot be imported; print any other error as Python does."""
    if not isinstance(error, ModuleNotFoundError):
        sys.__excepthook__(kind, error, trace)
        return
    user_error = explain(error)
    print(f"❌ {user_error}", file=sys.stderr)
    exit_now(user_error.exit_code)


def exit_now(code: int) -> NoReturn:
    """Exit at once, without the interpreter's shutdown, after flushing the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the stream is closed
            stream.flush()
    os._exit(code)


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA, ROCm and the libraries that affect the results."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "peft", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return {name: text for name, text in {**found, "rocm": torch.version.hip}.items() if text}


def code_digest() -> str:
    """Return the first 12 hex digits of the SHA-256 digest of the code of a run.

    It is that of the script, the package and the tools that take part in a run; the same for a
    clone and for what pip has installed.
    """
    hooks, digest = PROJECT / "tools" / "hooks.py", hashlib.sha256()
    files = [PROJECT / "real_model_example.py", *sorted(PACKAGE.rglob("*.py"))]
    files = [file for file in files if PACKAGE / "project" not in file.parents]
    if hooks.exists():
        for tool in sorted({*re.findall(r"from tools\.(\w+) import", hooks.read_text())}):
            files += sorted((PROJECT / "tools" / tool).rglob("*.py"))
        files.append(hooks)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def prefer_own_ninja() -> None:
    """Put the ninja that pip installed next to this interpreter first in PATH, if it exists.

    torch builds C++ ops with ninja, and the environment need not be active.
    """
    import shutil  # not needed before signals are handled

    folder = str(Path(sys.executable).parent)
    if shutil.which("ninja", path=folder) and not os.environ.get("PATH", "").startswith(folder):
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
