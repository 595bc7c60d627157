"""The steps of a run that stand out, and the command that replays one."""

import random
import shlex

import pytest

from distributed_training.cli.parse import parse_arguments
from tools.runs.outliers import outliers_of, replay_command


def records_of(losses, norms=None):
    return [
        {"step": step, "loss": loss, "grad_norm": norm}
        for step, (loss, norm) in enumerate(zip(losses, norms or losses, strict=True), 1)
    ]


def test_only_values_above_the_usual_ones_stand_out():
    noise = random.Random(0)
    losses = [8 / (1 + step / 20) + noise.gauss(0, 0.05) for step in range(60)]
    norms = [2 + noise.gauss(0, 0.1) for _ in range(60)]
    assert outliers_of(records_of(losses, norms)) == []
    losses[39] += 3
    norms[49], norms[20] = 9.0, None  # fp16 overflowed
    found = outliers_of([{"step": 0, "eval_loss": 8.0}, *records_of(losses, norms)])
    assert {(one.step, one.key, one.value) for one in found} == {
        (40, "loss", losses[39]),
        (50, "grad_norm", 9.0),
    }
    losses[30], norms[30] = 0.1, 0.01  # a drop is no harm
    assert len(outliers_of(records_of(losses, norms))) == 2


def test_equal_losses_have_a_spread_of_zero():
    assert [one.step for one in outliers_of(records_of([2.0] * 10 + [2.1, 5.0]))] == [12, 12]


@pytest.mark.parametrize(
    "command",
    [
        "python x.py --lr 1",
        "python x.py --resume --lr 1 --output_dir a",
        "python x.py --resume c/step-1 --lr 1",
        "python x.py --resume_force true --resume_from_checkpoint c --output_dir a --overwrite --lr 1",
        "python x.py --overwrite --resume=c --output_dir=a --lr 1",
    ],
)
def test_the_command_of_a_run_becomes_that_of_a_replay(command):
    """The folder is that of the page: it may have been moved."""
    results = {"command": command, "world_size": 1}
    expected = "python x.py --lr 1 --output_dir 'a b' --replay 7"
    assert replay_command(results, "a b", 7) == expected
    words = shlex.split(replay_command({**results, "world_size": 2}, "a b", 7))
    assert words[:3] == ["torchrun", "--nproc_per_node=2", "x.py"]


def test_a_run_file_that_resumes_can_be_replayed(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("resume: true\nresume_force: true\nsave_every: 4\noutput_dir: elsewhere\n")
    results = {"command": f"python x.py --config {file} --resume", "world_size": 1}
    command = shlex.split(replay_command(results, tmp_path / "moved", 7))
    settings = parse_arguments(command[2:])
    assert settings.command.replay == 7 and settings.output.resume is None
    assert settings.output.output_dir == str(tmp_path / "moved")
