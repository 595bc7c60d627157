"""DeepSpeed's ops are compiled once, whatever happens to the process that compiles them.

The compiler is a stub that compiles a trivial module in place of DeepSpeed's sources.
"""

import subprocess
import sys
import time
from pathlib import Path

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

    def run(seconds: int = 0) -> subprocess.Popen:
        compiler = tmp_path / f"compiler{len(processes)}"
        compiler.write_text(COMPILER.format(folder=tmp_path, seconds=seconds))
        compiler.chmod(0o755)
        env = {"TORCH_EXTENSIONS_DIR": tmp_path / "extensions", "CXX": compiler}
        processes.append(start([sys.executable, BUILDER, "offload"], env, cwd=PROJECT))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def calls(folder: Path) -> list[str]:
    """The process ids of the compilers that were started."""
    return (folder / "compiled").read_text().split() if (folder / "compiled").exists() else []


def test_ops_are_compiled_once_also_after_a_compilation_was_killed(builder, tmp_path):
    first = builder(20)
    until = time.monotonic() + 90
    while not calls(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.1)
    first.kill()
    first.communicate(timeout=20)
    out, err = finish(builder(), 120)
    assert "cpu_adam: compiled in" in out, out + err
    [folder] = (tmp_path / "extensions").iterdir()
    assert {path.name for path in folder.iterdir()} == {"cpu_adam.so", ".lock"}
    compiled = calls(tmp_path)
    out, _ = finish(builder(), 60)
    assert "cpu_adam: already compiled" in out and calls(tmp_path) == compiled


def test_a_compiled_op_needs_no_compiler(script, tmp_path):
    """As on the compute nodes of a cluster, after make ops on the login node."""
    ops.build(ops.needed_ops(STRATEGIES["offload"]), print, False)
    env = {
        "PATH": path_without(tmp_path, "c++", "g++", "gcc", "cc", "clang", "ninja"),
        "CXX": "none",
    }
    run = script("--strategy", "offload", "--max_steps", "2", "--no_eval", "--no_export", env=env)
    assert len(run.losses) == 2
