"""A run that was stopped and resumed is the run that never stopped, and nothing that happens to a
save can lose one.
"""

import fcntl
import functools
import json
import os
import re
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
from cluster_work import ranks_of, reached, wait_for
from conftest import (
    FAULT,
    PROJECT,
    SCRIPT,
    SMALL,
    Run,
    check_schema,
    descendants_of_test,
    finish,
    launcher_command,
    load_exported,
    slow,
    soak,
    start,
)

# Global batches of 8 blocks: an epoch has 5 steps, the last one short. Dropout on.
WORK = (
    "--dropout 0.1 --seq_length 32 --num_samples 37 --batch_size 2 --epochs 2 --eval_samples 9 "
    "--lr_scheduler cosine --warmup_steps 3"
).split()
ON_TWO = [*WORK, "--gradient_accumulation_steps", "2"]
ON_ONE = [*WORK, *"--gradient_accumulation_steps 4 --precision fp32".split()]
TWO = {"launcher": "torchrun", "ranks": 2}


def history(folder, after=0):
    """What metrics.jsonl says of each step and evaluation, without the clock."""
    records, clock = Run(folder=folder).metrics, ("seconds", "tokens_per_second")
    records = [{k: v for k, v in record.items() if k not in clock} for record in records]
    return [r for r in records if r["step"] > after or (r["step"] == after and "eval_loss" in r)]


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def steps(*numbers):
    return [f"step-{number:08d}" for number in numbers]


@pytest.fixture(scope="module")
def flags_of(small_gpt2, tmp_path_factory):
    """flags_of(strategy): a small model in bf16 on two ranks.

    DeepSpeed stores tensors of at least 1 MB on NVMe, so infinity trains the embedded model, in fp32,
    with sub-groups so small that each rank swaps several.
    """
    config = json.loads((PROJECT / "ds_config_infinity.json").read_text())
    config["zero_optimization"]["sub_group_size"] = 700_000
    path = tmp_path_factory.mktemp("config") / "infinity.json"
    path.write_text(json.dumps(config))
    small = ["--precision", "bf16", "--model", small_gpt2, *SMALL]
    own = {
        "infinity": ["--precision", "fp32", "--ds_config", path],
        "infinity in bf16": ["--precision", "bf16", "--ds_config", path],
    }
    return lambda case: [*ON_TWO, "--strategy", case.split()[0], *own.get(case, small)]


@pytest.fixture(scope="module")
def uninterrupted(script, flags_of):
    """uninterrupted(strategy): a checkpoint every 2 steps; each runs once."""
    return functools.cache(lambda strategy: script(*flags_of(strategy), "--save_every", "2", **TWO))


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
OTHERS = [*map(soak, ("zero1", "zero3", "offload")), slow("infinity in bf16")]


@pytest.mark.parametrize("strategy", ["dp", "zero2", "infinity", "fsdp", *OTHERS])
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    script, uninterrupted, flags_of, strategy
):
    whole = uninterrupted(strategy)
    assert checkpoints(whole.folder) == ["latest", *steps(2, 4, 6, 8, 10)]
    saved = whole.folder / "checkpoints" / "step-00000002"
    flags = flags_of(strategy)
    if strategy == "zero2":  # the configuration that the run has written is that of the run
        flags += ["--ds_config", whole.folder / "ds_config.json"]
    resumed = script(*flags, "--resume", saved, **TWO)
    assert history(resumed.folder) == history(whole.folder, after=2)
    for key in ("steps", "samples", "tokens", "train_loss_first", "train_loss_last", "eval_loss"):
        assert resumed.results[key] == whole.results[key], key


def test_from_the_end_of_an_epoch_whose_evaluation_is_still_to_come(script, alone, copy):
    assert checkpoints(copy) == ["latest", *steps(3, 5, 6, 9, 10)]
    for later in steps(6, 9, 10):
        shutil.rmtree(copy / "checkpoints" / later)
    script(*ON_ONE, "--resume", "--output_dir", copy, folder=copy)
    assert history(copy) == history(alone.folder)


@pytest.mark.parametrize("strategy", ["dp", "zero2", "infinity", "fsdp", *OTHERS])
def test_each_rank_writes_what_it_holds_and_only_data(uninterrupted, strategy):
    run = uninterrupted(strategy)
    folder = run.folder / "checkpoints" / "step-00000002"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".txt"}
    by_rank = [sum(f.stat().st_size for f in folder.glob(f"rank-0000{r}*")) for r in (0, 1)]
    values = 3 * run.results["parameters"]  # weights and two moments in fp32, and JSON
    assert 4 * values < sum(by_rank) < 4.2 * values
    assert by_rank[0] == pytest.approx(by_rank[1], rel=0.05)


def test_a_signal_to_one_rank_saves_and_resume_goes_on(script, flags_of, uninterrupted, tmp_path):
    work = [*flags_of("zero2"), "--output_dir", tmp_path]
    fault = {"program": FAULT, "env": {"FAULT": "signal:1:5"}}  # while it reads step 3
    stopped = script(*work, **TWO, **fault, folder=tmp_path, ok=False).results
    assert stopped["status"] == "preempted" and 2 <= stopped["steps"] < 5
    assert checkpoints(tmp_path) == ["latest", *steps(stopped["steps"])]
    assert descendants_of_test() == []
    script(*work, "--resume", **TWO, folder=tmp_path)
    assert history(tmp_path) == history(uninterrupted("zero2").folder)


def test_a_signal_before_the_first_step_is_no_failure_and_resume_starts(
    script, flags_of, uninterrupted, tmp_path
):
    """To one of two ranks; from a checkpoint, the step that it holds is kept."""
    work = [*flags_of("dp"), "--output_dir", tmp_path]
    fault = {"program": FAULT, "env": {"FAULT": "signal:1:1"}}  # while it reads the first step
    stopped = script(*work, **TWO, **fault, folder=tmp_path, ok=False)
    assert (stopped.results["status"], stopped.results["error_kind"]) == ("preempted", None)
    assert "SIGUSR1" in stopped.results["reason"] and "❌" not in stopped.out + stopped.err
    assert stopped.out.count("⏸️") + stopped.err.count("⏸️") == 1
    assert not (tmp_path / "checkpoints").exists() and descendants_of_test() == []
    check_schema(tmp_path, metrics=False)
    script(*work, "--resume", "--save_every", "4", **TWO, folder=tmp_path)
    assert history(tmp_path) == history(uninterrupted("dp").folder)
    kept = checkpoints(tmp_path)
    more = [*work, "--epochs", "9", "--resume", "--resume_force"]
    assert script(*more, **TWO, **fault, folder=tmp_path, ok=False).results["status"] == "preempted"
    assert checkpoints(tmp_path) == kept


@pytest.mark.slow
@pytest.mark.parametrize("launcher, strategy", [("deepspeed", "zero1"), ("accelerate", "dp")])
def test_a_signal_to_the_launcher(tmp_path, launcher, strategy):
    """To its process group, as a terminal sends it; test_slurm_jobs.py cancels and requeues jobs."""
    flags = f"--epochs 50 --strategy {strategy} --output_dir {tmp_path}".split()
    process = start([*launcher_command(launcher, 2), SCRIPT, *ON_TWO, *flags])
    reached(process, "Epoch 1")
    os.killpg(process.pid, signal.SIGTERM)
    finish(process, 40)
    assert process.returncode != 0
    # A launcher may end before its ranks do.
    wait_for(lambda: not descendants_of_test(), 30, "a rank is left")
    results = Run(folder=tmp_path).results
    assert results["status"] == "preempted"
    assert checkpoints(tmp_path) == ["latest", *steps(results["steps"])]


@pytest.mark.parametrize("number", [signal.SIGHUP, slow(signal.SIGTERM)])
def test_exit_code_of_a_run_that_was_stopped(begin, tmp_path, number):
    flags = f"--epochs 50 --output_dir {tmp_path}".split()
    process = begin([*launcher_command("python", 1), SCRIPT, *ON_ONE, *flags])
    reached(process, "Epoch 1")
    for _ in range(3):  # launchers repeat themselves
        process.send_signal(number)
    _, err = finish(process, 30)
    assert process.returncode == 75 and err == ""
    assert Run(folder=tmp_path).results["status"] == "preempted"
    check_schema(tmp_path)


@pytest.mark.slow
def test_a_signal_to_one_rank_during_an_evaluation(script, tmp_path):
    """Before the first step, when there is nothing to save."""
    work = [*ON_TWO, *"--eval_first --eval_samples 2000 --max_steps 3 --output_dir".split()]
    process = start([*launcher_command("torchrun", 2), SCRIPT, *work, tmp_path / "stopped"])
    reached(process, "Starting Training")
    time.sleep(0.5)
    ranks_of(process)[1].send_signal(signal.SIGUSR1)
    finish(process, 40)
    assert Run(folder=tmp_path / "stopped").results["status"] == "preempted"
    assert not (tmp_path / "stopped" / "checkpoints").exists()
    script(*work, tmp_path / "stopped", "--resume", "--no_save", **TWO)
    script(*work, tmp_path / "whole", **TWO)
    assert history(tmp_path / "stopped") == history(tmp_path / "whole")


def test_a_broken_checkpoint_is_passed_over(script, alone, copy):
    folders = {step: copy / "checkpoints" / f"step-{step:08d}" for step in (5, 6, 9, 10)}
    file = next(folders[10].glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    file.write_bytes(content)
    os.truncate(next(folders[9].glob("*.safetensors")), 1000)
    manifest = folders[6] / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"adam_step": 6', '"adam_step": 7'))
    (folders[5] / "manifest.json").unlink()
    flags = f"--resume --save_every 2 --keep_last 2 --output_dir {copy}".split()
    run = script(*ON_ONE, *flags, folder=copy)
    for step in folders:
        assert len(re.findall(f"Skipped the checkpoint .*step-{step:08d}", run.out)) == 1
    assert history(copy) == history(alone.folder)
    aside = [f"aside-{name}" for name in steps(*folders)]
    assert checkpoints(copy) == [*aside, "latest", *steps(8, 10)]  # --keep_last removed 4 and 6
    assert (copy / "checkpoints" / "latest").read_text().strip() == "step-00000010"


def test_a_completed_run_is_not_changed_but_exported_on_request(script, alone, copy, tmp_path):
    flags = f"--resume --output_dir {copy} --export_hf {tmp_path / 'late'}".split()
    run = script(*ON_ONE, *flags, folder=copy)
    assert "already complete" in run.out and load_exported(tmp_path / "late")
    assert run.metrics == alone.metrics
    assert {**run.results, "export": None} == {**alone.results, "export": None}


@pytest.mark.parametrize(
    "fault", ["kill_saving:manifest:3", "kill:0:34", slow("kill_saving:tensors:3")]
)
def test_a_killed_run_resumes_from_its_last_complete_checkpoint(script, alone, tmp_path, fault):
    """The third save (step 9) is cut off, before or after its tensors are written; or the process
    dies in step 8 or 9. The first start finds nothing to resume.
    """
    work = [*ON_ONE, *f"--resume --save_every 3 --output_dir {tmp_path}".split()]
    broken = script(*work, program=FAULT, ok=False, folder=tmp_path, env={"FAULT": fault})
    assert broken.code == -signal.SIGKILL and "starts from the beginning" in broken.out
    run = script(*work, folder=tmp_path)
    assert "Resumed from" in run.out and "step-00000006" in run.out
    assert history(tmp_path) == history(alone.folder)
    assert checkpoints(tmp_path) == ["latest", *steps(3, 6, 9)]  # and nothing unfinished


def test_loss_scaler_of_deepspeed(monkeypatch):
    """A restored one does the same as the first one from there."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from distributed_training.strategies import gradients

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)  # decides which rank logs
    options = {"scale_window": 5, "min_scale": 1, "delayed_shift": 2}
    first, second = (
        DynamicLossScaler(2**16, **options, consecutive_hysteresis=False) for _ in range(2)
    )
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    for overflow in (True, False, True, False):
        first.update_scale(overflow)
    saved = gradients.scaler_state(disabled, SimpleNamespace(loss_scaler=first))
    gradients.load_scaler_state(saved, disabled, SimpleNamespace(loss_scaler=second))
    for overflow in (False, False, False, True, False, True):
        first.update_scale(overflow)
        second.update_scale(overflow)
    assert vars(first) == vars(second)


@pytest.mark.slow
def test_cpu_adam_goes_on_exactly_after_many_steps():
    """A few steps would not show it: a running product and a power round alike at first."""
    import copy

    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from distributed_training.strategies.deepspeed import ops, patches
    from distributed_training.strategies.deepspeed.states import replay_bias_correction

    patches.load_compiled_ops(["cpu_adam"], ops.load)

    def train(weight, optimizer, numbers):
        for number in numbers:
            weight.grad = torch.randn(1000, generator=torch.Generator().manual_seed(number))
            optimizer.step()

    whole = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
    first = DeepSpeedCPUAdam([whole], lr=1e-3)
    train(whole, first, range(300))
    resumed = copy.deepcopy(whole)
    second = DeepSpeedCPUAdam([resumed], lr=1e-3)
    second.state[resumed] = copy.deepcopy(first.state[whole])
    replay_bias_correction(second, 300)
    train(whole, first, range(300, 400))
    train(resumed, second, range(300, 400))
    assert torch.equal(whole, resumed)


def test_disk_that_is_full_for_one_rank_keeps_the_checkpoint_before(script, tmp_path):
    flags = f"--strategy zero1 --save_every 2 --output_dir {tmp_path}".split()
    fault = {"program": FAULT, "env": {"FAULT": "full_disk:1:2"}}
    run = script(*ON_TWO, *flags, folder=tmp_path, ok=False, **fault, **TWO, timeout=60)
    assert run.code != 0 and "No space left" in run.error and "rank 1" in run.error
    assert run.results["status"] == "failed" and descendants_of_test() == []
    assert checkpoints(tmp_path) == ["latest", *steps(2)]


def test_two_runs_on_one_folder(script, tmp_path):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = script(*ON_ONE, "--output_dir", tmp_path, ok=False)
    assert run.code == 2 and "in use by another run" in run.error
