"""The learning rate of each step, next to transformers' schedules."""

import pytest
import torch
from transformers import optimization

from distributed_training.cli.parse import parse_arguments, read_command_line
from real_model_example import learning_rate

LR, STEPS = 1e-3, 25


def rates(*flags: str, steps: int = STEPS) -> list[float]:
    training = parse_arguments(["--lr", str(LR), *flags]).training
    return [learning_rate(step, steps, training) for step in range(steps)]


def schedule(name: str, warmup: int, **options: object) -> list[float]:
    """The rates of a schedule of transformers, which takes the names of Trainer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = optimization.get_scheduler(name, optimizer, warmup, STEPS, options)
    found = []
    for _ in range(STEPS):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


FLOOR = ("--min_lr_ratio", "0.1")
WSD = ("--lr_scheduler", "wsd", "--decay_ratio", "0.3")  # 7.5 steps, rounded up
OF_WSD = {"num_decay_steps": 8, "decay_type": "linear"}
CASES = {
    "constant": (("--lr_scheduler", "constant"), "constant_with_warmup", {}),
    "linear": (("--lr_scheduler", "linear"), "linear", {}),
    "cosine": (("--lr_scheduler", "cosine"), "cosine", {}),
    "floor": (("--lr_scheduler", "cosine", *FLOOR), "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "wsd": (WSD, "warmup_stable_decay", OF_WSD),
    "wsd to a floor": ((*WSD, *FLOOR), "warmup_stable_decay", OF_WSD | {"min_lr_ratio": 0.1}),
    "wsd by a square root": (
        (*WSD, "--decay_type", "1-sqrt"),
        "warmup_stable_decay",
        OF_WSD | {"decay_type": "1-sqrt"},
    ),
}


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_schedules_are_those_of_transformers(case, warmup):
    """From the end of the warm-up on: of N steps, step k has the rate lr × k / (N + 1) here."""
    flags, name, options = CASES[case]
    found = rates(*flags, "--warmup_steps", str(warmup))
    assert found[warmup:] == pytest.approx(schedule(name, warmup, **options)[warmup:], rel=1e-12)
    assert found[:warmup] == pytest.approx([LR * k / 4 for k in (1, 2, 3)][:warmup])


def test_warmup_ratio_is_a_share_of_all_steps():
    ratio = rates("--warmup_ratio", "0.1")  # 2.5 steps, rounded up
    assert ratio == rates("--warmup_steps", "3") != rates()


def test_more_steps_lengthen_the_stable_part():
    short, long = rates(*WSD), rates(*WSD, steps=2 * STEPS)  # decays of 8 and 15 steps
    assert short[:18] == [LR] * 18 and short[18] < LR
    assert long[:36] == [LR] * 36 and long[36] < LR


def test_a_decay_fits_the_steps_after_the_warm_up():
    found = rates("--lr_scheduler", "wsd", "--decay_ratio", "1", "--warmup_steps", "5")
    assert found == pytest.approx(rates("--warmup_steps", "5"))


def test_the_floor_of_linear():
    assert rates(*FLOOR) == pytest.approx([0.9 * rate + 0.1 * LR for rate in rates()])


@pytest.mark.parametrize(
    "flags", [("--decay_ratio", "0.2"), ("--lr_scheduler", "constant", *FLOOR)]
)
def test_flags_of_another_schedule_are_named(flags):
    [line] = read_command_line([*flags]).notices
    assert flags[-2] in line
