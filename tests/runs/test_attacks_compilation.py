"""DeepSpeed's ops are compiled once, whatever happens to the process that compiles them.

The compiler is a stub that compiles a trivial module in place of DeepSpeed's sources.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import PROJECT, finish, path_without, start

from support.strategies import ops
from support.tables import STRATEGIES

pytestmark = pytest.mark.slow

MODULE = """
#include <Python.h>
#define NAME2(name) PyInit_##name
#define NAME(name) NAME2(name)
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "op", nullptr, -1, nullptr};
extern "C" PyObject* NAME(TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""
# Writes its process id for each file that it compiles.
COMPILER = """#!/bin/bash
case " $* " in
    *" -c "*) echo $$ >> {folder}/compiled
        sleep {seconds}
        for argument in "$@"; do
            case "$argument" in *.cpp) arguments+=({folder}/module.cpp) ;; *) arguments+=("$argument") ;; esac
        done
        exec /usr/bin/c++ "${{arguments[@]}}" -O0 ;;
    *) exec /usr/bin/c++ -Wl,--allow-multiple-definition "$@" ;;
esac
"""
BUILDER = PROJECT / "scripts" / "build_ops.py"


@pytest.fixture
def builder(tmp_path):
    """builder(seconds) starts scripts/build_ops.py for offload, with a compiler that takes so
    long.
    """
    (tmp_path / "module.cpp").write_text(MODULE)
    processes = []

    def run(seconds: int = 0, command=(sys.executable, BUILDER, "offload")) -> subprocess.Popen:
        compiler = tmp_path / f"compiler{len(processes)}"
        compiler.write_text(COMPILER.format(folder=tmp_path, seconds=seconds))
        compiler.chmod(0o755)
        env = {"TORCH_EXTENSIONS_DIR": tmp_path / "extensions", "CXX": compiler}
        processes.append(start(list(command), env, cwd=PROJECT))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def calls(folder: Path) -> list[str]:
    """The process ids of the compilers that were started."""
    return (folder / "compiled").read_text().split() if (folder / "compiled").exists() else []


def running_compilers(folder: Path) -> list[psutil.Process]:
    """The compilers that run, and what they have started, once there are some."""
    until = time.monotonic() + 90
    while not calls(folder):
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(0.2)
    running = [psutil.Process(int(pid)) for pid in calls(folder) if psutil.pid_exists(int(pid))]
    assert running
    return running + [child for process in running for child in process.children(recursive=True)]


def test_nothing_is_compiled_twice(builder, tmp_path):
    """Neither by a second call, nor in a second environment with the same versions."""
    out, err = finish(builder(), 120)
    assert "cpu_adam: compiled in" in out, out + err
    compiled = calls(tmp_path)
    out, _ = finish(builder(), 60)
    assert "cpu_adam: already compiled" in out

    # A second environment: another interpreter, and packages at another path.
    other, environment = tmp_path / "other", Path(sys.prefix)
    (other / "bin").mkdir(parents=True)
    (other / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (other / "lib").symlink_to(environment / "lib")
    if (environment / "pyvenv.cfg").exists():
        (other / "pyvenv.cfg").write_text((environment / "pyvenv.cfg").read_text())
    out, err = finish(builder(command=(other / "bin" / "python", BUILDER, "offload")), 60)
    assert "cpu_adam: already compiled" in out, out + err
    assert calls(tmp_path) == compiled


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)]
)
def test_ended_compilation_leaves_no_compiler(builder, tmp_path, number):
    first = builder(1000)
    running = running_compilers(tmp_path)
    first.send_signal(number)
    first.communicate(timeout=20)
    _, alive = psutil.wait_procs(running, 10)
    assert alive == []


def test_killed_compilation_leaves_no_lock(builder, tmp_path):
    first = builder(20)
    running_compilers(tmp_path)
    first.kill()
    first.communicate(timeout=20)
    out, err = finish(builder(), 120)
    assert "cpu_adam: compiled in" in out, out + err
    [folder] = (tmp_path / "extensions").iterdir()
    assert {path.name for path in folder.iterdir()} == {"cpu_adam.so", ".lock"}


@pytest.mark.soak
def test_second_builder_waits_for_the_first(builder, tmp_path):
    first = builder(15)
    running_compilers(tmp_path)
    out, err = finish(builder(), 90)
    assert "waiting" in out and "already compiled" in out, out + err
    assert "compiled in" in first.communicate(timeout=20)[0]
    assert len(calls(tmp_path)) == len(set(calls(tmp_path)))


def test_a_compiled_op_needs_no_compiler(script, tmp_path):
    """As on the compute nodes of a cluster, after make ops on the login node."""
    ops.build(ops.needed_ops(STRATEGIES["offload"]), print, False)
    env = {
        "PATH": path_without(tmp_path, "c++", "g++", "gcc", "cc", "clang", "ninja"),
        "CXX": "none",
    }
    run = script("--strategy", "offload", "--max_steps", "2", "--no_eval", "--no_export", env=env)
    assert len(run.losses) == 2
