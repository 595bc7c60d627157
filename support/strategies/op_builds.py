"""Compile DeepSpeed's C++ ops in parallel.

An op is compiled in a temporary folder, and its library is moved when it is complete. A process
that is killed therefore leaves nothing that another one would wait for or load.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from support import patches
from support.cluster import tuning
from support.errors import look_up
from support.files import atomic
from support.strategies import ops, requirements
from support.units import GB

POLL_SECONDS = 0.2
PROGRESS_SECONDS = 15  # between two lines about ops that are still being compiled
COMPILER_GB = 2.5  # the most that one compiler used, with gcc 12 and torch 2.13


def build_ops(names: list[str], print_line: Callable[[str], None], verbose: bool = False) -> bool:
    """Compile the ops that are missing; print a line when an op is ready, and why one is not.

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
        # After a signal the compilers may still write into it; the next builder removes it then.
        temporary = atomic.TemporaryFolder(folder, ".building-")
        succeeded = _build(missing, temporary.path, print_line, verbose)
        temporary.remove()
        return succeeded


@contextlib.contextmanager
def _only_builder(folder: Path, print_line: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process compiles ops in the folder; report the wait as it lasts.

    On a file system without locks two processes may compile the same op. The last one replaces the
    library of the first one.
    """
    path, next_line = folder / ".lock", time.monotonic()
    while True:
        try:
            file = atomic.lock(path)
            break
        except BlockingIOError:
            if time.monotonic() >= next_line:
                next_line += PROGRESS_SECONDS
                seconds = max(0, time.time() - path.stat().st_mtime)
                print_line(
                    f"⏳ Another process has been compiling DeepSpeed's ops for {seconds:.0f} s: "
                    "waiting for it"
                )
            time.sleep(POLL_SECONDS)
    with file or contextlib.nullcontext():
        os.utime(path)
        yield


def _build(
    missing: list[str], folder: Path, print_line: Callable[[str], None], verbose: bool
) -> bool:
    """Compile ops in parallel processes, as many as there are cores and memory for."""
    print_line(f"⏳ Compiling {', '.join(missing)}: once for this kind of machine")
    os.environ.update(TORCH_EXTENSIONS_DIR=str(folder), DS_ACCELERATOR="cpu")
    tuning.prefer_own_ninja()
    # Imported before the fork, so that the processes need not import it again.
    import deepspeed.ops.op_builder.all_ops  # noqa: F401

    fork = multiprocessing.get_context("fork")
    memory = int(psutil.virtual_memory().available / GB / COMPILER_GB)
    most = max(1, min(tuning.available_cores(), memory))
    started_at, failed = time.monotonic(), []
    waiting = [(op, True) for op in missing]
    running: dict[Any, tuple[str, bool, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                op, as_unit = waiting.pop(0)
                started = fork.Process(target=_compile, args=(op, folder, as_unit, verbose))
                started.start()
                running[started.sentinel] = op, as_unit, started
            done = connection.wait(running, PROGRESS_SECONDS)
            seconds = f"{time.monotonic() - started_at:.0f} s"
            for sentinel in done:
                op, as_unit, process = running.pop(sentinel)
                process.join()
                if process.exitcode == 0:
                    os.replace(folder / op / f"{op}.so", ops.library(op))
                    print_line(f"✅ {op}: compiled in {seconds}")
                elif as_unit:  # in another version two files may define the same name
                    waiting.append((op, False))
                else:
                    failed.append(op)
                    print_line(f"❌ {op}: {_reason(folder / op, process.exitcode)}")
            if not done:
                still = ", ".join(op for op, _, _ in running.values())
                print_line(f"⏳ {seconds}: compiling {still}")
    finally:
        for _, _, process in running.values():  # a signal
            process.terminate()
    return not failed


def _reason(folder: Path, exit_code: int | None) -> str:
    """Return why the process that compiled in a folder failed."""
    with contextlib.suppress(OSError):
        return (folder / "error").read_text()
    return f"its process ended with exit code {exit_code} (was the memory full?)"


def _compile(op: str, folder: Path, as_unit: bool, verbose: bool) -> None:
    """Compile an op in TORCH_EXTENSIONS_DIR, in a forked process.

    Args:
        folder: TORCH_EXTENSIONS_DIR.
        as_unit: compile the slow files as one, see `_compile_as_unit`.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # no Python code: ninja must end its compilers
    ops.end_with_parent()
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    shutil.rmtree(folder / op, ignore_errors=True)
    (folder / op).mkdir()
    run = functools.partial(subprocess.run, preexec_fn=ops.end_with_parent)
    patches.compile_without_loading(_compile_as_unit if as_unit else None, run)
    patches.cache_cpu_info()
    patches.quote_library_path()
    if not verbose:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    try:
        if op == "async_io":
            requirements.check_libaio()
        ALL_OPS[op].jit_load(verbose)  # `load` of async_io would also load pin_memory
    except Exception as error:
        if verbose:
            traceback.print_exc()
        (folder / op / "error").write_text(str(look_up(error) or error))
        sys.exit(1)


def _compile_as_unit(load: Callable, name: str, sources: list[str], **options) -> None:
    """Compile the files of an op that include torch's headers as one file.

    These headers take most of the time: pin_memory's 3 files take 75 s one after the other and 32 s
    as one file, cpu_adam's 2 files 135 s and 72 s (CPU time on a Xeon with avx512, gcc 12).
    """
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / name
    original, copied = sources[0].partition("/csrc/")[0] + "/csrc", folder / "csrc"
    shutil.copytree(original, copied)
    headers = list(copied.rglob("*.h"))
    for header in headers:  # not all of them have include guards
        header.write_text("#pragma once\n" + header.read_text())
    copies = [Path(source.replace(original, str(copied))) for source in sources]
    slow = [source for source in copies if _includes_torch(source, headers)]
    unit = folder / f"{name}_unit.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in slow))
    others = [str(source) for source in copies if source not in slow]
    includes = [path.replace(original, str(copied)) for path in options["extra_include_paths"]]
    load(name, [str(unit), *others], **{**options, "extra_include_paths": includes})


def _includes_torch(file: Path, headers: list[Path]) -> bool:
    """Return whether a file includes torch, itself or through one of DeepSpeed's headers."""
    seen: set[str] = set()
    files = [file]
    while files:
        text = files.pop().read_text()
        if "<torch/" in text:
            return True
        names = set(re.findall(r'#include "(?:.*/)?(.+)"', text)) - seen
        seen |= names
        files += [header for header in headers if header.name in names]
    return False
