"""pip installs commands that run the project's programs, with and without -e."""

import json
import subprocess
import sys
import sysconfig
import venv

import pytest
from conftest import finish, free_port, start
from project_copy import copy_project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["editable", "copied"])
def commands(request, tmp_path_factory):
    """The folder with the commands of an environment into which the project was installed.

    The other packages are those of the tests' environment.
    """
    folder = tmp_path_factory.mktemp(request.param)
    project = copy_project(folder / "project")
    environment = folder / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "tests.pth").write_text(sysconfig.get_paths()["purelib"])
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    options = ["--no-deps", "--no-build-isolation", *(["-e"] * (request.param == "editable"))]
    subprocess.run([*command, *options, project], check=True)
    if request.param == "copied":
        assert len(list(site.glob("distributed_training/support/**/*.py"))) > 50
        project.rename(folder / "moved")  # nothing is read from it
    return environment / "bin"


def output_of(command, folder) -> str:
    """What a command prints, in a folder outside the project."""
    process = start(command, cwd=folder)
    out, err = finish(process, 120)
    assert process.returncode == 0, err
    return out


def test_commands_run_the_programs(commands, tmp_path):
    assert "zero3" in output_of([commands / "plan-memory", "--gpu_memory", "16"], tmp_path)
    compare = output_of([commands / "compare-strategies", "--help"], tmp_path)
    assert "STRATEGIES=" in compare


def test_a_launcher_starts_the_command(commands, tmp_path):
    """On two ranks, with a strategy that reads a file of the project."""
    launcher = [commands / "python", "-m", "torch.distributed.run", "--no-python"]
    launcher += ["--nproc_per_node=2", f"--master_port={free_port()}"]
    run = ["--strategy", "zero2", "--max_steps", "2", "--num_samples", "8", "--seq_length", "32"]
    run += ["--no_eval", "--output_dir", "two"]
    output_of([*launcher, commands / "distributed-training", *run], tmp_path)
    results = json.loads((tmp_path / "two" / "results.json").read_text())
    assert (results["status"], results["world_size"]) == ("completed", 2)
