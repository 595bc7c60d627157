"""Compile DeepSpeed's C++ ops with DeepSpeed's own JIT.

The JIT works in a temporary folder, and an op is moved when it is complete. A process that is
killed therefore leaves neither a lock of torch, for which every later process would wait, nor an
incomplete library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from support import patches
from support.cluster import tuning
from support.errors import look_up
from support.strategies import ops, requirements


def build_ops(names: list[str], print_line: Callable[[str], None], verbose: bool = False) -> bool:
    """Compile the ops that are missing; print a line when an op is ready, and why one is not.

    Call it in a process of its own: the ops are loaded here, and the environment is changed.

    Raises:
        OSError: the folder of the ops cannot be written.
    Returns:
        True if all ops are ready.
    """
    folder = ops.ops_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _only_builder(folder, print_line):
        missing = [op for op in names if not ops.is_compiled(op)]
        for op in names:
            if op not in missing:
                print_line(f"✅ {op}: already compiled")
        if not missing:
            return True
        for left_over in folder.glob(".building-*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as temporary:
            print_line(f"⏳ Compiling {', '.join(missing)}: once for this kind of machine")
            return _build(missing, Path(temporary), print_line, verbose)


@contextlib.contextmanager
def _only_builder(folder: Path, print_line: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process compiles ops in the folder.

    On a file system without locks two processes may compile the same op. The last one replaces the
    library of the first one.
    """
    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_line("⏳ Another process is compiling DeepSpeed's ops: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # no locks
            pass
        yield


def _build(
    missing: list[str], folder: Path, print_line: Callable[[str], None], verbose: bool
) -> bool:
    """Compile ops one after the other in `folder`, and move those that succeeded."""
    os.environ.update(TORCH_EXTENSIONS_DIR=str(folder), DS_ACCELERATOR="cpu")
    tuning.prefer_own_ninja()
    patches.quote_library_path()
    compiled, failed = [], False
    # async_io loads pin_memory, which must therefore stay in the folder until both are compiled.
    for op in missing:
        started_at = time.monotonic()
        try:
            with contextlib.nullcontext() if verbose else _no_output():
                if op == "async_io":
                    requirements.check_libaio()
                from deepspeed.ops.op_builder.all_ops import ALL_OPS

                ALL_OPS[op].load(verbose)
        except Exception as error:  # of the compiler: the caller reports it
            if verbose:
                traceback.print_exc()
            print_line(f"❌ {op}: {look_up(error) or error}")
            failed = True
        else:
            compiled.append(op)
            print_line(f"✅ {op}: compiled in {time.monotonic() - started_at:.0f} s")
    for op in compiled:
        os.replace(folder / op / f"{op}.so", ops.library(op))
    return not failed


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Send what libraries and compilers print to /dev/null."""
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        for number, copy in enumerate(kept, 1):
            os.dup2(copy, number)
            os.close(copy)


def end_compilers_with_this_process() -> None:
    """Install a handler that ends the compilers when a signal ends this process."""

    def end(number: int, _frame) -> None:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
