"""Generates scripts in this process and runs them in a real bash, in which srun, torchrun,
deepspeed and scontrol are stubs that record how they are called.

tests/conftest.py loads this module as a plugin, so its fixtures are at hand in every test.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT, Run

from distributed_training.programs import exit_code_of


@pytest.fixture
def generate(tmp_path, monkeypatch, capfd):
    """generate(*args) runs scripts/distributed_setup.py in a folder with a run file, in-process."""
    from tools.slurm.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")  # the program changes it, and the test must restore it
    Path("config.yaml").write_text("batch_size: 2\n")

    def run(*args) -> Run:
        monkeypatch.setattr(sys, "argv", ["scripts/distributed_setup.py", *map(str, args)])
        code = exit_code_of(main) or 0
        out, err = capfd.readouterr()
        return Run(code, out, err, 0, tmp_path)

    return run


LAUNCHER, SLURM = ["launcher", "--config", "config.yaml"], ["slurm", "--config", "config.yaml"]


# Of a Slurm job with 2 nodes that have 2 GPUs and 4 cores each.
JOB = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_JOB_NODELIST": "n[1-2]"},
    **{"SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"},
    **{"SLURM_NTASKS_PER_NODE": "1", "VIRTUAL_ENV": "active"},
}


class Stubs:
    """Programs, first on PATH, that record their arguments, environment and standard input."""

    NAMES = ("srun", "torchrun", "deepspeed", "scontrol", "module", "sleep")

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        for name in self.NAMES:
            self.write(name, "")

    def write(self, name: str, then: str) -> None:
        """A stub that does `then` after it has recorded the call."""
        record = f"printf '%s\\0' \"$@\" > \"$(mktemp '{self.folder}/call.{name}.XXXXXX')\"\n"
        (self.bin / name).write_text(f"#!/bin/bash\n{record}{then}\n")
        (self.bin / name).chmod(0o755)

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call."""
        return [
            path.read_text().split("\0")[:-1] for path in sorted(self.folder.glob(f"call.{name}.*"))
        ]

    def run(self, command: list, cwd: Path, env: dict | None = None) -> Run:
        """Run a command in the environment of JOB; a variable that is None is left out."""
        whole = {**os.environ, **JOB, **(env or {})}
        whole["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env={name: value for name, value in whole.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Run(done.returncode, done.stdout, done.stderr, 0, cwd)


@pytest.fixture
def stubs(tmp_path_factory):
    found = Stubs(tmp_path_factory.mktemp("stubs"))
    example = PROJECT / "slurm" / "train_requeue.slurm"
    found.write(
        "scontrol",
        f"""case "$*" in
        "show job"*) echo "   Command={example} --dataset /elsewhere/x.slurm y" ;;
        "show hostnames"*) printf 'n1\\nn2\\n' ;;
        esac""",
    )
    return found
