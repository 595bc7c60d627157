"""The steps of a run that stand out, and the command that replays one."""

import random
import shlex

import pytest

from distributed_training.cli.parse import parse_arguments
from tools.runs.outliers import outliers_of, replay_command

# Of a run whose loss falls all the time, without the row that made the loss of step 31 3.135.
FALLING = [
    *(8.401, 7.01, 6.313, 6.052, 5.27, 5.111, 4.672, 4.217, 3.912, 3.566, 3.229, 3.028, 2.71),
    *(2.518, 2.26, 2.011, 1.937, 1.725, 1.625, 1.463, 1.335, 1.238, 1.189, 1.068, 0.979, 0.932),
    *(0.858, 0.802, 0.784, 0.752, 0.745, 0.74, 0.696, 0.683, 0.666, 0.651, 0.627, 0.598, 0.63),
]


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


@pytest.mark.parametrize("step", [*range(13, len(FALLING) + 1)])
def test_the_fall_of_the_loss_hides_no_spike(step):
    """The values before it spread over a multiple of it; also the last step of a run."""
    assert outliers_of(records_of(FALLING)) == []
    losses = [*FALLING]
    losses[step - 1] += 2.383
    found = outliers_of(records_of(losses, FALLING))
    assert [(one.step, one.key) for one in found] == [(step, "loss")]


def test_a_loss_that_does_not_come_back_stands_out():
    """A higher level, and a run that diverges slowly: the first steps of the rise."""
    noise = random.Random(0)
    flat = [2 + noise.gauss(0, 0.05) for _ in range(40)]
    jump = outliers_of(records_of([*flat, *(one + 0.5 for one in flat)], [1.0] * 80))
    assert 41 in {one.step for one in jump}
    diverging = [*flat, *(2 * 1.15**step for step in range(1, 20))]
    rise = {one.step for one in outliers_of(records_of(diverging, [1.0] * 59))}
    assert rise >= {42, 43, 44, 45, 46} and min(rise) > 40


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
