"""The package without the tools, and the tools without one of them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT, finish, start
from project_copy import copy_project

TOOLS = sorted(path.parent.name for path in PROJECT.glob("tools/*/__init__.py"))
IMPORT_ALL = """
import importlib, pkgutil, sys
import distributed_training

for module in pkgutil.walk_packages(distributed_training.__path__, "distributed_training."):
    importlib.import_module(module.name)
assert not [name for name in sys.modules if name.partition(".")[0] == "tools"]
print(distributed_training.PACKAGE)
print(len([name for name in sys.modules if name.startswith("distributed_training.")]))
"""
# Flags of tools that take part in a run.
FLAGS = {
    "balance": ["--rank_shares auto"],
    "check": ["--check", "--prefetch", "--show_sample 1"],
    "choose": ["--strategy auto"],
    "prove": ["--prove"],
    "replay": ["--replay 2"],
}
ONE_STEP = """
    --max_steps 1 --num_samples 4 --batch_size 1 --seq_length 32 --no_eval --no_export
    --precision fp32
    """.split()


def test_every_module_of_the_package_can_be_imported_without_the_tools(tmp_path):
    shutil.copytree(
        PROJECT / "distributed_training",
        tmp_path / "distributed_training",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    process = start([sys.executable, "-c", IMPORT_ALL], {"PYTHONPATH": ""}, cwd=tmp_path)
    out, err = finish(process, 120)
    assert process.returncode == 0, err
    folder, count = out.splitlines()[-2:]
    assert Path(folder) == tmp_path / "distributed_training" and int(count) > 150


@pytest.fixture
def copy_without(tmp_path):
    """copy_without(tool) copies the project without a tool and its unit tests."""

    def make(tool: str) -> Path:
        copy = copy_project(tmp_path / "project")
        for folder in ("tools", "tests/unit/tools"):
            shutil.rmtree(copy / folder / tool, ignore_errors=True)
        assert not (copy / "tools" / tool).exists()
        # Some tests list the files that git does not ignore.
        subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
        return copy

    return make


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_without_a_tool_a_run_trains_and_the_other_tools_work(copy_without, tool):
    copy, out = copy_without(tool), "runs/one"
    env = {"PYTHONPATH": ""}
    run = [sys.executable, "real_model_example.py", *ONE_STEP, "--output_dir", out]
    process = start(run, env, cwd=copy)
    _, err = finish(process, 120)
    assert process.returncode == 0 and (copy / out / "results.json").is_file(), err
    for flags in FLAGS.get(tool, ()):  # they are refused before anything is written
        process = start([*run[:2], *flags.split(), "--output_dir", "runs/two"], env, cwd=copy)
        _, err = finish(process, 60)
        assert process.returncode == 2 and err.count("\n") == 1 and flags.split()[0] in err, err
        assert not (copy / "runs/two").exists()
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak"]
    process = start([*tests, "tests/unit/tools"], env, cwd=copy)
    said, err = finish(process, 300)
    assert process.returncode == 0, said + err
