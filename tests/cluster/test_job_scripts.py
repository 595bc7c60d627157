"""The files in slurm/ and compare_strategies.sh, in a real bash with stubs for the programs."""

import re

import pytest
from conftest import PROJECT
from generated_scripts import JOB, LAUNCHER, SLURM

from distributed_training.cli.flags import RENAMED

# How a run's folder is named, and the arguments that name it; "run.yaml" has output_dir: from the
# run file.
FOLDERS = {
    "nothing names one": ("runs/train-7", []),
    "the run file": ("from the run file", ["--config", "run.yaml"]),
    "the command line before the run file": ("a$b", ["--config", "run.yaml", "--output_dir=a$b"]),
}


@pytest.fixture
def requeue(stubs, tmp_path):
    """requeue(folder, results, *args, code=) runs slurm/train_requeue.slurm, whose ranks leave
    `results` in a folder (None: what was there) and end; returns whether the job was requeued.
    """
    (tmp_path / "run.yaml").write_text("training:\n  output_dir: from the run file\n")

    def run(folder, results, *args, code=75):
        leave = 'mkdir -p "$FOLDER"; printf "%s" "$RESULTS" > "$FOLDER/results.json"'
        stubs.write("srun", f"{':' if results is None else leave}; exit {code}")
        command = ["bash", PROJECT / "slurm" / "train_requeue.slurm", *args]
        done = stubs.run(command, tmp_path, {"FOLDER": folder, "RESULTS": results})
        assert done.code == code and "Traceback" not in done.err, done.out + done.err
        return ["requeue", "7"] in stubs.calls("scontrol")

    return run


@pytest.mark.parametrize("case", FOLDERS)
def test_a_run_that_was_stopped_is_requeued_wherever_it_writes(requeue, stubs, case):
    folder, args = FOLDERS[case]
    assert requeue(folder, '{\n  "status": "preempted"\n}', *args)
    [call] = stubs.calls("srun")
    assert call[call.index("--output_dir") + 1] == folder


@pytest.mark.parametrize("left", ["", """{"status": "failed", "reason": "\\"preempted\\""}"""])
def test_a_run_that_failed_is_not_requeued(requeue, left):
    assert not requeue("out", left, "--output_dir=out")


@pytest.mark.parametrize("earlier", [None, '{"status": "completed"}', '{"status": "preempted"}'])
def test_until_results_are_written_the_exit_code_tells_whether_the_job_was_stopped(
    requeue, tmp_path, earlier
):
    (tmp_path / "out").mkdir()
    if earlier:
        (tmp_path / "out" / "results.json").write_text(earlier)
    for code in (0, 1, 2, 137):
        assert not requeue("out", None, "--output_dir=out", code=code)
    assert requeue("out", None, "--output_dir=out")


@pytest.mark.parametrize("example", [path.name for path in (PROJECT / "slurm").glob("*.slurm")])
def test_a_batch_script_that_bash_starts_says_so(stubs, tmp_path, example):
    env = {name: None for name in JOB if name.startswith("SLURM_")}
    job = stubs.run(["bash", PROJECT / "slurm" / example], tmp_path, env)
    assert job.code == 2 and "sbatch" in job.error and job.err.count("\n") == 1
    assert not stubs.calls("scontrol")


def test_a_generated_batch_script_that_bash_starts_says_so(generate, stubs, tmp_path):
    env = {name: None for name in JOB if name.startswith("SLURM_")}
    generate(*SLURM, "--output", "job.sh")
    job = stubs.run(["bash", "job.sh"], tmp_path, env)
    assert job.code == 2 and "sbatch job.sh" in job.error and not stubs.calls("srun")


# What sbatch leaves in the environment, and the ranks on each node, their cores, and the GPUs of
# the step.
ALLOCATIONS = {
    "one of four": ({"SLURM_GPUS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "1"}, 1, 4, 1),
    "by job, with a type": ({"SLURM_GPUS": "a100:4"}, 2, 2, 2),
    "none": ({"SLURM_GPUS_ON_NODE": None, "SLURM_NTASKS_PER_NODE": "2"}, 2, 2, 0),
    "nodes with different cores": ({"SLURM_JOB_CPUS_PER_NODE": "16,2"}, 2, 1, 2),
}


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("example", ["train_multi_node", "train_srun"])
def test_a_job_uses_what_it_was_allocated(stubs, tmp_path, example, allocation):
    env, ranks, cores, gpus = ALLOCATIONS[allocation]
    stubs.write("srun", "env | grep ^SLURM_ > seen")
    job = stubs.run(["bash", PROJECT / "slurm" / f"{example}.slurm"], tmp_path, env)
    assert job.code == 0, job.err
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


@pytest.mark.parametrize("example", REFUSED)
def test_a_job_that_cannot_run_as_it_was_submitted_is_refused(stubs, tmp_path, example):
    env, says = REFUSED[example]
    job = stubs.run(["bash", PROJECT / "slurm" / f"{example}.slurm"], tmp_path, env)
    assert job.code == 2 and says in job.error and stubs.calls("srun") == []


def test_the_project_is_found_from_any_folder(stubs, tmp_path):
    """One with a module that has the name of Python's, and one with a space; a job of an array."""
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the working folder')\n")
    (tmp_path / "my project").symlink_to(PROJECT)
    command = f"   Command={tmp_path}/my project/slurm/x.slurm --dataset /elsewhere/x.slurm y.slurm"
    (tmp_path / "record").write_text(f"{command}\n{command}\n")
    stubs.write("scontrol", f"[[ $2 == hostnames ]] && echo n1 || cat '{tmp_path}/record'")
    env = {"SLURM_JOB_CPUS_PER_NODE": "4"}
    job = stubs.run(["bash", PROJECT / "slurm" / "train_requeue.slurm"], tmp_path, env)
    assert job.code == 0 and "working folder" not in job.err, job.err
    [call] = stubs.calls("srun")
    assert f"{tmp_path}/my project/real_model_example.py" in call


# ------------------------------------------------------------------------------------ the comparison


@pytest.fixture
def compare(stubs, tmp_path):
    """compare(*args, env) runs compare_strategies.sh with a stub for Python."""
    stubs.write(
        "python",
        """case "$*" in *hardware*) printf '0\\nfacts\\n' ;; *'(*STRATEGIES)'*) echo dp zero1 offload fsdp ;; *free_port*) echo 1 ;; esac""",
    )

    def run(*args, env=None):
        defaults = {"STRATEGIES": "dp", "CONTROL": "0", "PYTHON": str(stubs.bin / "python")}
        script = PROJECT / "compare_strategies.sh"
        done = stubs.run(["bash", script, *args], tmp_path, defaults | (env or {}))
        assert {path.name for path in tmp_path.iterdir()} <= {"comparison_runs"}
        assert not list(tmp_path.rglob("executed"))
        return done

    return run


@pytest.mark.parametrize("model", ["""a "b" it's $(touch executed)""", "a\ntouch executed", "-x*"])
def test_shell_characters_in_a_model_name_are_passed_literally(compare, stubs, model):
    assert compare(model, f"--dataset={model}").code == 0
    [call] = [call for call in stubs.calls("python") if "torch.distributed.run" in call]
    assert call[call.index("--model") + 1] == model and f"--dataset={model}" in call


@pytest.mark.parametrize("missing, compiled", [("zero1 offload", ["zero1", "offload"]), ("", [])])
def test_strategies_that_need_no_compilation_come_first(tmp_path, stubs, missing, compiled):
    """With all ops compiled in the requested order, and without a compilation."""
    order = tmp_path / "order"
    stubs.write(
        "python",
        f"""case "$*" in
        *hardware*) printf '0\\nfacts\\n' ;; *'(*STRATEGIES)'*) echo dp zero1 offload fsdp ;;
        *free_port*) echo 1 ;;
        *missing_ops*) echo {missing} ;;
        *build_ops.py*|*torch.distributed.run*) echo "$*" >> '{order}' ;;
        esac""",
    )
    asked = ["zero1", "dp", "offload", "fsdp"]
    env = {"STRATEGIES": " ".join(asked), "CONTROL": "0", "PYTHON": str(stubs.bin / "python")}
    done = stubs.run(["bash", PROJECT / "compare_strategies.sh"], tmp_path, env | {"REPEATS": "2"})
    first = [name for name in asked if name not in compiled]
    assert done.code == 0, done.err
    lines = [line.split() for line in order.read_text().splitlines()]
    runs = [line[-1] for line in lines if "--strategy" in line]
    assert runs == [*first, *compiled] * 2
    builds = [at for at, line in enumerate(lines) if "--strategy" not in line]
    assert builds == ([len(first)] if compiled else [])
    assert all(lines[at][-len(compiled) :] == compiled for at in builds)


@pytest.mark.parametrize("default, override", [("--precision fp32", "0"), ("", "")])
def test_fp32_without_tf32_if_it_is_the_default_of_the_comparison(
    tmp_path, stubs, monkeypatch, default, override
):
    stubs.write(
        "python",
        f"""case "$*" in
        *hardware*) printf '0\\nfacts\\n' ;; *'(*STRATEGIES)'*) echo dp zero1 offload fsdp ;;
        *free_port*) echo 1 ;;
        *read_command_line*) echo {default} ;;
        *torch.distributed.run*) echo "${{NVIDIA_TF32_OVERRIDE-}} $*" > '{tmp_path}/run' ;;
        esac""",
    )
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    env = {"STRATEGIES": "dp", "CONTROL": "0", "PYTHON": str(stubs.bin / "python")}
    done = stubs.run(["bash", PROJECT / "compare_strategies.sh"], tmp_path, env)
    assert done.code == 0, done.err
    found, run = (tmp_path / "run").read_text().split(" ", 1)
    assert found == override and ("--precision fp32" in run) == bool(default)
    [command] = tmp_path.rglob("command.txt")  # to repeat the run
    assert command.read_text().startswith("NVIDIA_TF32_OVERRIDE=0 ") == bool(override)


def test_the_comparison_refuses_other_names_of_what_it_sets(compare, stubs):
    names = [name for flag in ("model", "ds_config", "overwrite") for name in RENAMED[flag]]
    for flag in ["--deepspeed=x", "--fsdp", "--prefetch", *(f"--{name}" for name in names)]:
        run = compare("x", flag)
        assert run.code == 2 and flag.partition("=")[0] in run.error


def test_a_setting_of_the_comparison_is_not_executed(compare, stubs):
    for name in ("NUM_GPUS", "REPEATS", "TIMEOUT", "CONTROL", "STRATEGIES"):
        run = compare("x", env={name: "a[$(touch executed)]"})  # bash's arithmetic would
        assert run.code == 2 and name in run.error
        assert not [call for call in stubs.calls("python") if "torch" in " ".join(call)]


@pytest.mark.parametrize("visible, usable", [("2,3", True), ("MIG-8c5a3a4e,MIG-1d2f", False)])
@pytest.mark.parametrize("made", ["slurm/train_single_node.slurm", "a launch script"])
def test_deepspeeds_launcher_gets_the_visible_gpus(
    stubs, tmp_path, generate, made, visible, usable
):
    """It reads each GPU as a number."""
    stubs.write("nvidia-smi", "")
    stubs.write("scontrol", "echo n1")
    script = PROJECT / made
    if made == "a launch script":
        assert generate(*LAUNCHER, "--use_deepspeed").code == 0
        script = "scripts/run_training.sh"
    env = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "4", "LAUNCHER": "deepspeed"}
    env |= {"CUDA_VISIBLE_DEVICES": visible, "TRAINING_PROJECT": str(PROJECT)}
    job = stubs.run(["bash", script], tmp_path, env)
    assert job.code == (0 if usable else 2), job.err
    included = [call[0] for call in stubs.calls("deepspeed")]
    assert included == ([f"--include=localhost:{visible}"] if usable else [])
