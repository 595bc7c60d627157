"""Several machines: every file in slurm/ and every generated file runs as it is, on a real Slurm
and without one.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import (
    PROJECT,
    SCRIPT,
    assert_close,
    descendants_of_test,
    finish,
    load_exported,
    skip,
    start,
)

# Global batch of 4 blocks on two ranks; 10 steps.
WORK = [
    "--seq_length",
    "32",
    "--num_samples",
    "40",
    "--batch_size",
    "2",
    "--dropout",
    "0",
    "--no_eval",
    "--precision",
    "fp32",
    "--no_export",
]
ONE_RANK_A_NODE = ["--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1"]
OFFLOAD_ALL = ["--offload_optimizer", "--offload_param"]
EXAMPLES = [
    "train_single_node.slurm",
    "train_multi_node.slurm",
    "train_srun.slurm",
    "train_requeue.slurm",
]


@pytest.fixture(scope="session")
def alone(script):
    """The same work in one process."""
    return script(*[*WORK, "--batch_size", "4"])


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
    command = ["sbatch", "--parsable", *sbatch, file, *args]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
    )
    job = done.stdout.strip()
    assert job, done.stderr
    if not wait:
        return job, None
    wait_for(lambda: is_over(job), 900, f"job {job} does not end")
    return job, int(re.search(r"ExitCode=(\d+)", state_of(job))[1])


def state_of(job):
    return subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout


def is_over(job):
    return (
        re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)", state_of(job))
        is not None
    )


def output_of(cwd, job):
    return "".join(path.read_text() for path in sorted(cwd.glob(f"*-{job}.*")))


def results_of(cwd, job):
    return json.loads((cwd / "runs" / f"train-{job}" / "results.json").read_text())


def losses_of(cwd, job):
    return [
        json.loads(line)["loss"]
        for line in (cwd / "runs" / f"train-{job}" / "metrics.jsonl").read_text().splitlines()
    ]


def wait_for(condition, seconds, what):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.2)


def test_examples_are_what_the_templates_make():
    from support.cluster import slurm as jobs

    for name, text in jobs.examples().items():
        assert (PROJECT / "slurm" / name).read_text() == text
        assert len(text.splitlines()) < 90


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_on_one_rank_a_node(slurm, alone, project, example):
    """From another folder, with spaces in the paths."""
    work, nodes = project.parent / "my work", 1 if "single" in example else 2
    ranks = ["--gpus-per-node=2", "--cpus-per-task=2"] if nodes == 1 else ONE_RANK_A_NODE
    job, code = submit(project / "slurm" / example, *WORK, sbatch=ranks, cwd=work)
    said = output_of(work, job)
    assert code == 0, said
    assert re.search(rf"Job {job} on {nodes} nodes: node", said) and "Master: node1:" in said
    assert (work / f"train-{job}.out").exists() and (work / f"train-{job}.err").exists()
    results = results_of(work, job)
    assert results["status"] == "completed" and results["world_size"] == 2
    assert_close(losses_of(work, job), alone.losses, 1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("example", [*EXAMPLES, "compare.slurm"])
def test_example_unedited_and_without_arguments(slurm, project, example):
    work = project.parent / "my work"
    job, code = submit(project / "slurm" / example, cwd=work)
    assert code == 0, output_of(work, job)
    if example != "compare.slurm":
        assert results_of(work, job)["world_size"] == (4 if "single" in example else 8)


def test_deepspeeds_launcher_and_the_comparison_as_jobs(slurm, project):
    work = project.parent / "my work"
    job, code = submit(
        project / "slurm" / "train_single_node.slurm",
        *WORK,
        "--strategy",
        "zero1",
        sbatch=["--gpus-per-node=2", "--cpus-per-task=2"],
        cwd=work,
        env={"LAUNCHER": "deepspeed"},
    )
    assert code == 0, output_of(work, job)
    assert results_of(work, job)["launcher"] == "deepspeed"
    job, code = submit(
        project / "slurm" / "compare.slurm",
        "tiny-gpt2",
        "--max_steps",
        "4",
        "--seq_length",
        "32",
        cwd=work,
        env={"STRATEGIES": "dp fsdp", "CONTROL": "0"},
    )
    assert code == 0, output_of(work, job)
    assert (work / "comparison_results_tiny-gpt2.md").exists()


def started(work, job):
    return "Epoch 1" in output_of(work, job)


def test_requeued_job_goes_on_to_the_same_end(slurm, script, project):
    """Warned as Slurm warns before the time limit; see the soak for the limit itself."""
    work = project.parent / "my work"
    job, _ = submit(
        project / "slurm" / "train_requeue.slurm",
        *WORK,
        "--epochs",
        "40",
        "--max_steps",
        "150",
        "--logging_steps",
        "1",
        sbatch=ONE_RANK_A_NODE,
        cwd=work,
        wait=False,
    )
    wait_for(lambda: started(work, job), 90, "the job does not train")
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait_for(lambda: "Resumed from" in output_of(work, job), 90, "the job was not requeued")
    wait_for(lambda: is_over(job), 120, "no end")
    results = results_of(work, job)
    assert results["status"] == "completed" and results["steps"] == 150, output_of(work, job)
    whole = script(*WORK, "--epochs", "40", "--max_steps", "150", launcher="torchrun", ranks=2)
    assert losses_of(work, job) == whole.losses


@pytest.mark.soak
def test_time_limit_is_survived(slurm, script, project):
    """A run of some minutes in jobs of one: Slurm warns 30 s before the limit, and the turns add up
    to the whole run.
    """
    work = project.parent / "my work"
    long = ["--epochs", "4000", "--max_steps", "2000", "--logging_steps", "50"]
    job, _ = submit(
        project / "slurm" / "train_requeue.slurm",
        *WORK,
        *long,
        sbatch=[*ONE_RANK_A_NODE, "--time=1", "--signal=USR1@30"],
        cwd=work,
        wait=False,
    )
    wait_for(lambda: is_over(job), 1200, "the job does not end")
    said = output_of(work, job)
    assert "JobState=COMPLETED" in state_of(job) and "Resumed from" in said, said
    assert results_of(work, job)["steps"] == 2000
    whole = script(*WORK, *long, launcher="torchrun", ranks=2, timeout=900)
    assert losses_of(work, job) == whole.losses


def test_a_rank_that_dies_fails_the_job(slurm, project):
    work = project.parent / "my work"
    job, _ = submit(
        project / "slurm" / "train_srun.slurm",
        *WORK,
        "--epochs",
        "4000",
        sbatch=ONE_RANK_A_NODE,
        cwd=work,
        wait=False,
    )
    wait_for(lambda: started(work, job), 90, "the job does not train")
    victim = next(
        p
        for p in descendants_of_test()
        if p.environ().get("SLURM_PROCID") == "1" and "srun" not in p.name()
    )
    victim.kill()
    wait_for(lambda: is_over(job), 60, "the job hangs")
    state = state_of(job)
    assert "JobState=FAILED" in state, state
    assert descendants_of_test() == []


def test_a_turn_that_fails_is_not_repeated(slurm, script, project):
    """The results of the turn before say "preempted" still when this one ends before it trains."""
    work = project.parent / "my work"
    before = {"status": "preempted"}
    (work / "out").mkdir()
    (work / "out" / "results.json").write_text(json.dumps(before, indent=2))
    args = [*WORK, "--batch_size", "0", "--output_dir", "out"]
    job, code = submit(
        project / "slurm" / "train_requeue.slurm", *args, sbatch=ONE_RANK_A_NODE, cwd=work
    )
    assert (
        code != 0
        and "--batch_size" in output_of(work, job)
        and "requeued" not in output_of(work, job)
    )


def test_scancel_leaves_a_checkpoint_to_resume(slurm, script, project):
    work = project.parent / "my work"
    job, _ = submit(
        project / "slurm" / "train_multi_node.slurm",
        *WORK,
        "--epochs",
        "4000",
        sbatch=ONE_RANK_A_NODE,
        cwd=work,
        wait=False,
    )
    wait_for(lambda: started(work, job), 90, "the job does not train")
    subprocess.run(["scancel", job], check=True)
    folder = work / "runs" / f"train-{job}"
    wait_for(
        lambda: '"preempted"' in (folder / "results.json").read_text(), 40, output_of(work, job)
    )
    wait_for(lambda: descendants_of_test() == [], 40, "ranks are left")
    steps = json.loads((folder / "results.json").read_text())["steps"]
    run = script(
        *WORK,
        "--batch_size",
        "4",
        "--max_steps",
        str(steps + 2),
        "--resume",
        "--output_dir",
        folder,
        folder=folder,
    )
    assert "Resumed from" in run.out and run.results["steps"] == steps + 2


# ------------------------------------------------------------------------------------ the generator


def setup(*args, cwd):
    """Run scripts/distributed_setup.py; returns exit code and output."""
    command = [sys.executable, PROJECT / "scripts" / "distributed_setup.py", *map(str, args)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def run_file(tmp_path):
    """A folder with a config.yaml of the guide's shape."""
    lines = [
        "training:",
        "  seq_length: 32",
        "  num_samples: 40",
        "  batch_size: 2",
        "  dropout: 0",
        "  eval: false",
        "  mixed_precision: no",
        "  no_export: true",
        "  learning_rate: 5e-4",
        "distributed:",
        "  use_deepspeed: true",
        "  strategy: zero1",
    ]
    (tmp_path / "config.yaml").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "args, strategy",
    [
        (["--zero_stage", "2", "--offload_optimizer", "--bf16"], "offload"),
        (["--zero_stage", "3"], "zero3"),
        (
            ["--zero_stage", "3", *OFFLOAD_ALL, "--nvme_path", "NVME", "--model", "tiny-gpt2"],
            "infinity",
        ),
    ],
)
def test_deepspeed_file_is_valid_and_trains(script, tmp_path, args, strategy):
    args = [str(tmp_path) if arg == "NVME" else arg for arg in args]
    code, out = setup("deepspeed", *args, "--output", "config/ds_config.json", cwd=tmp_path)
    assert code == 0, out
    precision = [] if "--bf16" in args else ["--precision", "fp32"]
    run = script(
        "--ds_config",
        tmp_path / "config" / "ds_config.json",
        "--seq_length",
        "32",
        "--max_steps",
        "2",
        "--no_eval",
        "--no_export",
        "--batch_size",
        "2",
        *precision,
    )
    assert run.results["strategy"] == strategy and run.results["batch_size"] == 2
    assert run.results["precision"] == ("bf16" if "--bf16" in args else "fp32")


@pytest.mark.parametrize(
    "strategy, said",
    [("SHARD_GRAD_OP", ""), ("HYBRID_SHARD", "FULL_SHARD"), ("NO_SHARD", "--strategy dp")],
)
def test_fsdp_file_trains_the_same_model(script, alone, tmp_path, strategy, said):
    code, out = setup(
        "fsdp",
        "--sharding_strategy",
        strategy,
        "--mixed_precision",
        "FLOAT32",
        "--output",
        "f.json",
        cwd=tmp_path,
    )
    assert code == 0, out
    run = script(
        *WORK,
        "--strategy",
        "fsdp",
        "--fsdp_config",
        tmp_path / "f.json",
        launcher="torchrun",
        ranks=2,
    )
    assert said in run.out
    assert_close(run.losses, alone.losses, 1e-5)


def test_every_key_of_accelerates_fsdp_file_is_answered(script, alone, tmp_path):
    (tmp_path / "f.json").write_text(
        json.dumps(
            {
                "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_state_dict_type": "FULL_STATE_DICT",
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_backward_prefetch_policy": "BACKWARD_POST",
                "fsdp_forward_prefetch": True,
                "fsdp_use_orig_params": False,
                "fsdp_sync_module_states": True,
                "fsdp_cpu_ram_efficient_loading": False,
                "fsdp_cuda_graphs": True,
                "fsdp_mixed_precision": "NO",
                "fsdp_offload_params": True,
            }
        )
    )
    work = [arg for arg in WORK if arg not in ("--precision", "fp32")]
    run = script(
        *work,
        "--strategy",
        "fsdp",
        "--fsdp_config",
        tmp_path / "f.json",
        launcher="torchrun",
        ranks=2,
    )
    for key in (
        "state_dict_type",
        "backward_prefetch_policy",
        "use_orig_params",
        "cpu_ram_efficient_loading",
        "cuda_graphs",
    ):
        assert len([line for line in run.out.splitlines() if f"fsdp_{key}" in line]) == 1, key
    assert "no layer of class LlamaDecoderLayer" in run.out and "GPT2Block" in run.out
    assert_close(run.losses, alone.losses, 1e-5)
    (tmp_path / "f.json").write_text('{"fsdp_sharding_strateg": "FULL_SHARD"}')
    refused = script("--strategy", "fsdp", "--fsdp_config", tmp_path / "f.json", ok=False)
    assert refused.code == 2 and "did you mean fsdp_sharding_strategy" in refused.error


def test_launcher_scripts_run(script, alone, run_file):
    for args, launcher in [(["--use_deepspeed"], "deepspeed"), ([], "torchrun")]:
        code, out = setup(
            "launcher",
            "--config",
            "config.yaml",
            "--num_gpus_per_node",
            "2",
            *args,
            "--force",
            cwd=run_file,
        )
        assert code == 0, out
        process = start(
            ["bash", run_file / "scripts" / "run_training.sh", "--output_dir", run_file / launcher],
            cwd=run_file,
        )
        _, err = finish(process, 120)
        assert process.returncode == 0, err
        results = json.loads((run_file / launcher / "results.json").read_text())
        assert (
            results["launcher"] == launcher
            and results["world_size"] == 2
            and results["strategy"] == "zero1"
        )


def test_hybrid_sharding_on_two_nodes(slurm, script, alone, tmp_path):
    """Shards inside a node, copies across: the same curve, and a checkpoint and an export with
    everything in it once.
    """
    args = [
        "--sharding_strategy",
        "HYBRID_SHARD",
        "--mixed_precision",
        "FLOAT32",
        "--output",
        "f.json",
    ]
    assert setup("fsdp", *args, cwd=tmp_path)[0] == 0
    work = [argument for argument in WORK if argument != "--no_export"]
    work += [
        "--batch_size",
        "1",
        "--strategy",
        "fsdp",
        "--fsdp_config",
        tmp_path / "f.json",
        "--save_every",
        "5",
    ]
    tasks = ["--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
    process = start(
        ["srun", *tasks, sys.executable, SCRIPT, *work, "--output_dir", tmp_path / "out"]
    )
    out, err = finish(process, 120)
    assert process.returncode == 0, out + err
    found = [
        json.loads(line)["loss"]
        for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert_close(found, alone.losses, 1e-5)
    load_exported(tmp_path / "out" / "hf")
    resumed = script(
        *WORK, "--batch_size", "4", "--resume", tmp_path / "out" / "checkpoints" / "step-00000005"
    )
    assert_close(resumed.losses, alone.losses[5:], 1e-5)


@pytest.fixture
def ssh(machines, tmp_path):
    """An sshd on the first two machines that takes a key made for it; returns the command that
    reaches them.
    """
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None:
        skip("needs sshd: apt install openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True
        )
    keys = [f"HostKey={tmp_path}/host", f"AuthorizedKeysFile={tmp_path}/user.pub", "StrictModes=no"]
    options = ["Port=2222", *keys, "UsePAM=no", "PermitRootLogin=yes", "PidFile=none"]
    daemons = [
        start(
            machines.on(
                name, sshd, "-D", "-e", "-f", "/dev/null", *(f"-o{option}" for option in options)
            )
        )
        for name in machines.names[:2]
    ]
    yield (
        f"ssh -p 2222 -i {tmp_path}/user -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
        "-o LogLevel=ERROR -o ConnectTimeout=10"
    )
    for daemon in daemons:
        daemon.terminate()
        daemon.communicate()


def test_one_script_starts_all_hosts_over_ssh(machines, ssh, alone, run_file):
    (run_file / "hosts.txt").write_text("node1 slots=1\n# a comment\nnode2\n")
    with open(run_file / "config.yaml", "a") as file:
        file.write(f"cache_dir: {run_file}/cache\n")
    code, out = setup(
        "launcher",
        "--config",
        "config.yaml",
        "--num_gpus_per_node",
        "1",
        "--hosts",
        "hosts.txt",
        cwd=run_file,
    )
    assert code == 0, out
    command = [
        "env",
        f"SSH={ssh}",
        "bash",
        "-c",
        f"cd {run_file} && bash scripts/run_training.sh --output_dir {run_file}/out",
    ]
    process = start(machines.on("node3", *command), env={"HF_TOKEN": "hf_CANARYcanaryCANARYcanary"})
    reached(process, "node1: Epoch 1")
    everywhere = [
        p.info for p in psutil.process_iter(["cmdline", "environ"])
    ]  # of all machines, and of ssh between them
    assert not any("hf_CANARY" in word for info in everywhere for word in info["cmdline"] or [])
    ranks = [
        info["environ"]
        for info in everywhere
        if SCRIPT.name in " ".join(info["cmdline"] or []) and info["environ"]
    ]
    assert (
        sum(
            environ.get("RANK") is not None and environ.get("HF_TOKEN") is not None
            for environ in ranks
        )
        == 2
    )
    out, err = finish(process, 120)
    assert process.returncode == 0, out + err
    found = [
        json.loads(line)["loss"]
        for line in (run_file / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert_close(found, alone.losses, 1e-5)
    assert json.loads((run_file / "out" / "results.json").read_text())["world_size"] == 2


def test_ssh_script_ends_all_hosts(machines, ssh, run_file):
    """When one host cannot be reached, and at Ctrl-C; then with a checkpoint."""
    with open(run_file / "config.yaml", "a") as file:
        file.write(f"cache_dir: {run_file}/cache\nepochs: 4000\nmax_steps: 40000\n")
    for hosts, said in [("node1\nnode3\n", "node3: ssh"), ("node1\nnode2\n", "Stopped")]:
        (run_file / "hosts.txt").write_text(hosts)
        code, out = setup(
            "launcher",
            "--config",
            "config.yaml",
            "--num_gpus_per_node",
            "1",
            "--hosts",
            "hosts.txt",
            "--force",
            cwd=run_file,
        )
        assert code == 0, out
        begin = f"cd {run_file} && exec bash scripts/run_training.sh --output_dir {run_file}/out"
        process = start(machines.on("node3", "env", f"SSH={ssh}", "bash", "-c", begin))
        if said == "Stopped":
            reached(process, "Epoch 1")
            os.killpg(process.pid, signal.SIGINT)
        out, err = finish(process, 60)
        assert process.returncode == (130 if said == "Stopped" else 255), out + err
        assert said == "Stopped" or said in out + err
        wait_for(lambda: descendants_of_test() == [], 40, "ranks are left")
    results = json.loads((run_file / "out" / "results.json").read_text())
    assert results["status"] == "preempted" and list(
        (run_file / "out" / "checkpoints").glob("step-*")
    ), results


@pytest.mark.parametrize(
    "args, nodes",
    [
        (["--num_nodes", "2", "--use_deepspeed", "--requeue"], 2),
        (["--use_deepspeed", "--time_limit", "00:10:00", "--partition", "debug"], 1),
    ],
)
def test_generated_job_runs(slurm, alone, run_file, args, nodes):
    code, out = setup(
        "slurm",
        "--config",
        "config.yaml",
        "--num_gpus_per_node",
        str(2 // nodes),
        *args,
        cwd=run_file,
    )
    assert code == 0, out
    job, code = submit("scripts/slurm_job.sh", cwd=run_file)
    assert code == 0, output_of(run_file, job)
    assert_close(losses_of(run_file, job), alone.losses, 1e-5)


@pytest.mark.parametrize(
    "args, said",
    [
        (["deepspeed", "--bf16", "--fp16"], "--bf16 and --fp16"),
        (["deepspeed", "--zero_stage", "2", "--offload_param"], "--zero_stage 3"),
        (["deepspeed", "--zero_stag", "2"], "--zero_stag"),
        (["launcher", "--config", "nothing.yaml"], "no such file"),
        (["launcher", "--config", "config.yaml", "--num_nodes", "2"], "--master_addr"),
        (["slurm", "--config", "config.yaml", "--time_limit", "soon"], "HH:MM:SS"),
        (["fsdp", "--sharding_strategy", "HALF_SHARD"], "FULL_SHARD"),
    ],
)
def test_generator_refuses(run_file, args, said):
    code, out = setup(*args, cwd=run_file)
    assert code == 2 and said in out


# ------------------------------------------------------------------------------------- the run file


def test_run_file(script, run_file, tmp_path):
    zeros = ["--seed", "0", "--max_grad_norm", "0", "--weight_decay", "0"]
    given = ["--lr", "2e-3", *zeros, "--report_to", "tensorboard"]
    shown = script("--config", run_file / "config.yaml", *given, "--print_config").out
    assert all(
        f"\n{zero}: 0" in shown for zero in ("seed", "max_grad_norm", "weight_decay", "dropout")
    )
    assert (
        "strategy: zero1" in shown and "lr: 0.002" in shown and "precision: fp32" in shown
    )  # the command line wins
    (tmp_path / "again.yaml").write_text(
        "\n".join(line for line in shown.splitlines() if not line.startswith("output_dir"))
    )
    again = script("--config", tmp_path / "again.yaml", "--print_config").out
    assert [line for line in again.splitlines() if "output_dir" not in line] == (
        tmp_path / "again.yaml"
    ).read_text().splitlines()


@pytest.mark.parametrize(
    "text, said",
    [
        ("lerning_rate: 1", "did you mean learning_rate"),
        ("training:\n  batch_size: many", "--batch_size"),
        ("training: 3", "section"),
        ("lr: 1\ntraining:\n  learning_rate: 2", "twice"),
        ("use_deepspeed: true\nuse_fsdp: true", "both"),
        ("use_deepspeed: true", "deepspeed_config"),
        ("a: [", "line"),
        ("compile: 3", "compile"),
    ],
)
def test_run_file_that_is_wrong(script, tmp_path, text, said):
    (tmp_path / "run.yaml").write_text(text)
    run = script("--config", tmp_path / "run.yaml", ok=False)
    assert run.code == 2 and said in run.error


# --------------------------------------------------------------------------- machines without Slurm


def on_each(machines, *args, nnodes="3", names=None, programs=None, rdzv_id=None):
    """Start torchrun on each machine, as a user does in three terminals; returns the processes by
    name.
    """
    torchrun = [
        Path(sys.executable).parent / "torchrun",
        f"--nnodes={nnodes}",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=node1:29500",
        f"--rdzv_id={rdzv_id or time.time()}",
    ]
    if (
        ":" in nnodes
        # with a store that torchrun's agents share a machine that is added waits for ever (torch 2.13)
    ):
        torchrun = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *torchrun]
        torchrun += ["--max_restarts=3", "--rdzv_conf=last_call_timeout=5"]
    programs = programs or {}
    return {
        name: start(machines.on(name, *torchrun, programs.get(name, SCRIPT), *args))
        for name in names or machines.names
    }


def ends(processes, timeout):
    """Wait for all; returns {name: (exit code, everything it printed)}."""
    until, said = time.monotonic() + timeout, {}
    for name, process in processes.items():
        out, err = finish(process, max(1, until - time.monotonic()))
        said[name] = (process.returncode, out + err)
    return said


def errors(said):
    return [line for _, text in said.values() for line in text.splitlines() if "❌" in line]


def reached(process, text):
    while line := process.stdout.readline():
        if text in line:
            return
    pytest.fail(process.stderr.read())


def kill_machine(name, only_ranks=False):
    """Everything that trains there at once, as when the power goes; or the rank and not its
    launcher.
    """
    for process in psutil.process_iter(["environ", "cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        mine = (process.info["environ"] or {}).get("HF_HOME") == os.environ["HF_HOME"]
        spared = "nsenter" in command or (only_ranks and "torchrun" in command)
        if mine and SCRIPT.name in command and not spared and host_of(process) == name:
            process.kill()


def host_of(process):
    try:
        done = subprocess.run(
            ["nsenter", f"--target={process.pid}", "--uts", "hostname"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return done.stdout.strip()


def test_a_machine_that_is_lost_ends_the_others(machines, tmp_path):
    processes = on_each(machines, *WORK, "--epochs", "4000", "--output_dir", tmp_path)
    reached(processes["node1"], "Epoch 1")
    kill_machine("node3")
    said = ends(processes, 60)
    assert all(code != 0 for code, _ in said.values())
    assert any(
        "Rank 2 ended without reporting an error" in line or "onnection" in line
        for line in errors(said)
    ), said
    assert descendants_of_test() == []


def test_an_elastic_run_outlives_a_machine(machines, tmp_path):
    work = [
        *WORK,
        "--max_steps",
        "120",
        "--epochs",
        "100",
        "--save_every",
        "5",
        "--resume",
        "--resume_force",
        "--output_dir",
        tmp_path,
    ]
    processes = on_each(machines, *work, "--logging_steps", "1", nnodes="1:3")
    reached(processes["node1"], "checkpoints/step-00000010")
    kill_machine("node3")
    said = ends({name: processes[name] for name in ("node1", "node2")}, 150)
    finish(processes["node3"], 30)
    assert "Resumed from" in said["node1"][1] + said["node2"][1], said
    results = json.loads((tmp_path / "results.json").read_text())
    assert (
        results["status"] == "completed" and results["world_size"] == 2 and results["steps"] == 120
    )
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 121))


@pytest.mark.soak
def test_a_cable_that_is_pulled_ends_the_others(machines, tmp_path):
    """Nothing closes the connections: only silence tells."""
    processes = on_each(machines, *WORK, "--epochs", "4000", "--output_dir", tmp_path)
    reached(processes["node1"], "Epoch 1")
    machines.enter("node3", "ip", "link", "set", "eth0", "down")
    try:
        said = ends({name: processes[name] for name in ("node1", "node2")}, 90)
    finally:
        kill_machine("node3")
        finish(processes["node3"], 30)
        machines.enter("node3", "ip", "link", "set", "eth0", "up")
    assert all(code != 0 for code, _ in said.values())
    assert any("Rank 2 ended without reporting an error" in line for line in errors(said)), said


@pytest.mark.soak
def test_an_elastic_run_takes_a_machine_in_and_outlives_a_rank(machines, tmp_path):
    """Two machines, then three; then one of the three ranks dies, and its launcher starts it again."""
    work = [
        *WORK,
        "--max_steps",
        "70",
        "--epochs",
        "100",
        "--save_every",
        "10",
        "--keep_last",
        "2",
        "--resume",
        "--resume_force",
        "--output_dir",
        tmp_path,
        "--logging_steps",
        "1",
    ]
    rdzv_id = str(time.time())
    processes = on_each(machines, *work, nnodes="1:3", names=["node1", "node2"], rdzv_id=rdzv_id)
    reached(processes["node1"], "checkpoints/step-00000010")
    processes |= on_each(machines, *work, nnodes="1:3", names=["node3"], rdzv_id=rdzv_id)
    reached(processes["node1"], "World Size: 3")
    reached(processes["node1"], "checkpoints/step-")
    kill_machine("node2", only_ranks=True)
    reached(processes["node1"], "Resumed from")
    said = ends(processes, 150)
    assert all(code == 0 for code, _ in said.values()), said
    results = json.loads((tmp_path / "results.json").read_text())
    assert (
        results["status"] == "completed" and results["world_size"] == 3 and results["steps"] == 70
    )
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 71))


def test_a_machine_that_differs_is_named(machines, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(
        PROJECT / "support", other / "support", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(SCRIPT, other)
    with open(other / "support" / "data" / "batches.py", "a") as file:
        file.write("# another version\n")
    said = ends(
        on_each(
            machines,
            *WORK,
            "--output_dir",
            tmp_path / "out",
            programs={"node3": other / SCRIPT.name},
        ),
        60,
    )
    [line] = errors(said)
    assert "node3" in line and "script" in line


def test_a_rank_that_never_comes_is_named(machines, tmp_path):
    processes = {}
    for rank, name in enumerate(machines.names[:2]):
        env = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "WORLD_SIZE": 3,
            "MASTER_ADDR": "node1",
            "MASTER_PORT": 29600,
        }
        work = [*WORK, "--ddp_timeout", "8", "--output_dir", tmp_path]
        processes[name] = start(machines.on(name, sys.executable, SCRIPT, *work), env=env)
    said = ends(processes, 40)
    [line] = errors(said)
    assert (
        "rank 2" in line and "node1, node2" in line and all(code == 1 for code, _ in said.values())
    )
