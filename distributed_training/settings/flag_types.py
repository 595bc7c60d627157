"""Types of the values of flags, with their limits.

A type converts a flag's text, and raises argparse.ArgumentTypeError if the text is not valid.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from distributed_training.files.user_files import shown
from distributed_training.rank_shares import AUTO

Number = TypeVar("Number", int, float)
REDUCE_DTYPES = ("bf16", "fp16", "fp32")
MOST_STEPS = 99_999_999  # eight digits, as in the names of checkpoint folders


def _number(
    kind: Callable[[str], Number], is_valid: Callable[[Number], bool], what: str, text: str
) -> Number:
    with contextlib.suppress(ValueError):
        if is_valid(value := kind(text)):
            return value
    raise argparse.ArgumentTypeError(f"{shown(text)} is not {what}")


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a type for whole numbers from `low` to `high`, also with a decimal point (3.0)."""
    what = f"a whole number from {low} to {high:,}"
    return partial(
        _number, lambda text: int(text.removesuffix(".0")), lambda x: low <= x <= high, what
    )


def real(high: float, zero: bool = False, below: bool = False) -> Callable[[str], float]:
    """Return a type for numbers above 0 (or 0, if `zero`) to `high` (or below it, if `below`)."""

    def is_valid(x: float) -> bool:
        return 0 < x < high or (zero and x == 0) or (not below and x == high)

    limits = f"{'from' if zero else 'above'} 0 {'and below' if below else 'to'} {high:g}"
    return partial(_number, float, is_valid, f"a number {limits}")


# The limits are far above any useful value, and low enough for every loop, product and conversion.
positive_int, natural_int = whole(1, 10**9), whole(0, 10**9)
tokens = whole(1, 10**15)  # or sequences of a corpus
batch, ranks, rank_of_adapters = whole(1, 2**20), whole(1, 2**17), whole(1, 2**16)
block_length = whole(2, 2**24)  # a token and its successor
steps = epochs = max_steps = whole(1, MOST_STEPS)
seconds = whole(1, 2_000_000)  # must fit 32 bits in milliseconds
positive_float, natural_float = real(1e9), real(1e9, zero=True)
probability = real(1, zero=True, below=True)


def batch_or_auto(text: str) -> int | str:
    """Parse a micro-batch, or "auto"."""
    return text if text == AUTO else batch(text)


def boolean(text: str) -> bool:
    """Parse the value of a switch: --compile and --compile True are the same."""
    if (word := text.lower()) not in ("true", "1", "yes", "false", "0", "no"):
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither true nor false")
    return word in ("true", "1", "yes")


# Other names of values, those of Trainer and accelerate; a program may give False for no.
VALUES = {
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    "adamw_bnb_8bit": "adamw_8bit",
    "false": "no",
}


def choice(text: str) -> str:
    """Parse one of several words, whose names argparse checks."""
    return VALUES.get(text, text)


def precision(text: str) -> str:
    """Parse the value of --precision."""
    return "fp32" if choice(text) == "no" else text


def reduce_dtype(text: str) -> str:
    """Parse the value of --reduce_dtype."""
    if (word := text.lower()) not in REDUCE_DTYPES:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not in {', '.join(REDUCE_DTYPES)}")
    return word


def label(text: str) -> str:
    """Check a name, of a column for example: not empty, UTF-8, without control characters."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; is a variable of the shell not set?")
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]|.{4000}", text):
        problem = "is too long, has control characters, or is not UTF-8"
        raise argparse.ArgumentTypeError(f"{shown(text)} {problem}")
    return text


def place(text: str) -> str:
    """Check a path or a name on the hub, and replace ~, which no shell does in a run file."""
    return os.path.expanduser(label(text))


def path(text: str) -> Path:
    """Check a path, as `place` does, and convert it."""
    return Path(place(text))


def path_or_switch(on: object, off: object) -> Callable[[str], object]:
    """Return a type for a path, or true and false, which become `on` and `off`."""

    def parse(text: str) -> object:
        if (word := text.lower()) in ("true", "false"):
            return on if word == "true" else off
        if word in ("yes", "no", "on", "off"):
            raise argparse.ArgumentTypeError(f"{text}: write true or false, or a path (./{text})")
        return place(text)

    return parse


file_or_switch, checkpoint = path_or_switch(True, False), path_or_switch("", None)


def tags(text: str) -> tuple[str, ...]:
    """Parse words with commas between; duplicates are removed."""
    return tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def some_of(known: str, synonyms: dict[str, str]) -> Callable[[str], tuple[str, ...]]:
    """Return a type for several known words, with commas or spaces between.

    Args:
        synonyms: other texts of the whole value.
    """

    def parse(text: str) -> tuple[str, ...]:
        words = synonyms.get(text.lower(), text).replace(",", " ").split()
        if unknown := [word for word in words if word not in known.split()]:
            problem = f"{shown(unknown[0])} is not in {', '.join(known.split())}"
            raise argparse.ArgumentTypeError(problem)
        return tuple(dict.fromkeys(words))

    return parse


def _whole_if_possible(value: float) -> float:
    return int(value) if value.is_integer() else value


def positive_floats(text: str) -> tuple[float, ...]:
    """Parse numbers above 0 with commas between, such as 16,12,8."""
    return tuple(_whole_if_possible(positive_float(each.strip())) for each in text.split(","))


def list_of_steps(text: str) -> tuple[int, ...]:
    """Parse numbers of optimizer steps with commas between, such as 1234,1300."""
    return tuple(sorted({steps(each.strip()) for each in text.split(",")}))


def shares(text: str) -> tuple[float, ...] | str:
    """Parse the shares of the ranks, such as 3,2,1; or "auto"."""
    return text if text == AUTO else positive_floats(text)


reporters = some_of("tensorboard wandb", {"none": ""})
# The options of --fsdp, as Trainer has them; empty, as its default, is no FSDP.
fsdp_options = some_of(
    "full_shard shard_grad_op no_shard hybrid_shard hybrid_shard_zero2 auto_wrap offload",
    {"false": "", "true": "full_shard auto_wrap"},
)
