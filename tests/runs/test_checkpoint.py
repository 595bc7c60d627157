"""A run that was stopped and resumed is the run that never stopped, and nothing that happens to a
save can lose one.
"""

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest
from conftest import (
    FAULT,
    PROJECT,
    SCRIPT,
    STRATEGIES,
    check_schema,
    descendants_of_test,
    finish,
    launcher_command,
    load_exported,
    skip,
    start,
)

# Global batches of 8 blocks: an epoch has 5 steps, the last one short. Dropout on.
WORK = (
    "--dropout 0.1 --seq_length 32 --num_samples 37 --batch_size 2 --epochs 2 --eval_samples 9 "
    "--lr_scheduler cosine --warmup_steps 3"
).split()
ON_TWO = [*WORK, "--gradient_accumulation_steps", "2"]
ON_ONE = [*WORK, "--gradient_accumulation_steps", "4", "--precision", "fp32"]
PARAMETERS = 4_339_200


def history(folder, after=0):
    """What metrics.jsonl says of each step and evaluation, without the clock."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("seconds", "tokens_per_second")
    records = [{k: v for k, v in record.items() if k not in clock} for record in records]
    return [r for r in records if r["step"] > after or (r["step"] == after and "eval_loss" in r)]


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def under(tmp_path_factory):
    """under(strategy): its flags; infinity with small sub-groups, so that each rank swaps several
    of them.
    """
    config = json.loads((PROJECT / "ds_config_infinity.json").read_text())
    config["zero_optimization"]["sub_group_size"] = 700_000
    path = tmp_path_factory.mktemp("config") / "infinity.json"
    path.write_text(json.dumps(config))
    return lambda strategy: [
        "--strategy",
        strategy,
        *(["--ds_config", path] if strategy == "infinity" else []),
    ]


@pytest.fixture(scope="module")
def uninterrupted(script, under):
    """uninterrupted(strategy): two ranks, bf16, a checkpoint every 2 steps; each strategy runs
    once.
    """
    done = {}

    def run(strategy):
        if strategy not in done:
            done[strategy] = script(
                *ON_TWO,
                "--precision",
                "bf16",
                *under(strategy),
                "--save_every",
                "2",
                launcher="torchrun",
                ranks=2,
            )
        return done[strategy]

    return run


@pytest.fixture(scope="module")
def alone(script):
    """One process, dp, fp32, a checkpoint every 3 steps and at the end of each epoch."""
    return script(*ON_ONE, "--save_every", "3", "--save_epochs")


@pytest.fixture
def copy(alone, tmp_path):
    """A copy of that run's folder, to break."""
    return shutil.copytree(alone.folder, tmp_path / "copy")


# zero2 stands for zero1 and offload, and infinity for zero3, whose states lie alike;
# test_any_strategy.py resumes from all.
IN_SOAK = [
    pytest.param(strategy, marks=pytest.mark.soak) for strategy in ("zero1", "zero3", "offload")
]


@pytest.mark.parametrize("strategy", ["dp", "zero2", "infinity", "fsdp", *IN_SOAK])
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(script, uninterrupted, under, strategy):
    whole = uninterrupted(strategy)
    assert checkpoints(whole.folder) == [
        "latest",
        *(f"step-{step:08d}" for step in (2, 4, 6, 8, 10)),
    ]
    resumed = script(
        *ON_TWO,
        "--precision",
        "bf16",
        *under(strategy),
        "--resume",
        whole.folder / "checkpoints" / "step-00000002",
        launcher="torchrun",
        ranks=2,
    )
    assert history(resumed.folder) == history(whole.folder, after=2)
    for key in ("steps", "samples", "tokens", "train_loss_first", "train_loss_last", "eval_loss"):
        assert resumed.results[key] == whole.results[key], key


def test_from_any_step_in_fp32(script, alone, copy):
    """In the middle and at the end of an epoch (whose evaluation is still to come), and after a
    checkpoint to come back to.
    """
    assert checkpoints(copy) == ["latest", *(f"step-{step:08d}" for step in (3, 5, 6, 9, 10))]
    for step in (5, 9):
        for later in [
            path for path in (copy / "checkpoints").glob("step-*") if int(path.name[5:]) > step
        ]:
            shutil.rmtree(later)
        script(*ON_ONE, "--resume", "--output_dir", copy, folder=copy)
        assert history(copy) == history(alone.folder)
        shutil.copytree(alone.folder / "checkpoints", copy / "checkpoints", dirs_exist_ok=True)


@pytest.mark.parametrize("strategy", ["dp", "zero2", "infinity", "fsdp", *IN_SOAK])
def test_each_rank_writes_what_it_holds_and_only_data(uninterrupted, strategy):
    folder = uninterrupted(strategy).folder / "checkpoints" / "step-00000002"
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert all(name.endswith((".safetensors", ".json", ".txt")) for name in files)
    by_rank = [
        sum(size for name, size in files.items() if name.startswith(f"rank-0000{rank}"))
        for rank in (0, 1)
    ]
    assert sum(by_rank) == pytest.approx(12 * PARAMETERS, rel=0.01)  # fp32 weight and two moments
    assert by_rank[0] == pytest.approx(by_rank[1], rel=0.02)


def test_a_signal_to_one_rank_saves_and_resume_goes_on(script, uninterrupted, tmp_path):
    work = [
        *ON_TWO,
        "--precision",
        "bf16",
        "--strategy",
        "zero2",
        "--output_dir",
        tmp_path,
        "--logging_steps",
        "1",
    ]
    process = start([*launcher_command("torchrun", 2), SCRIPT, *work])
    while "Epoch 1 | Batch 1/" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    ranks = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if str(SCRIPT) in child.cmdline()
    ]
    next(child for child in ranks if child.environ()["RANK"] == "1").send_signal(signal.SIGUSR1)
    finish(process, 40)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["status"] == "preempted" and 2 <= results["steps"] < 10
    assert checkpoints(tmp_path) == ["latest", f"step-{results['steps']:08d}"]
    assert descendants_of_test() == []
    script(*work, "--resume", launcher="torchrun", ranks=2, folder=tmp_path)
    assert history(tmp_path) == history(uninterrupted("zero2").folder)


@pytest.mark.parametrize(
    "launcher, strategy",
    [
        ("deepspeed", "zero1"),
        ("accelerate", "dp"),
        pytest.param(
            "srun", "fsdp", marks=pytest.mark.soak
        ),  # test_slurm_jobs.py cancels and requeues jobs
    ],
)
def test_a_signal_to_the_launcher(request, tmp_path, launcher, strategy):
    """To its process group, as a terminal sends it; under Slurm to the job's steps, as scancel and
    time limits do.
    """
    if launcher == "srun":
        request.getfixturevalue("slurm")
    process = start(
        [
            *launcher_command(launcher, 2),
            SCRIPT,
            *ON_TWO,
            "--epochs",
            "50",
            "--strategy",
            strategy,
            "--output_dir",
            tmp_path,
        ]
    )
    while "Epoch 1" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    if launcher == "srun":
        [job] = subprocess.run(
            ["squeue", "-h", "-o", "%i"], capture_output=True, text=True, check=True
        ).stdout.split()
        subprocess.run(["scancel", "--signal=USR1", job], check=True)
    else:
        os.killpg(process.pid, signal.SIGTERM)
    finish(process, 40)
    assert process.returncode != 0
    until = time.monotonic() + 30
    while descendants_of_test():  # a launcher may end before its ranks do
        assert time.monotonic() < until
        time.sleep(0.2)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["status"] == "preempted"
    assert checkpoints(tmp_path) == ["latest", f"step-{results['steps']:08d}"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_exit_code_of_a_run_that_was_stopped(begin, tmp_path, number):
    process = begin(
        [
            *launcher_command("python", 1),
            SCRIPT,
            *ON_ONE,
            "--epochs",
            "50",
            "--output_dir",
            tmp_path,
        ]
    )
    while "Epoch 1" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    for _ in range(3):  # launchers repeat themselves
        process.send_signal(number)
    _, err = finish(process, 30)
    assert process.returncode == 75 and err == ""
    assert json.loads((tmp_path / "results.json").read_text())["status"] == "preempted"
    check_schema(tmp_path)


def test_a_signal_during_an_evaluation(script, begin, tmp_path):
    """Before the first step at that, when there are no moments to save."""
    work = [*ON_ONE, "--eval_first", "--eval_samples", "500", "--max_steps", "3", "--output_dir"]
    process = begin([*launcher_command("python", 1), SCRIPT, *work, tmp_path / "stopped"])
    while "Dataset ready" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)
    finish(process, 30)
    assert process.returncode == 75
    check_schema(tmp_path / "stopped")
    assert checkpoints(tmp_path / "stopped") == ["latest", "step-00000000"]
    script(*work, tmp_path / "stopped", "--resume", "--no_save")
    script(*work, tmp_path / "whole")
    assert history(tmp_path / "stopped") == history(tmp_path / "whole")


def test_a_broken_checkpoint_is_passed_over(script, alone, copy):
    def file(step):
        return next((copy / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))

    content = bytearray(file(10).read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    file(10).write_bytes(content)
    os.truncate(file(9), 1000)
    manifest = copy / "checkpoints" / "step-00000006" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"adam_step": 6', '"adam_step": 7'))
    (copy / "checkpoints" / "step-00000005" / "manifest.json").unlink()
    run = script(
        *ON_ONE,
        "--resume",
        "--save_every",
        "4",
        "--keep_last",
        "1",
        "--output_dir",
        copy,
        folder=copy,
    )
    for step in (5, 6, 9, 10):
        assert (
            len(
                [
                    line
                    for line in run.out.splitlines()
                    if "Skipped the checkpoint" in line and f"step-{step:08d}" in line
                ]
            )
            == 1
        )
    assert "Resumed from" in run.out and history(copy) == history(alone.folder)
    assert checkpoints(copy) == [
        *(f"aside-step-{step:08d}" for step in (5, 6, 9, 10)),
        "latest",
        "step-00000008",
    ]


def test_a_run_that_was_complete_is_left_alone_but_for_what_is_asked_for(
    script, alone, copy, tmp_path
):
    run = script(
        *ON_ONE, "--resume", "--output_dir", copy, "--export_hf", tmp_path / "late", folder=copy
    )
    assert "already complete" in run.out and load_exported(tmp_path / "late")
    assert run.metrics == alone.metrics
    assert {**run.results, "export": None} == {**alone.results, "export": None}


@pytest.mark.parametrize("fault", ["kill_saving:tensors:3", "kill_saving:manifest:3", "kill:0:34"])
def test_killed(script, alone, tmp_path, fault):
    """The third save (step 9) is cut off, before or after its tensors are written; or the process
    dies in step 8 or 9.
    """
    broken = script(
        *ON_ONE,
        "--save_every",
        "3",
        "--output_dir",
        tmp_path,
        program=FAULT,
        ok=False,
        folder=tmp_path,
        env={"FAULT": fault},
    )
    assert broken.code == -signal.SIGKILL
    run = script(
        *ON_ONE, "--save_every", "3", "--resume", "--output_dir", tmp_path, folder=tmp_path
    )
    assert "Resumed from" in run.out and "step-00000006" in run.out
    assert history(tmp_path) == history(alone.folder)
    assert checkpoints(tmp_path) == [
        "latest",
        "step-00000003",
        "step-00000006",
        "step-00000009",
    ]  # and nothing half done


@pytest.mark.soak
@pytest.mark.parametrize("number", range(30))
def test_random_kills(script, uninterrupted, under, tmp_path, number):
    """kill -9 of one rank or of all, at a random moment, again and again, until the run gets
    through.
    """
    draw = random.Random(number)
    strategy = STRATEGIES[number % len(STRATEGIES)]
    work = [
        *ON_TWO,
        "--precision",
        "bf16",
        *under(strategy),
        "--save_every",
        "2",
        "--output_dir",
        tmp_path,
        "--resume",
    ]
    for _ in range(draw.randint(1, 2)):
        process = start([*launcher_command("torchrun", 2), SCRIPT, *work, "--logging_steps", "1"])
        while line := process.stdout.readline():
            if re.search(
                "Epoch|Evaluation|already complete", line
            ):  # the kill before may have come after the last step
                break
        assert line, process.stderr.read()
        time.sleep(draw.uniform(0, 3))
        ranks = [
            rank for rank in descendants_of_test() if "torchrun" not in " ".join(rank.cmdline())
        ]
        for rank in ranks if draw.random() < 0.5 else draw.sample(ranks, min(1, len(ranks))):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        finish(process, 60)
        assert descendants_of_test() == []
    script(*work, launcher="torchrun", ranks=2, folder=tmp_path)
    assert history(tmp_path) == history(uninterrupted(strategy).folder)


def test_loss_scaler_of_deepspeed(monkeypatch):
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from support.strategies import gradients

    def optimizer():
        """As DeepSpeed's, of which only the loss scaler is used."""
        scaler = DynamicLossScaler(
            2**16, scale_window=5, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
        )
        return SimpleNamespace(loss_scaler=scaler)

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)  # decides which rank logs
    unused = torch.amp.GradScaler("cpu", enabled=False)
    one, other = optimizer(), optimizer()
    first, second = one.loss_scaler, other.loss_scaler
    for overflow in (True, False, True, False):
        first.update_scale(overflow)
    saved = json.loads(json.dumps(gradients.scaler_state(unused, one)))
    gradients.load_scaler_state(saved, unused, other)
    for overflow in (False, False, False, True, False, True):  # both do the same from here
        first.update_scale(overflow)
        second.update_scale(overflow)
        assert first.cur_scale == second.cur_scale
    assert vars(first) == vars(second)
    gradients.load_scaler_state({"scale": 64.0}, unused, other)  # of PyTorch's
    assert second.cur_scale == 64.0


def test_cpu_adam_goes_on_exactly_after_many_steps():
    """A few steps would not show it: a running product and a power round alike at first."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from support import patches
    from support.strategies import ops
    from support.strategies.optimizer_shards import replay_bias_correction

    patches.load_compiled_ops(["cpu_adam"], ops.load)

    def fresh():
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
        return weight, DeepSpeedCPUAdam([weight], lr=1e-3)

    def steps(weight, optimizer, numbers):
        for number in numbers:
            weight.grad = torch.randn(1000, generator=torch.Generator().manual_seed(number))
            optimizer.step()

    whole, optimizer = fresh()
    steps(whole, optimizer, range(300))
    state = {
        key: value.clone() if torch.is_tensor(value) else value
        for key, value in optimizer.state[whole].items()
    }
    resumed, second = fresh()
    resumed.data.copy_(whole.data)
    second.state[resumed] = state
    replay_bias_correction(second, 300)
    steps(whole, optimizer, range(300, 400))
    steps(resumed, second, range(300, 400))
    assert torch.equal(whole, resumed)


def test_full_disk_keeps_the_checkpoint_before(script, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        skip("needs root to mount a small tmpfs")
    try:
        run = script(*ON_ONE, "--save_every", "3", "--output_dir", disk / "out", ok=False)
        assert run.code == 1 and "No space left" in run.error
        assert checkpoints(disk / "out") == ["latest", "step-00000003"]
        assert json.loads((disk / "out" / "results.json").read_text())["status"] == "failed"
    finally:
        subprocess.run(["umount", disk], check=True)


def test_disk_that_is_full_for_one_rank_only(script, tmp_path):
    run = script(
        *ON_TWO,
        "--strategy",
        "zero1",
        "--save_every",
        "2",
        "--output_dir",
        tmp_path,
        folder=tmp_path,
        ok=False,
        program=FAULT,
        env={"FAULT": "full_disk:1:2"},
        launcher="torchrun",
        ranks=2,
        timeout=60,
    )
    assert run.code != 0 and "No space left" in run.error and "rank 1" in run.error
    assert run.results["status"] == "failed" and descendants_of_test() == []
    assert checkpoints(tmp_path) == ["latest", "step-00000002"]


def test_keep_last(script, tmp_path):
    script(
        *ON_ONE, "--save_every", "2", "--keep_last", "2", "--output_dir", tmp_path, folder=tmp_path
    )
    assert checkpoints(tmp_path) == ["latest", "step-00000008", "step-00000010"]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-00000010"


@pytest.mark.parametrize(
    "change, said",
    [
        (["--seq_length", "16"], "seq_length 32 in the checkpoint, 16 in this run"),
        (["--dataset", "README.md"], "dataset"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(script, copy, change, said):
    before = (copy / "results.json").read_text()
    run = script(*ON_ONE, *change, "--resume", "--output_dir", copy, ok=False)
    assert run.code == 2 and said in run.error
    assert (copy / "results.json").read_text() == before  # of the run that was complete


def test_the_schedule_of_a_deepspeed_file_goes_on(script, tmp_path):
    config = json.loads((PROJECT / "ds_config_stage1.json").read_text())
    config["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 20},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    work = [
        "--seq_length",
        "32",
        "--num_samples",
        "12",
        "--batch_size",
        "2",
        "--no_eval",
        "--ds_config",
        tmp_path / "ds.json",
    ]
    whole = script(*work, "--save_every", "3")
    resumed = script(*work, "--resume", whole.folder / "checkpoints" / "step-00000003")
    assert history(resumed.folder) == history(whole.folder, after=3)


def test_resume_without_a_checkpoint(script, tmp_path):
    run = script(
        "--seq_length",
        "32",
        "--max_steps",
        "1",
        "--no_eval",
        "--resume",
        "--output_dir",
        tmp_path,
        folder=tmp_path,
    )
    assert "starts from the beginning" in run.out and run.results["steps"] == 1
    refused = script("--resume", tmp_path / "nowhere", ok=False)
    assert refused.code == 2 and "nowhere" in refused.error


def test_two_runs_on_one_folder(script, tmp_path):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = script(*ON_ONE, "--output_dir", tmp_path, ok=False)
    assert run.code == 2 and "in use by another run" in run.error
