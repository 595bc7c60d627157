"""Compiling DeepSpeed's C++ ops: one process at a time for each op, and nothing stays behind when
it is killed.

PyTorch protects a compilation with a file, `lock` in the op's folder, which stays there when the
compiling process is killed, and then everyone waits for it without a message. So each compilation
holds a lock of the kernel, too (flock on `.building`), which ends with its process. Whoever has
that lock may remove PyTorch's file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from torch.utils import cpp_extension

POLL_SECONDS = 0.2
UNLOCKED_SECONDS = (
    900  # where the lock says nothing about other machines: age of a file `lock` that is nobody's
)
END_SECONDS = 5  # for ninja to end its compilers

# Started instead of ninja, which it becomes: the kernel ends it (SIGTERM) when this process is
# killed. ninja then ends its compilers, each of which takes about 1 GB.
END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def guard_compilations(run_id: str, say: Callable[[str], None]) -> None:
    """Make every later compilation of an op in this process hold the op's lock; DeepSpeed compiles
    where it needs an op.

    Args:
        run_id: the same on all ranks of a run; no message says that one of them waits for another.
        say: prints what this process waits for.
    """
    load = cpp_extension.load

    def locked_load(name, *args, build_directory=None, **options):
        folder = Path(build_directory or cpp_extension._get_build_directory(name, False))
        with build_lock(name, folder, run_id, say):
            return load(name, *args, build_directory=str(folder), **options)

    cpp_extension.load = locked_load
    cpp_extension.subprocess = _Subprocess()


@contextlib.contextmanager
def build_lock(op: str, folder: Path, run_id: str, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until nobody else compiles `op`, and keep others out; print once what it waits for."""
    with open(folder / ".building", "a+", encoding="utf-8") as file:
        locked = _wait_for_lock(op, file, run_id, say)
        owner = _owner(
            file
        )  # that was killed; or compiles on a machine to which this file system passes no locks on
        elsewhere = owner is not None and owner["host"] != platform.node()
        _remove_abandoned(op, folder / "lock", locked and not elsewhere, say)
        if locked:
            owner = {"process": os.getpid(), "host": platform.node(), "run": run_id}
            _write(file, json.dumps(owner))
        try:
            yield
        finally:
            if locked:
                _write(file, "")
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may have the file open, too


def _wait_for_lock(op: str, file, run_id: str, say: Callable[[str], None]) -> bool:
    """False where the file system has no locks."""
    said = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            owner = _owner(file)
            if not said and owner and owner["run"] != run_id:
                said = True
                say(
                    f"Waiting until process {owner['process']} on {owner['host']}, of another run, has compiled {op}."
                )
            time.sleep(POLL_SECONDS)
        except OSError:
            return False


def _owner(file) -> dict | None:
    """Who holds the lock; None while that is being written."""
    file.seek(0)
    with contextlib.suppress(ValueError, TypeError):
        owner = json.loads(file.read())
        return owner if {"process", "host", "run"} <= set(owner) else None
    return None


def _write(file, text: str) -> None:
    with contextlib.suppress(
        OSError
    ):  # a full disk: the lock counts, and the text is for a message only
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()


def _remove_abandoned(op: str, lock: Path, locked: bool, say: Callable[[str], None]) -> None:
    """Remove PyTorch's file of a process that was killed; wait for one of a program that does not
    use our lock.
    """
    said, idle = False, 0
    while lock.exists():
        idle = 0 if _in_use(lock.parent) else idle + 1
        if idle * POLL_SECONDS > 1 and (
            locked or _age(lock) > UNLOCKED_SECONDS
        ):  # between two commands nobody uses it
            lock.unlink(missing_ok=True)
            say(f"An earlier compilation of {op} was killed: its lock is removed.")
            return
        if not said and not (locked and idle):
            said = True
            say(f"Waiting until another program has compiled {op} (its lock is {lock}).")
        time.sleep(POLL_SECONDS)


def _in_use(folder: Path) -> bool:
    """Whether a process on this host runs in the folder: ninja and the compilers do."""
    place = str(folder.resolve())
    return any(process.info["cwd"] == place for process in psutil.process_iter(["cwd"]))


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


class _Subprocess:
    """Stands for the module `subprocess` in cpp_extension: what it runs ends when this process
    does.
    """

    def __getattr__(self, name: str):
        return getattr(subprocess, name)

    @staticmethod
    def run(command: list[str], *, check: bool = False, **options) -> subprocess.CompletedProcess:
        """As subprocess.run; the terminal's Ctrl-C does not reach the command, because this process
        handles it.
        """
        wrapped = [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), *command]
        process = subprocess.Popen(wrapped, start_new_session=True, **options)
        try:
            out, err = process.communicate()
        except BaseException:  # a signal
            end_tree(process)
            raise
        if check and process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, out, err)
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_tree(process: subprocess.Popen) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
