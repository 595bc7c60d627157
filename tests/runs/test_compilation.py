"""DeepSpeed's ops are compiled once, whatever happens to the process that compiles them.

The compiler is a stub that compiles a trivial module in place of DeepSpeed's sources.
"""

import sys

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
# Writes a line for each file that it compiles. It is slow as long as there is a file "slow", and
# rejects our changes of DeepSpeed's command if there is a file "strict".
COMPILER = """#!/bin/bash
if [[ " $* " == *" -c "* ]]; then
    echo $$ >> {folder}/compiled
    [[ -e {folder}/slow ]] && sleep 20
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


def test_ops_are_compiled_once_also_after_a_compilation_was_killed(tmp_path, build, request):
    command, env = build
    compiled = tmp_path / "compiled"
    (tmp_path / "slow").touch()
    first = start(command, env)
    request.addfinalizer(first.kill)
    wait_for(compiled.exists, 90, "nothing is compiled")
    first.kill()
    out, _ = first.communicate(timeout=30)
    assert "cpu_adam" in out  # printed before it is compiled
    (tmp_path / "slow").unlink()
    out, err = finish(start(command, env), 120)
    assert "cpu_adam: compiled in" in out, out + err
    [folder] = (tmp_path / "extensions").iterdir()
    assert {path.name for path in folder.iterdir()} == {"cpu_adam.so", ".lock"}
    before = compiled.read_text()
    out, _ = finish(start(command, env), 60)
    assert "cpu_adam: already compiled" in out and compiled.read_text() == before


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
