"""DeepSpeed's ops are compiled once, whatever happens to the process that compiles them.

The compiler is a stub that compiles a trivial module in place of DeepSpeed's sources.
"""

import signal
import sys

import psutil
import pytest
from cluster_work import wait_for
from conftest import PROJECT, finish, path_without, start

from distributed_training.strategies.deepspeed import ops
from distributed_training.strategies.table import STRATEGIES

pytestmark = pytest.mark.slow

MODULE = """
#include <Python.h>
#define NAME2(name) PyInit_##name
#define NAME(name) NAME2(name)
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "op", nullptr, -1, nullptr};
extern "C" PyObject* NAME(TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""
# Writes a line for each file that it compiles. It is slow for the file that "slow" names, and
# rejects our changes of DeepSpeed's command if there is a file "strict".
COMPILER = """#!/bin/bash
if [[ " $* " == *" -c "* ]]; then
    echo $$ >> {folder}/compiled
    [[ -e {folder}/slow && "$*" == *$(< {folder}/slow).cpp* ]] && exec sleep 60
    [[ -e {folder}/strict && " $* " == *" -g0 "* ]] && {{ echo "error: -g0"; exit 1; }}
    exec /usr/bin/c++ "${{@/%*.cpp/{folder}/module.cpp}}" -O0
fi
exec /usr/bin/c++ -Wl,--allow-multiple-definition "$@"
"""


@pytest.fixture
def build(tmp_path):
    """The command that compiles offload's op with the stub, and its environment."""
    (tmp_path / "module.cpp").write_text(MODULE)
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    env = {"TORCH_EXTENSIONS_DIR": tmp_path / "extensions", "CXX": compiler}
    return [sys.executable, PROJECT / "scripts" / "build_ops.py", "offload"], env


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL], ids=lambda stop: stop.name)
def test_a_stopped_compilation_ends_its_compilers_and_is_continued(tmp_path, build, request, stop):
    """ninja compiles two files, one after the other or at once; the second one is slow."""
    command, env = build
    compiled = tmp_path / "compiled"
    (tmp_path / "slow").write_text("cpu_adam_impl")
    # SIGKILL goes to a process that has started the compilation, as a run does.
    run = [sys.executable, "-c", f"import subprocess; subprocess.run({[*map(str, command)]} + "]
    run[-1] += "['--parent', str(__import__('os').getpid())])"
    first = start(run if stop == signal.SIGKILL else command, env)
    request.addfinalizer(first.kill)
    objects = "extensions/*/.building/cpu_adam/cpu_adam.o"
    wait_for(lambda: any(tmp_path.glob(objects)) and len(pids(compiled)) == 2, 90, "not compiled")
    first.send_signal(stop)
    first.wait(timeout=30)
    wait_for(lambda: not any(map(psutil.pid_exists, pids(compiled))), 10, "a compiler runs")
    (tmp_path / "slow").unlink()
    out, err = finish(start(command, env), 120)
    assert "cpu_adam: compiled in" in out, out + err
    assert len(pids(compiled)) == 3  # only the file whose compilation was interrupted
    [folder] = (tmp_path / "extensions").iterdir()
    assert {path.name for path in folder.iterdir()} == {"cpu_adam.so", ".lock"}
    out, _ = finish(start(command, env), 60)
    assert "cpu_adam: already compiled" in out and len(pids(compiled)) == 3


def pids(compiled) -> list[int]:
    """The processes that have compiled a file."""
    return [*map(int, compiled.read_text().split())] if compiled.exists() else []


def test_an_op_is_compiled_with_deepspeeds_own_command_if_ours_fails(tmp_path, build):
    (tmp_path / "strict").touch()
    out, err = finish(start(*build), 120)
    assert "cpu_adam: compiled in" in out, out + err
    [folder] = (tmp_path / "extensions").iterdir()
    assert {path.name for path in folder.iterdir()} == {"cpu_adam.so", ".lock"}


def test_a_compiled_op_needs_no_compiler(script, tmp_path):
    """As on the compute nodes of a cluster, after make ops on the login node."""
    ops.build(STRATEGIES["offload"].needed_ops(), print, False)
    env = {
        "PATH": path_without(tmp_path, "c++", "g++", "gcc", "cc", "clang", "ninja"),
        "CXX": "none",
    }
    run = script("--strategy", "offload", "--max_steps", "2", "--no_eval", "--no_export", env=env)
    assert len(run.losses) == 2
