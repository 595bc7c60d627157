"""What the command lines have in common: types of flags with their limits, and errors of one line."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import unicodedata
from pathlib import Path

from support.errors import UserError
from support.files.user_files import shown

REPORTERS = ("tensorboard", "wandb")
CLOSE = 0.75  # similarity from which a guess is better than none: --hostfile is no --profile


# ------------------------------------------------------------------------------------------ numbers


def whole(low: int, high: int, note: str = ""):
    """A type for whole numbers from `low` to `high`; a larger one is a slip, and loops or overflows
    somewhere.
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # also for thousands of digits
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not a whole number from {low} to {high:,}{note}"
            )
        return value

    return parse


def real(high: float, zero: bool = False):
    """A type for numbers above 0 (`zero`: or 0) and up to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value <= high or (zero and value == 0)):
            what = "a number from 0" if zero else "a number above 0 and up"
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {what} to {high:g}")
        return value

    return parse


# Limits are far above what anybody uses, and low enough that no loop, product or conversion
# suffers.
positive_int = whole(1, 10**9)
natural_int = whole(0, 10**9)
sequences = whole(1, 10**12)  # in a corpus
batch = whole(1, 2**20)
steps = whole(1, 99_999_999)  # eight digits, as the folders of checkpoints have
natural_steps = whole(0, 99_999_999)
ranks = whole(1, 2**17)
rank_of_adapters = whole(1, 2**16)
block_length = whole(2, 2**24, " (a block holds a token and its successor)")
seed = whole(0, 2**63 - 1)
seconds = whole(1, 2_000_000)  # in milliseconds it must fit 32 bits
positive_float = real(1e9)
natural_float = real(1e9, zero=True)
rate = real(1000)


def probability(text: str) -> float:
    """A dropout rate: 0 <= p < 1."""
    value = natural_float(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a probability below 1")
    return value


def share(text: str) -> float:
    """A part of something: 0 < p < 1."""
    value = positive_float(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a share between 0 and 1 (--no_eval evaluates on nothing)"
        )
    return value


# ---------------------------------------------------------------------------------- names and texts


def name(text: str) -> str:
    """A path, or a name on the hub: not empty, and something that a file system can hold."""
    _not_blank(text)
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} has control characters, or bytes that are not UTF-8"
        )
    encoded = os.fsencode(text)
    if os.path.expanduser(text).startswith("~"):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} begins with the home folder of an unknown user"
        )
    if len(encoded) > 4000 or any(len(part) > 255 for part in encoded.split(b"/")):
        raise argparse.ArgumentTypeError(f"{shown(text)} is longer than a file name may be")
    return text


def path(text: str) -> Path:
    """A `name` that is a path."""
    return Path(name(text))


def prompt(text: str) -> str:
    """A text to continue."""
    _not_blank(text)
    if any(unicodedata.category(character) == "Cs" for character in text):
        raise argparse.ArgumentTypeError("the text is not UTF-8")
    return text


def layer_names(text: str) -> str:
    """A comma list of --lora_targets."""
    if not name(text).replace(",", "").strip():
        raise argparse.ArgumentTypeError("it names no layer")
    return text


def name_patterns(text: str) -> str:
    """A comma list of --include."""
    if not all(pattern.strip() for pattern in name(text).split(",")):
        raise argparse.ArgumentTypeError("it has an empty pattern")
    return text


def precision(text: str) -> str:
    """Of the arithmetic; "no" is accelerate's word for fp32."""
    return "fp32" if text == "no" else text


def reporters(text: str) -> list[str]:
    """A comma list of --report_to."""
    names = list(
        dict.fromkeys(name.strip() for name in text.split(",") if name.strip() not in ("", "none"))
    )
    for name in names:
        if name not in REPORTERS:
            near = difflib.get_close_matches(name, REPORTERS, n=1)
            guess = f": did you mean {near[0]}?" if near else f" (there are {', '.join(REPORTERS)})"
            raise argparse.ArgumentTypeError(f"{shown(name)} is no tracker{guess}")
    return names


def _not_blank(text: str) -> None:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; is a variable of the shell not set?")


# --------------------------------------------------------------------------------------- the parser


class Parser(argparse.ArgumentParser):
    """argparse, with an error of one line, and a guess at what a misspelt value was meant to be."""

    def error(self, message: str):
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(choice[1], re.findall(r"[\w.-]+", choice[2]), n=1)
            message += f": did you mean {near[0]}?" if near else ""
        raise UserError(f"{shown(message, 400)} (--help lists every flag)")

    def parse_args(self, args=None, namespace=None):
        """As argparse has it, with `refuse_unknown`."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse_unknown(unknown[0])
        return found

    def refuse_unknown(self, argument: str) -> None:
        """
        Raises:
            UserError: about an argument that no flag takes, with what was probably meant.
        """
        flag = argument.split("=")[0]
        flags = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(flag, flags, n=1, cutoff=CLOSE)
        self.error(
            f"unknown argument {shown(argument)}" + (f": did you mean {near[0]}?" if near else "")
        )
