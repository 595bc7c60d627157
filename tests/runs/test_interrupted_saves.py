"""What happens while a thread writes a checkpoint: kills, signals, failures of the run."""

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from cluster_work import ranks_of, reached, wait_for
from conftest import FAULT, SCRIPT, Run, descendants_of_test, finish, launcher_command, slow, start

from distributed_training.checkpoints.format import list_checkpoints
from distributed_training.checkpoints.verify import open_checkpoint
from distributed_training.errors import EXIT_PREEMPTED

# Of the embedded model, whose checkpoints have 52 MB. Global batches of 4 sequences, with dropout.
WORK = (
    "--seq_length 32 --num_samples 160 --dropout 0.1 --precision fp32 --no_eval --no_export "
    "--lr_scheduler constant"
).split()
SLOWLY = {"FAULT": "slow_save:2"}
ALONE, ON_TWO = ["--batch_size", "4"], ["--batch_size", "2"]


def history(folder: Path) -> list[dict]:
    """What metrics.jsonl says of each step, without the clock."""
    clock = ("seconds", "tokens_per_second")
    return [{k: v for k, v in r.items() if k not in clock} for r in Run(folder=folder).metrics]


def complete(folder: Path) -> list[str]:
    """The checkpoints of a run, after a check of all their files."""
    found = list_checkpoints(folder / "checkpoints")
    for checkpoint in found:
        open_checkpoint(checkpoint)
    return sorted(path.name for path in found)


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:08d}" for number in numbers]


def kill_while_writing(process, folder: Path, delay: float) -> str | None:
    """Kill all ranks after the start of a new checkpoint; return the one that was being written."""
    ranks: list[psutil.Process] = []
    earlier = {path.name for path in folder.glob("checkpoints/.partial-*")}
    while process.poll() is None:
        writing = {path.name for path in folder.glob("checkpoints/.partial-*")} - earlier
        if writing and delay >= 0:
            ranks = ranks or ranks_of(process)
            time.sleep(delay)
            for rank in ranks:
                rank.kill()
            process.kill()
            process.communicate()
            psutil.wait_procs(ranks, 20)
            left = [path.name for path in folder.glob("checkpoints/.partial-step*")]
            return left[0].removeprefix(".partial-") if left else None
        time.sleep(0.001)
    pytest.fail(f"the run ended: {process.communicate()[1][-2000:]}")


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        slow("dp", 2),
        *(pytest.param(s, 20, marks=pytest.mark.soak) for s in ("dp", "zero2", "fsdp")),
    ],
)
def test_all_ranks_are_killed_at_random_points_of_a_write(script, tmp_path, strategy, kills):
    """A run that saves after every step, and is killed and resumed again and again, is bit for bit
    the one that was not. No checkpoint that was complete is lost.
    """
    points, flags = random.Random(0), [*WORK, *ON_TWO, "--strategy", strategy]
    whole = script(*flags, "--no_save", launcher="torchrun", ranks=2)
    work = [*flags, "--resume", "--save_every", "1", "--output_dir", tmp_path]
    shown = []
    for _ in range(kills):
        before = complete(tmp_path)
        process = start([*launcher_command("torchrun", 2), SCRIPT, *work])
        cut_off = kill_while_writing(process, tmp_path, points.uniform(0, 0.4))
        after = complete(tmp_path)
        assert {*before} <= {*after}
        shown.append(f"{after[-1] if after else 'no'} complete, {cut_off} cut off")
        print(f"{strategy}: {shown[-1]}", flush=True)
    assert any("None" not in line for line in shown)  # some points were inside of a write
    script(*work, launcher="torchrun", ranks=2, folder=tmp_path)
    assert history(tmp_path) == history(whole.folder)
    assert complete(tmp_path) == steps(*range(1, 41))
    assert not list(tmp_path.glob("checkpoints/.partial-*"))  # nor anything unfinished


def test_a_run_that_fails_completes_the_checkpoint_that_is_being_written(script, tmp_path):
    """The loss of step 3 is not finite while the thread still writes the checkpoint of step 2."""
    flags = [*WORK, *ALONE, *f"--save_every 1 --output_dir {tmp_path}".split()]
    fault = {"program": FAULT, "env": {"FAULT": "slow_save:1.5+nan:3"}}
    run = script(*flags, folder=tmp_path, ok=False, **fault)
    assert run.code == 1 and "loss is nan at step 3" in run.error
    assert complete(tmp_path) == steps(1, 2)
    assert re.search(r"step-00000002 \([\d.]+ s, .* s of it for the save before; wri", run.out)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes(script, tmp_path):
    """The other ends soon, and the run continues from the checkpoint before."""
    flags = [*WORK, *ON_TWO, *"--strategy zero2 --max_steps 8 --save_every 2".split()]
    flags += ["--output_dir", tmp_path, "--resume"]
    # It reads step 5 after it has copied the states of step 4 at the earliest.
    fault = {"program": FAULT, "env": {"FAULT": "slow_save:4+kill:1:6"}}
    started = time.monotonic()
    run = script(*flags, launcher="torchrun", ranks=2, folder=tmp_path, ok=False, **fault)
    assert run.code != 0 and time.monotonic() - started < 90
    assert complete(tmp_path) == steps(2) and descendants_of_test() == []
    script(*flags, launcher="torchrun", ranks=2, folder=tmp_path)
    assert complete(tmp_path) == steps(2, 4, 6, 8)
    assert not list(tmp_path.glob("checkpoints/.partial-*"))


@pytest.mark.slow
def test_a_signal_while_a_thread_writes_ends_the_run_with_both_checkpoints(begin, tmp_path):
    flags = f"--save_every 3 --output_dir {tmp_path}".split()
    process = begin([*launcher_command("python", 1), FAULT, *WORK, *ALONE, *flags], SLOWLY)
    wait_for(lambda: list(tmp_path.glob("checkpoints/.partial-*")), 60, "nothing is saved")
    process.send_signal(signal.SIGTERM)
    _, err = finish(process, 60)
    results = Run(folder=tmp_path).results
    assert process.returncode == EXIT_PREEMPTED and err == ""
    assert complete(tmp_path)[-1] == steps(results["steps"])[0]
    assert {"step-00000003"} <= {*complete(tmp_path)}
    saves = results["saves"]
    assert saves["count"] == len(complete(tmp_path)) and saves["write_seconds"] >= 2


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_write(begin, tmp_path):
    flags = f"--save_every 3 --output_dir {tmp_path}".split()
    command = [*launcher_command("python", 1), FAULT, *WORK, *ALONE, *flags]
    process = begin(command, {"FAULT": "slow_save:100"})
    wait_for(lambda: list(tmp_path.glob("checkpoints/.partial-*")), 60, "nothing is saved")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(6)  # a signal within 5 s of the first is the same request
    finish(process, 20)
    assert process.returncode == 1 and complete(tmp_path) == []


@pytest.mark.slow
def test_replay_of_a_run_that_is_writing(script, begin, tmp_path):
    """--replay reads complete checkpoints only, and the run is not disturbed."""
    flags = [*WORK, *ALONE, *f"--save_every 3 --output_dir {tmp_path}".split()]
    process = begin([*launcher_command("python", 1), FAULT, *flags], SLOWLY)
    reached(process, "step-00000003")
    copy = tmp_path.with_name("copied while it writes")
    shutil.copytree(tmp_path, copy)
    shown = script(*flags[:-1], copy, "--replay", "5", folder=copy)
    assert "Repeating step 5" in shown.out
    finish(process, 120)
    assert process.returncode == 0 and complete(tmp_path)[-1] == "step-00000039"
    assert json.loads((tmp_path / "results.json").read_text())["saves"]["count"] == 13
