"""Attacks on jobs of a real Slurm: how they are requested, and what they export."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PROJECT, SCRIPT
from generated_scripts import SLURM

pytestmark = pytest.mark.slow

# How sbatch asks (the files ask for 4 GPUs on each node), and tasks, GPUs and ranks on each node.
REQUESTS = {
    "train_multi_node --gres=gpu:1": "2 tasks, 1 GPUs, 1 ranks",
    "train_multi_node --gpus=8": "2 tasks, 4 GPUs, 4 ranks",
    "train_multi_node --gpus-per-node=2 --ntasks-per-node=2": "2 tasks, 2 GPUs, 2 ranks",
    "train_multi_node --gpus-per-node=0": "2 tasks, 0 GPUs, 2 ranks",
    "train_multi_node --gpus-per-task=4": "2 tasks, 4 GPUs, 4 ranks",
    "train_multi_node --exclusive": "2 tasks, 4 GPUs, 4 ranks",
    "train_srun --gres=gpu:1": "2 tasks, 1 GPUs, 1 ranks",
    "train_srun --gpus-per-task=1": "8 tasks, 4 GPUs, 4 ranks",
    "train_srun --gpus-per-node=0": "8 tasks, 0 GPUs, 4 ranks",
    "train_requeue --gres=gpu:2": "4 tasks, 2 GPUs, 2 ranks",
    "train_single_node --gres=gpu:3": "1 tasks, 3 GPUs, 3 ranks",
    "generated --gres=gpu:1": "2 tasks, 1 GPUs, 1 ranks",
    "generated_requeue --gpus-per-node=3": "6 tasks, 3 GPUs, 3 ranks",
}


@pytest.mark.attack
def test_slurm_gives_a_job_what_it_requested(slurm, generate, tmp_path):
    """torchrun and the script are stubs: what they see is what Slurm gave them."""
    for name, more in [("generated", []), ("generated_requeue", ["--requeue"])]:
        assert (
            generate(
                *SLURM,
                *"--num_nodes 2 --num_gpus_per_node 4 --output".split(),
                f"{name}.slurm",
                *more,
            ).code
            == 0
        )
    (tmp_path / "bin").mkdir()
    say = """ranks=${ranks:-$((SLURM_NTASKS / SLURM_NNODES))}
        echo "$SLURM_NTASKS tasks, ${SLURM_GPUS_ON_NODE:-0} GPUs, $ranks ranks\""""
    stubs = {
        "torchrun": f"""for word; do [[ $word != --nproc_per_node=* ]] || ranks=${{word#*=}}; done; {say}""",
        "python": f"""[[ $1 == -c ]] && exec {sys.executable} "$@"; {say}""",
    }
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": "active",
    }
    jobs = []
    for number, request in enumerate(REQUESTS):
        name, *options = request.split()
        file = (
            tmp_path / f"{name}.slurm"
            if "generated" in name
            else PROJECT / "slurm" / f"{name}.slurm"
        )
        log = tmp_path / f"{number}.log"
        command = [
            "sbatch",
            f"--output={log}",
            f"--error={log}",
            "--open-mode=append",
            *options,
            file,
        ]
        subprocess.run([*map(str, command)], env=env, check=True, capture_output=True)
        jobs.append((request, log))
    until = time.monotonic() + 90
    while queue := subprocess.run(
        ["squeue", "-h"], capture_output=True, text=True
    ).stdout:  # sbatch --wait looks rarely
        assert time.monotonic() < until, queue
        time.sleep(0.1)
    for request, log in jobs:
        lines, wanted = log.read_text().splitlines(), REQUESTS[request]
        ranks = int(wanted.split()[4])
        nodes = 1 if "single" in request else 2
        assert lines.count(wanted) == int(wanted.split()[0]), f"{request}: {lines}"
        assert any(
            line.startswith(f"Ranks: {nodes * ranks} ({ranks} on each node)") for line in lines
        ), lines


def on_two_nodes(*command, **env) -> subprocess.CompletedProcess:
    """Run a command with srun as one task on each of two nodes."""
    srun = ["srun", "--nodes=2", "--ntasks=2", "--cpus-per-task=1", "--gpus-per-node=0"]
    return subprocess.run(
        [*srun, *map(str, command)],
        env={**os.environ, **env},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_launcher_in_each_task_is_not_several_runs(slurm, tmp_path):
    """Otherwise both runs would train, and no message would say so."""
    launcher = Path(sys.executable).parent / "deepspeed"
    done = on_two_nodes(
        launcher, "--num_gpus=1", SCRIPT, "--max_steps", "1", "--output_dir", tmp_path / "out"
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "starts a separate run: use `srun python" in said
    assert "Training Complete" not in said and not (tmp_path / "out").exists()
