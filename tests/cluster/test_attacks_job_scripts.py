"""Attacks on the files in slurm/: what a job is allocated, what a run leaves, names and folders.

They run in a real bash with stubs for srun and scontrol.
"""

import re

import pytest
from conftest import PROJECT

# How a run's folder is named, and the arguments that name it; "run.yaml" has output_dir: from the
# run file.
FOLDERS = {
    "nothing names one": ("runs/train-7", []),
    "the run file": ("from the run file", ["--config", "run.yaml"]),
    "the command line before the run file": ("a$b", ["--config", "run.yaml", "--output_dir=a$b"]),
}


@pytest.fixture
def requeue(stubs, tmp_path):
    """requeue(folder, results, *args) runs slurm/train_requeue.slurm; the ranks leave `results` in
    a folder.
    """
    (tmp_path / "run.yaml").write_text("training:\n  output_dir: from the run file\n")

    def run(folder, results, *args, code=75, env=None):
        stubs.write(
            "srun",
            f"""mkdir -p "$FOLDER"; printf '%s' "$RESULTS" > "$FOLDER/results.json"; exit {code}""",
        )
        env = {"FOLDER": folder, "RESULTS": results, **(env or {})}
        done = stubs.run(
            ["bash", PROJECT / "slurm" / "train_requeue.slurm", *args], cwd=tmp_path, env=env
        )
        assert done.code == code and "Traceback" not in done.err, done.out + done.err
        return ["requeue", "7"] in stubs.calls("scontrol")

    return run


@pytest.mark.attack
@pytest.mark.parametrize("case", FOLDERS)
def test_a_run_that_was_stopped_is_requeued_wherever_it_writes(
    requeue, stubs, tmp_path, monkeypatch, case
):
    from support.cli.parse import parse_arguments

    monkeypatch.chdir(tmp_path)
    folder, args = FOLDERS[case]
    assert requeue(folder, '{\n  "status": "preempted"\n}', *args)
    [call] = stubs.calls("srun")
    given = call[call.index("--output_dir") :]
    assert parse_arguments(given).output_dir == folder


# What a run leaves that must not run again.
NOT_REPEATED = {
    "completed": '{"status": "completed"}',
    "failed": '{"status": "failed"}',
    "words elsewhere": """{"status": "failed", "reason": "x \\"status\\": \\"preempted\\""}""",
    "empty": "",
}


@pytest.mark.attack
@pytest.mark.parametrize("left", NOT_REPEATED)
def test_a_run_that_failed_is_not_requeued(requeue, left):
    assert not requeue("out", NOT_REPEATED[left], "--output_dir=out", code=1)


# What sbatch leaves in the environment, and the ranks on each node, their cores, and the GPUs of
# the step.
ONE_BY_TASK = {"SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "gres:gpu=1"}
ALLOCATIONS = {
    "one of four": ({"SLURM_GPUS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "1"}, 1, 4, 1),
    "by task": (ONE_BY_TASK, 2, 2, 2),
    "by job, with a type": ({"SLURM_GPUS": "a100:4"}, 2, 2, 2),
    "none": ({"SLURM_GPUS_ON_NODE": None, "SLURM_NTASKS_PER_NODE": "2"}, 2, 2, 0),
    "nodes with different cores": ({"SLURM_JOB_CPUS_PER_NODE": "16,2"}, 2, 1, 2),
}


@pytest.mark.attack
@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("example", ["train_multi_node", "train_srun"])
def test_a_job_uses_what_it_was_allocated(stubs, tmp_path, example, allocation):
    env, ranks, cores, gpus = ALLOCATIONS[allocation]
    stubs.write("srun", 'env | grep ^SLURM_ > "$SEEN"')
    job = stubs.run(
        ["bash", PROJECT / "slurm" / f"{example}.slurm"],
        tmp_path,
        {**env, "SEEN": str(tmp_path / "seen")},
    )
    assert job.code == 0, job.err
    assert f"Job 7 on 2 nodes: n[1-2]; on each node {gpus} GPUs" in job.out
    assert f"Ranks: {2 * ranks} ({ranks} on each node); Master: n1:20007" in job.out
    [call] = stubs.calls("srun")
    assert (f"--gres=gpu:{gpus}" in call) == (gpus > 0)
    assert not re.search("GPUS_PER|TRES_PER", (tmp_path / "seen").read_text())
    tasks = (2 * ranks, ranks, cores) if example == "train_srun" else (2, 1, ranks * cores)
    names = ("ntasks", "ntasks-per-node", "cpus-per-task")
    assert {f"--{name}={n}" for name, n in zip(names, tasks, strict=True)} <= set(call)
    assert example == "train_srun" or f"--nproc_per_node={ranks}" in call


REFUSED = {
    "train_multi_node": ({"SLURM_GPUS": "3"}, "3 GPUs cannot be spread evenly over 2 nodes"),
    "train_srun": ({"SLURM_JOB_CPUS_PER_NODE": "1(x2)"}, "2 ranks need 2 cores"),
    "train_single_node": ({}, "one node, and the job has 2"),
    "train_requeue": ({"TRAINING_PROJECT": "/tmp"}, "/tmp is not the project"),
}


@pytest.mark.attack
@pytest.mark.parametrize("example", REFUSED)
def test_a_job_refuses(stubs, tmp_path, example):
    env, says = REFUSED[example]
    job = stubs.run(["bash", PROJECT / "slurm" / f"{example}.slurm"], tmp_path, env)
    assert job.code == 2 and says in job.error and stubs.calls("srun") == []


# What `scontrol show job` prints after Command=, with {file} for the batch script; and the job's
# own variables.
RECORDS = {
    "no arguments": "{file}",
    "arguments with a path": "{file} --dataset /elsewhere/x.slurm y.slurm",
    "the jobs of an array": "{file}\n   Command={file}",
}


@pytest.mark.attack
@pytest.mark.parametrize("record", RECORDS)
def test_the_project_is_found(stubs, tmp_path, record):
    """From any folder, among them one with modules that have the names of Python's."""
    for name in ("json", "os", "yaml", "support"):
        (tmp_path / f"{name}.py").write_text(
            "raise SystemExit('imported from the working folder')\n"
        )
    (tmp_path / "my project").symlink_to(PROJECT)
    example = f"{tmp_path}/my project/slurm/x.slurm"
    (tmp_path / "record").write_text(f"   Command={RECORDS[record]}\n".replace("{file}", example))
    stubs.write(
        "scontrol", f"""[[ $2 == hostnames ]] && printf 'n1\\nn2\\n' || cat '{tmp_path}/record'"""
    )
    job = stubs.run(["bash", PROJECT / "slurm" / "train_requeue.slurm"], tmp_path)
    assert job.code == 0 and "working folder" not in job.err, job.err
    [call] = stubs.calls("srun")
    assert f"{tmp_path}/my project/real_model_example.py" in call
