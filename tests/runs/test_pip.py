"""pip installs the package and commands that run the project's programs: from a clone, a wheel, an
sdist.
"""

import json
import subprocess
import sys
import sysconfig
import venv

import pytest
from conftest import finish, free_port, start
from project_copy import copy_project

pytestmark = pytest.mark.slow


BUILD_SDIST = "import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])"
# A program of the user: it reads the runs "one" and "two".
PROGRAM = """
from distributed_training import PROJECT, STRATEGIES, compare_runs, open_model, plan, read_run
assert "site-packages" in str(PROJECT) or (PROJECT / "pyproject.toml").is_file(), PROJECT
print([plan("gpt2", name, gpus=4, gpu_memory=16).fits for name in STRATEGIES])
print(len(read_run("one").steps), compare_runs("one", "two").same_model)
model, tokenizer = open_model("one")
print(model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=2).shape[0])
"""


@pytest.fixture(scope="module", params=["editable", "wheel", "sdist"])
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
    pip = [sys.executable, "-m", "pip", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    if request.param == "editable":
        what = ["-e", project]
    elif request.param == "wheel":
        subprocess.run([*pip, "wheel", *options, "-w", folder, project], check=True)
        what = [*folder.glob("*.whl")]
    else:
        command = [sys.executable, "-c", BUILD_SDIST, folder]
        subprocess.run(command, cwd=project, check=True, stdout=subprocess.DEVNULL)
        what = [*folder.glob("*.tar.gz")]
    if request.param != "editable":
        project.rename(folder / "moved")  # nothing is read from it
    subprocess.run([*pip, "--python", python, "install", *options, *what], check=True)
    if request.param != "editable":
        assert len(list(site.glob("distributed_training/**/*.py"))) > 200
        assert not list(site.glob("distributed_training/project/tools/benchmarks"))
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


def test_an_empty_folder_is_enough(commands, tmp_path):
    """The project's files are found next to the package, and not in the current folder."""
    run = ["--max_steps", "2", "--num_samples", "8", "--seq_length", "32", "--precision", "fp32"]
    installed = commands.parent.parent.name.startswith(("wheel", "sdist"))
    for name in ("one", "two"):
        train = [commands / "distributed-training", *run, "--output_dir", name]
        out = output_of(train, tmp_path)
        assert ("curves: report-run" in out) == installed  # what exists here
    usage = output_of([commands / "compare-runs", "--help"], tmp_path)
    assert f"usage: {'compare-runs' if installed else 'compare_runs.py'} " in usage
    assert ("python scripts/compare_runs.py" in usage) != installed
    assert "agree" in output_of([commands / "compare-runs", "one", "two"], tmp_path)
    output_of([commands / "report-run", "one"], tmp_path)
    assert (tmp_path / "one" / "report.html").is_file()
    out = output_of([commands / "python", "-c", PROGRAM], tmp_path)
    assert out.splitlines() == [str([True] * 7), "2 True", "1"]
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


def test_a_launcher_starts_the_command(commands, tmp_path):
    """On two ranks, with a strategy that reads a file of the project."""
    launcher = [commands / "python", "-m", "torch.distributed.run", "--no-python"]
    launcher += ["--nproc_per_node=2", f"--master_port={free_port()}"]
    run = ["--strategy", "zero2", "--max_steps", "2", "--num_samples", "8", "--seq_length", "32"]
    run += ["--no_eval", "--output_dir", "two"]
    output_of([*launcher, commands / "distributed-training", *run], tmp_path)
    results = json.loads((tmp_path / "two" / "results.json").read_text())
    assert (results["status"], results["world_size"]) == ("completed", 2)
