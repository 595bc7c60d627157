"""Attacks on the compilation of C++ ops: killed, stopped, at the same time. A trivial op stands for
DeepSpeed's.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from conftest import PROJECT, finish, start

OP = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "op", nullptr, -1, nullptr};
extern "C" PyObject* PyInit_op() { return PyModule_Create(&module); }
"""
# Everything but the op itself goes to the real compiler.
COMPILER = """#!/bin/bash
case "$*" in *op.cpp*-o*|*-c*op.cpp*) echo $$ >> {pids}; sleep {seconds};; esac
exec /usr/bin/c++ "$@"
"""
BUILD = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
from torch.utils import cpp_extension
from functools import partial
from support import patches
from support.strategies import op_builds
print0 = partial(print, flush=True)
lock = partial(op_builds.build_lock, run_id=sys.argv[1], print0=print0)
patches.guard_compilations(lock, op_builds.run_command)
cpp_extension.load("op", [sys.argv[2]])
print("loaded")
"""


@pytest.fixture
def build(tmp_path):
    """build(run, seconds) starts a process that compiles the op, with a compiler that takes so
    long.
    """
    (tmp_path / "op.cpp").write_text(OP)
    processes = []

    def run(name: str, seconds: int) -> subprocess.Popen:
        compiler = tmp_path / f"compiler{len(processes)}"
        compiler.write_text(COMPILER.format(pids=tmp_path / "pids", seconds=seconds))
        compiler.chmod(0o755)
        env = {"TORCH_EXTENSIONS_DIR": tmp_path / "extensions", "CXX": compiler}
        processes.append(
            start([sys.executable, "-c", BUILD, name, tmp_path / "op.cpp"], env, cwd=PROJECT)
        )
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def compilers(tmp_path, seconds: float = 60) -> list[psutil.Process]:
    """The compilers that run, once there is one."""
    until = time.monotonic() + seconds
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(0.2)
    return [
        psutil.Process(int(pid))
        for pid in (tmp_path / "pids").read_text().split()
        if psutil.pid_exists(int(pid))
    ]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, marks=pytest.mark.soak),
    ],
)
def test_killed_compilation_leaves_no_compiler_and_no_lock(build, tmp_path, number):
    first = build("first run", 1000)
    running = compilers(tmp_path)
    running += [child for process in running for child in process.children(recursive=True)]
    assert running
    first.send_signal(number)
    first.communicate(timeout=20)
    _, alive = psutil.wait_procs(running, 10)
    assert alive == []
    out, err = finish(build("second run", 0), 60)
    assert "loaded" in out, err
    assert not (tmp_path / "extensions" / "op" / "lock").exists()


@pytest.mark.soak
def test_second_run_says_what_it_waits_for(build, tmp_path):
    first = build("first run", 15)
    compilers(tmp_path)
    out, err = finish(build("second run", 0), 90)
    assert out.count("Waiting") == 1 and f"process {first.pid} on" in out, out + err
    assert "loaded" in out
    assert "loaded" in first.communicate(timeout=20)[0]


# ----------------------------------------------------------------------------------- the lock alone


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """lock(run) takes and releases the lock of a folder, and returns what was said."""
    from support.strategies import op_builds

    monkeypatch.setattr(op_builds, "POLL_SECONDS", 0.05)

    def take(run="mine") -> list[str]:
        said = []
        with op_builds.build_lock("op", tmp_path, run, said.append):
            assert not (tmp_path / "lock").exists()
            assert json.loads((tmp_path / ".building").read_text())["process"] == os.getpid()
        return said

    return take


def in_background(take, *args) -> tuple[threading.Thread, list]:
    said = []
    thread = threading.Thread(target=lambda: said.extend(take(*args)), daemon=True)
    thread.start()
    return thread, said


def test_a_free_lock_is_taken_silently(lock):
    assert lock() == lock() == []


@pytest.mark.parametrize("age", [0, 10_000])
def test_the_file_of_a_killed_compilation_is_removed(lock, tmp_path, age):
    (tmp_path / "lock").touch()
    os.utime(tmp_path / "lock", (time.time() - age,) * 2)
    [said] = lock()
    assert "removed" in said


def test_the_file_of_a_live_compilation_stays_however_old_it_is(lock, tmp_path):
    (tmp_path / "lock").touch()
    os.utime(tmp_path / "lock", (0, 0))
    ninja = subprocess.Popen(
        ["sleep", "1000"], cwd=tmp_path
    )  # of a program that does not know our lock
    try:
        thread, said = in_background(lock)
        thread.join(2)
        assert thread.is_alive() and (tmp_path / "lock").exists()
        (tmp_path / "lock").unlink()
        thread.join(10)
        assert not thread.is_alive() and len(said) == 1 and "Waiting" in said[0]
    finally:
        ninja.kill()
        ninja.wait()


def test_a_young_file_of_another_machine_is_respected(lock, tmp_path, monkeypatch):
    """Some file systems do not pass locks on between machines."""
    from support.strategies import op_builds

    monkeypatch.setattr(op_builds, "UNLOCKED_SECONDS", 2)
    (tmp_path / "lock").touch()
    (tmp_path / ".building").write_text(
        json.dumps({"process": 1, "host": "there", "run": "another"})
    )
    started = time.monotonic()
    said = lock()
    assert time.monotonic() - started > 1.5
    assert len(said) == 2 and "Waiting" in said[0] and "removed" in said[1]


@pytest.mark.parametrize("run, messages", [("mine", 0), ("another", 1)])
def test_a_lock_that_is_held_is_waited_for(lock, tmp_path, run, messages):
    with open(tmp_path / ".building", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(json.dumps({"process": 123, "host": "there", "run": run}))
        other.flush()
        thread, said = in_background(lock)
        thread.join(1)
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()
    assert len(said) == messages and all("123" in line and "there" in line for line in said)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"process": 1}', "\0\xff"])
def test_a_damaged_owner_is_no_problem(lock, tmp_path, text):
    (tmp_path / ".building").write_text(text)
    assert lock() == []


def test_without_locks_a_young_file_is_respected(lock, tmp_path, monkeypatch):
    from support.strategies import op_builds

    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(op_builds.fcntl, "flock", no_locks)
    monkeypatch.setattr(op_builds, "UNLOCKED_SECONDS", 2)
    (tmp_path / "lock").touch()
    said, started = [], time.monotonic()
    with op_builds.build_lock("op", tmp_path, "mine", said.append):
        assert time.monotonic() - started > 1.5
    assert len(said) == 2 and "Waiting" in said[0] and "removed" in said[1]
