"""A run that was stopped and resumed is the run that never stopped, and nothing that happens to a save can lose one."""

import fcntl
import json
import os
import shutil
import signal
import subprocess

import psutil
import pytest
from conftest import PROJECT, SCRIPT, STRATEGIES, descendants_of_test, finish, launcher_command, skip, start

FAULT = PROJECT / "tests" / "fault.py"
# Global batches of 8 blocks: an epoch has 5 steps, the last one short. Dropout on.
WORK = ["--dropout", "0.1", "--seq_length", "32", "--num_samples", "37", "--batch_size", "2", "--epochs", "2", "--eval_samples",
        "9", "--lr_scheduler", "cosine", "--warmup_steps", "3"]  # fmt: skip
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
def uninterrupted(script):
    """uninterrupted(strategy): two ranks, bf16, a checkpoint every 3 steps; each strategy runs once."""
    done = {}

    def run(strategy):
        if strategy not in done:
            done[strategy] = script(*ON_TWO, "--precision", "bf16", "--strategy", strategy, "--save_every", "3",
                                    launcher="torchrun", ranks=2)  # fmt: skip
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(script, uninterrupted, strategy):
    whole = uninterrupted(strategy)
    assert checkpoints(whole.folder) == ["latest", "step-00000003", "step-00000006", "step-00000009"]
    resumed = script(*ON_TWO, "--precision", "bf16", "--strategy", strategy, "--resume",
                     whole.folder / "checkpoints" / "step-00000003", launcher="torchrun", ranks=2)  # fmt: skip
    assert history(resumed.folder) == history(whole.folder, after=3)
    for key in ("steps", "samples", "tokens", "train_loss_first", "train_loss_last", "eval_loss"):
        assert resumed.results[key] == whole.results[key], key


def test_from_any_step_in_fp32(script, alone, copy):
    """In the middle and at the end of an epoch (whose evaluation is still to come), and after a checkpoint to come back to."""
    assert checkpoints(copy) == ["latest", *(f"step-{step:08d}" for step in (3, 5, 6, 9, 10))]
    for step in (5, 9):
        for later in [path for path in (copy / "checkpoints").glob("step-*") if int(path.name[5:]) > step]:
            shutil.rmtree(later)
        script(*ON_ONE, "--resume", "--output_dir", copy, folder=copy)
        assert history(copy) == history(alone.folder)
        shutil.copytree(alone.folder / "checkpoints", copy / "checkpoints", dirs_exist_ok=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_writes_what_it_holds_and_only_data(uninterrupted, strategy):
    folder = uninterrupted(strategy).folder / "checkpoints" / "step-00000003"
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert all(name.endswith(".safetensors") or name == "manifest.json" for name in files)
    by_rank = [sum(size for name, size in files.items() if name.startswith(f"rank-0000{rank}")) for rank in (0, 1)]
    assert sum(by_rank) == pytest.approx(12 * PARAMETERS, rel=0.01)  # fp32 weight and two moments
    assert by_rank[0] == pytest.approx(by_rank[1], rel=0.02)


def test_a_signal_to_one_rank_saves_and_resume_goes_on(script, uninterrupted, tmp_path):
    work = [*ON_TWO, "--precision", "bf16", "--strategy", "zero2", "--output_dir", tmp_path, "--logging_steps", "1"]
    process = start([*launcher_command("torchrun", 2), SCRIPT, *work])
    while "Epoch 1 | Batch 1/" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if str(SCRIPT) in child.cmdline()]
    next(child for child in ranks if child.environ()["RANK"] == "1").send_signal(signal.SIGUSR1)
    finish(process, 40)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["status"] == "preempted" and 2 <= results["steps"] < 10
    assert checkpoints(tmp_path) == ["latest", f"step-{results['steps']:08d}"]
    assert descendants_of_test() == []
    script(*work, "--resume", launcher="torchrun", ranks=2, folder=tmp_path)
    assert history(tmp_path) == history(uninterrupted("zero2").folder)


def test_exit_code_of_a_run_that_was_stopped(tmp_path):
    process = start([*launcher_command("python", 1), SCRIPT, *ON_ONE, "--epochs", "50", "--output_dir", tmp_path])
    while "Epoch 1" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    for _ in range(3):  # launchers repeat themselves
        process.send_signal(signal.SIGTERM)
    _, err = finish(process, 30)
    assert process.returncode == 75 and err == ""
    assert json.loads((tmp_path / "results.json").read_text())["status"] == "preempted"


def test_a_broken_checkpoint_is_passed_over(script, alone, copy):
    def file(step):
        return next((copy / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))

    content = bytearray(file(10).read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    file(10).write_bytes(content)
    os.truncate(file(9), 1000)
    (copy / "checkpoints" / "step-00000006" / "manifest.json").write_text("{")
    (copy / "checkpoints" / "step-00000005" / "manifest.json").unlink()
    run = script(*ON_ONE, "--resume", "--output_dir", copy, folder=copy)
    for step in (5, 6, 9, 10):
        assert len([line for line in run.out.splitlines() if "Passed over" in line and f"step-{step:08d}" in line]) == 1
    assert "Resumed from" in run.out and history(copy) == history(alone.folder)


@pytest.mark.parametrize("what", ["tensors:3", "manifest:3"])
def test_killed_while_saving(script, alone, tmp_path, what):
    """The third save (step 9) is cut off, before or after its tensors are written."""
    broken = script(*ON_ONE, "--save_every", "3", "--output_dir", tmp_path, program=FAULT, ok=False, folder=tmp_path,
                    env={"FAULT": f"kill_saving:{what}"})  # fmt: skip
    assert broken.code == -signal.SIGKILL
    run = script(*ON_ONE, "--save_every", "3", "--resume", "--output_dir", tmp_path, folder=tmp_path)
    assert "Resumed from" in run.out and "step-00000006" in run.out
    assert history(tmp_path) == history(alone.folder)
    assert checkpoints(tmp_path) == ["latest", "step-00000003", "step-00000006", "step-00000009"]  # and nothing half done


def test_full_disk_keeps_the_checkpoint_before(script, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        skip("needs root to mount a small tmpfs")
    try:
        run = script(*ON_ONE, "--save_every", "3", "--output_dir", disk / "out", ok=False)
        assert run.code == 1 and "No space left" in run.error
        assert checkpoints(disk / "out") == ["latest", "step-00000003"]
        assert json.loads((disk / "out" / "results.json").read_text())["status"] == "failed"
    finally:
        subprocess.run(["umount", disk], check=True)


def test_keep_last(script, tmp_path):
    script(*ON_ONE, "--save_every", "2", "--keep_last", "2", "--output_dir", tmp_path, folder=tmp_path)
    assert checkpoints(tmp_path) == ["latest", "step-00000008", "step-00000010"]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-00000010"


@pytest.mark.parametrize("change, said", [
    (["--seq_length", "16"], "seq_length 32 there, 16 here"),
    (["--batch_size", "4"], "batch_size 2 there, 4 here"),
    (["--dataset", "README.md"], "dataset"),
    (["--strategy", "zero1"], "strategy dp there, zero1 here"),
])  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(script, copy, change, said):
    run = script(*ON_ONE, *change, "--resume", "--output_dir", copy, ok=False)
    assert run.code == 2 and said in run.error


def test_force_goes_on_with_another_batch(script, copy):
    run = script(*ON_ONE, "--batch_size", "4", "--epochs", "4", "--resume", "--resume_force", "--output_dir", copy, folder=copy)
    assert "batch_size 2 there, 4 here" in run.out and run.results["status"] == "completed"


def test_resume_without_a_checkpoint(script, tmp_path):
    run = script("--seq_length", "32", "--max_steps", "1", "--no_eval", "--resume", "--output_dir", tmp_path, folder=tmp_path)
    assert "starts from the beginning" in run.out and run.results["steps"] == 1
    refused = script("--resume", tmp_path / "nowhere", ok=False)
    assert refused.code == 2 and "nowhere" in refused.error


def test_two_runs_on_one_folder(script, tmp_path):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = script(*ON_ONE, "--output_dir", tmp_path, ok=False)
    assert run.code == 2 and "in use by another run" in run.error
