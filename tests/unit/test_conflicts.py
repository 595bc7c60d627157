"""Flags that exclude each other, or lack one that they need, are refused before anything runs."""

import pytest

from support.cli.conflicts import EXCLUDING, NEEDING
from support.cli.flags import build_parser
from support.cli.parse import parse_arguments
from support.errors import UserError

VALUES = {
    **{"export_dtype": "bf16", "validation_split": "0.1", "lora_dropout": "0.1"},
    "warmup_ratio": "0.1",
}
# Flags with which another rule would fail first.
ALSO = {
    "resume": ["--output_dir", "x"],
    "streaming": ["--max_steps", "2", "--dataset", "x"],
    "merge_lora": ["--lora_r", "4"],
}


def spelled(flag: str) -> list[str]:
    action = next(a for a in build_parser()._actions if f"--{flag}" in a.option_strings)
    values = [] if action.nargs in (0, "?") else [VALUES.get(flag, "2")]
    return [f"--{flag}", *values]


@pytest.mark.parametrize("flag, other", EXCLUDING)
def test_flags_that_exclude_each_other(flag, other):
    more = [word for name in (flag, other) for word in ALSO.get(name, [])]
    parse_arguments([*spelled(flag), *ALSO.get(flag, [])])
    with pytest.raises(UserError, match=f"--{flag} and --{other} cannot both hold"):
        parse_arguments([*spelled(flag), *spelled(other), *more])


@pytest.mark.parametrize("flag, other", NEEDING)
def test_flags_that_need_another(flag, other):
    with pytest.raises(UserError, match=f"--{flag} needs --{other}"):
        parse_arguments(spelled(flag))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--resume"], "needs --output_dir"),
        (["--streaming", "--max_steps", "2"], "pydocs"),
        (
            ["--streaming", "--max_steps", "2", "--dataset", "x", "--early_stopping_patience", "2"],
            "--eval_every",
        ),
        (["--simulate_gpus", "2", "--max_steps", "1"], "--max_steps 2 or more"),
        (["--export_hf", "x", "--no_export"], "cannot both hold"),
    ],
)
def test_other_conflicts(flags, message):
    with pytest.raises(UserError, match=message):
        parse_arguments(flags)
