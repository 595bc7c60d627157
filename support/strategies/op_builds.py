"""Compile DeepSpeed's C++ ops: one process at a time per op, with no lock left by a killed process.

PyTorch protects a compilation with a file `lock` in the op's folder. If the compiling process is
killed, the file remains, and every later process waits for it without a message. Each compilation
therefore also holds a lock of the kernel (flock on `.building`), which is released when the process
ends. The owner of that lock may remove PyTorch's file.
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

POLL_SECONDS = 0.2
# Age at which a file `lock` counts as abandoned if flock does not work across machines.
UNLOCKED_SECONDS = 900
END_SECONDS = 5  # time for ninja to stop its compilers

# This program replaces itself with ninja (exec). The kernel sends it SIGTERM when this process is
# killed. ninja then stops its compilers, each of which uses about 1 GB of memory.
END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@contextlib.contextmanager
def build_lock(op: str, folder: Path, run_id: str, print0: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `op`; wait until no other process compiles it, and print the reason once.

    Args:
        op: name of the op.
        folder: build folder of the op.
        run_id: the same on all ranks of a run. A rank that waits for another one prints no message.
        print0: prints what this process waits for.
    Raises:
        OSError: the folder is not writable.
    """
    with open(folder / ".building", "a+", encoding="utf-8") as file:
        locked = _wait_for_lock(op, file, run_id, print0)
        # A recorded owner was killed, or compiles on a machine that does not see this lock.
        owner = _owner(file)
        elsewhere = owner is not None and owner["host"] != platform.node()
        _remove_abandoned(op, folder / "lock", locked and not elsewhere, print0)
        if locked:
            owner = {"process": os.getpid(), "host": platform.node(), "run": run_id}
            _write(file, json.dumps(owner))
        try:
            yield
        finally:
            if locked:
                _write(file, "")
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may also have the file open


def _wait_for_lock(op: str, file, run_id: str, print0: Callable[[str], None]) -> bool:
    """Wait for the lock and return True; return False if the file system does not support locks."""
    announced = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            owner = _owner(file)
            if not announced and owner and owner["run"] != run_id:
                announced = True
                print0(
                    f"Waiting until process {owner['process']} on {owner['host']}, "
                    f"of another run, has compiled {op}."
                )
            time.sleep(POLL_SECONDS)
        except OSError:
            return False


def _owner(file) -> dict | None:
    """Return the recorded owner of the lock; None if the record is empty or incomplete."""
    file.seek(0)
    with contextlib.suppress(ValueError, TypeError):
        owner = json.loads(file.read())
        return owner if {"process", "host", "run"} <= set(owner) else None
    return None


def _write(file, text: str) -> None:
    # A full disk is no error here; without the text another host may take the lock for abandoned.
    with contextlib.suppress(OSError):
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()


def _remove_abandoned(op: str, lock: Path, locked: bool, print0: Callable[[str], None]) -> None:
    """Remove PyTorch's file `lock` if its process was killed.

    If a program that does not use our lock is compiling, wait until it has removed the file.
    """
    announced, idle = False, 0
    while lock.exists():
        idle = 0 if _in_use(lock.parent) else idle + 1
        # Between two commands of a compilation no process runs in the folder for a short time.
        if idle * POLL_SECONDS > 1 and (locked or _age(lock) > UNLOCKED_SECONDS):
            lock.unlink(missing_ok=True)
            print0(f"An earlier compilation of {op} was killed: its lock was removed.")
            return
        if not announced and not (locked and idle):
            announced = True
            print0(f"Waiting until another program has compiled {op} (its lock is {lock}).")
        time.sleep(POLL_SECONDS)


def _in_use(folder: Path) -> bool:
    """Return whether a process on this host runs in the folder, as ninja and the compilers do."""
    path = str(folder.resolve())
    return any(process.info["cwd"] == path for process in psutil.process_iter(["cwd"]))


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def run_command(
    command: list[str], *, check: bool = False, **options
) -> subprocess.CompletedProcess:
    """Run a command like subprocess.run, but end it and its children with this process.

    The command has a session of its own: the terminal's Ctrl-C does not reach it, because this
    process handles the signal.
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
    """Terminate a process and all processes that it has started."""
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
