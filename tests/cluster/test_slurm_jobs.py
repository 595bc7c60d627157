"""Every file in slurm/ and every generated job runs as it is on a real Slurm."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster_work import WORK, setup, wait_for
from conftest import (
    PROJECT,
    SCRIPT,
    assert_close,
    descendants_of_test,
    finish,
    load_exported,
    start,
)

pytestmark = pytest.mark.slow

ONE_RANK_A_NODE = ["--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1"]


@pytest.fixture
def project(tmp_path):
    """The project in a folder with a space in its name, and another folder to work in."""
    (tmp_path / "my project").symlink_to(PROJECT)
    (tmp_path / "my work").mkdir()
    return tmp_path / "my project"


def submit(file, *args, sbatch=(), cwd, wait=True, env=None):
    """Submit a job; returns its number and, if it is waited for, its exit code. (sbatch --wait
    looks twice a minute.)
    """
    command = [str(part) for part in ("sbatch", "--parsable", *sbatch, file, *args)]
    env = {**os.environ, **(env or {})}
    job = subprocess.check_output(command, cwd=cwd, text=True, env=env).strip()
    if not wait:
        return job, None
    wait_for(lambda: is_over(job), 900, f"job {job} does not end")
    return job, int(re.search(r"ExitCode=(\d+)", state_of(job))[1])


def state_of(job):
    return subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout


def is_over(job):
    ends = "COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL"
    return re.search(f"JobState=({ends})", state_of(job)) is not None


def output_of(cwd, job):
    return "".join(path.read_text() for path in sorted(cwd.glob(f"*-{job}.*")))


def results_of(cwd, job):
    return json.loads((cwd / "runs" / f"train-{job}" / "results.json").read_text())


def losses_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_examples_are_what_the_templates_make():
    from tools.slurm import slurm as jobs

    for name, text in jobs.examples().items():
        assert (PROJECT / "slurm" / name).read_text() == text


# The other two train in the tests below: one is cancelled, the other requeued.
@pytest.mark.parametrize("example", ["train_single_node.slurm", "train_srun.slurm"])
def test_example_on_one_rank_a_node(slurm, alone, project, example):
    """From another folder, with spaces in the paths."""
    work, nodes = project.parent / "my work", 1 if "single" in example else 2
    ranks = ["--gpus-per-node=2", "--cpus-per-task=2"] if nodes == 1 else ONE_RANK_A_NODE
    job, code = submit(project / "slurm" / example, *WORK, sbatch=ranks, cwd=work)
    said = output_of(work, job)
    assert code == 0, said
    hosts = " ".join(["node1", "node2"][:nodes])
    for line in (f"Job ID: {job}", f"Number of nodes: {nodes}", f"({hosts})", "address: node1:"):
        assert line in said, said
    assert re.search(r"GPUs per node: \d .allocated by Slurm", said)
    assert (work / f"train-{job}.out").exists() and (work / f"train-{job}.err").exists()
    results = results_of(work, job)
    assert results["status"] == "completed" and results["world_size"] == 2
    assert_close(losses_of(work / "runs" / f"train-{job}"), alone.losses, 1e-5)


def test_deepspeeds_launcher_and_the_comparison_as_jobs(slurm, project):
    work = project.parent / "my work"
    file, zero1 = project / "slurm" / "train_single_node.slurm", ["--strategy", "zero1"]
    two, env = ["--gpus-per-node=2", "--cpus-per-task=2"], {"LAUNCHER": "deepspeed"}
    job, code = submit(file, *WORK, *zero1, sbatch=two, cwd=work, env=env)
    assert code == 0, output_of(work, job)
    assert results_of(work, job)["launcher"] == "deepspeed"
    short = ["tiny-gpt2", "--max_steps", "4", "--seq_length", "32"]
    env = {"STRATEGIES": "dp", "CONTROL": "0"}
    job, code = submit(project / "slurm" / "compare.slurm", *short, cwd=work, env=env)
    assert code == 0, output_of(work, job)
    assert (work / "comparison_results_tiny-gpt2.md").exists()


def started(work, job):
    return "Epoch 1" in output_of(work, job)


def ranks_that_handle_signals():
    """The ranks of the job that catch SIGUSR1, which kills any other process."""
    found = []
    for rank in descendants_of_test():
        with contextlib.suppress(psutil.Error, OSError, KeyError):
            status = Path(f"/proc/{rank.pid}/status").read_text()
            caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
            if "SLURM_PROCID" in rank.environ() and "srun" not in rank.name():
                found += [rank] if caught >> (signal.SIGUSR1 - 1) & 1 else []
    return found


def test_requeued_job_goes_on_to_the_same_end(slurm, script, project):
    """Warned as Slurm warns before the time limit."""
    work = project.parent / "my work"
    file, long = project / "slurm" / "train_requeue.slurm", ["--epochs", "40", "--max_steps", "100"]
    flags = [*WORK, *long, "--logging_steps", "1"]
    job, _ = submit(file, *flags, sbatch=ONE_RANK_A_NODE, cwd=work, wait=False)
    # Before it trains: while the ranks import torch, and later.
    wait_for(lambda: len(ranks_that_handle_signals()) == 2, 60, "no rank starts")
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait_for(lambda: "requeued (start 1)" in output_of(work, job), 60, "not requeued")
    wait_for(lambda: "Model loaded" in output_of(work, job), 90, "the job does not start")
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait_for(lambda: "requeued (start 2)" in output_of(work, job), 60, "not requeued")
    wait_for(lambda: started(work, job), 90, "the job does not train")
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait_for(lambda: "Resumed from" in output_of(work, job), 90, "the job was not requeued")
    wait_for(lambda: is_over(job), 120, "no end")
    results = results_of(work, job)
    assert results["status"] == "completed" and results["steps"] == 100, output_of(work, job)
    whole = script(*WORK, *long, launcher="torchrun", ranks=2)
    assert losses_of(work / "runs" / f"train-{job}") == whole.losses


def submit_endless(template: Path, work: Path) -> str:
    """Submit a job that trains until it is ended, and wait for its first step; return its number."""
    flags = [*WORK, "--epochs", "4000"]
    job, _ = submit(template, *flags, sbatch=ONE_RANK_A_NODE, cwd=work, wait=False)
    wait_for(lambda: started(work, job), 90, "the job does not train")
    return job


def test_a_rank_that_dies_fails_the_job(slurm, project):
    work = project.parent / "my work"
    job = submit_endless(project / "slurm" / "train_srun.slurm", work)
    ranks = [p for p in descendants_of_test() if p.environ().get("SLURM_PROCID") == "1"]
    next(p for p in ranks if "srun" not in p.name()).kill()
    wait_for(lambda: is_over(job), 60, "the job hangs")
    state = state_of(job)
    assert "JobState=FAILED" in state, state
    assert descendants_of_test() == []


def test_scancel_leaves_a_checkpoint_to_resume(slurm, script, project):
    work = project.parent / "my work"
    job = submit_endless(project / "slurm" / "train_multi_node.slurm", work)
    subprocess.run(["scancel", job], check=True)
    folder = work / "runs" / f"train-{job}"
    results = folder / "results.json"
    wait_for(lambda: '"preempted"' in results.read_text(), 40, output_of(work, job))
    wait_for(lambda: descendants_of_test() == [], 40, "ranks are left")
    steps = json.loads(results.read_text())["steps"]
    flags = [*WORK, "--batch_size", "4", "--max_steps", str(steps + 2), "--resume"]
    run = script(*flags, "--output_dir", folder, folder=folder)
    assert "Resumed from" in run.out and run.results["steps"] == steps + 2


def test_hybrid_sharding_on_two_nodes(slurm, script, alone, tmp_path):
    """Shards inside a node, copies across: the same curve, and a checkpoint and an export with
    everything in it once.
    """
    args = ["--sharding_strategy", "HYBRID_SHARD", "--mixed_precision", "FLOAT32"]
    assert setup("fsdp", *args, "--output", "f.json", cwd=tmp_path)[0] == 0
    work = [argument for argument in WORK if argument != "--no_export"]
    work += ["--strategy", "fsdp", "--fsdp_config", tmp_path / "f.json"]
    work += ["--batch_size", "1", "--save_every", "5"]
    tasks = ["--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
    process = start(
        ["srun", *tasks, sys.executable, SCRIPT, *work, "--output_dir", tmp_path / "out"]
    )
    out, err = finish(process, 120)
    assert process.returncode == 0, out + err
    assert_close(losses_of(tmp_path / "out"), alone.losses, 1e-5)
    load_exported(tmp_path / "out" / "hf")
    resumed = script(
        *WORK, "--batch_size", "4", "--resume", tmp_path / "out" / "checkpoints" / "step-00000005"
    )
    assert_close(resumed.losses, alone.losses[5:], 1e-5)


def test_generated_job_runs(slurm, alone, run_file):
    flags = ["--config", "config.yaml", "--num_gpus_per_node", "1"]
    flags += ["--num_nodes", "2", "--use_deepspeed", "--requeue"]
    code, out = setup("slurm", *flags, cwd=run_file)
    assert code == 0, out
    job, code = submit("scripts/slurm_job.sh", cwd=run_file)
    assert code == 0, output_of(run_file, job)
    assert_close(losses_of(run_file / "runs" / f"train-{job}"), alone.losses, 1e-5)
