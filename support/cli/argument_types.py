"""Types of command-line flags with their limits, and a parser whose errors are one line.

A type is a function that converts a flag's text, and raises argparse.ArgumentTypeError if the text
is not valid.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from support.errors import UserError
from support.files.user_files import did_you_mean, shown

REPORTERS = ("tensorboard", "wandb")
# Words in the value of --fsdp.
FSDP_OPTIONS = """
    full_shard shard_grad_op no_shard hybrid_shard hybrid_shard_zero2 auto_wrap offload
    """.split()
NEWEST = ""  # --resume without a path; an empty path from the shell is an error
MOST_STEPS = 99_999_999  # eight digits, as in the names of checkpoint folders


def whole(low: int, high: int, note: str = "") -> Callable[[str], int]:
    """Return a type for whole numbers from `low` to `high`, both included.

    Args:
        note: text at the end of the error message.
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not a whole number from {low} to {high:,}{note}"
            )
        return value

    return parse


def real(high: float, zero: bool = False, below: bool = False, note: str = "") -> Callable:
    """Return a type for numbers above 0 and up to `high`.

    Args:
        zero: allow 0.
        below: exclude `high`.
        note: text at the end of the error message.
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value < high or (zero and value == 0) or (not below and value == high)):
            limits = f"{'from' if zero else 'above'} 0 {'and below' if below else 'to'} {high:g}"
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a number {limits}{note}")
        return value

    return parse


# The limits are far above any useful value, and low enough for every loop, product and conversion.
positive_int = whole(1, 10**9)
natural_int = whole(0, 10**9)
sequences = whole(1, 10**12)  # of a corpus
tokens = whole(1, 10**15)
batch = whole(1, 2**20)
steps = whole(1, MOST_STEPS, ", and shares of all steps are not used")
max_steps = whole(1, MOST_STEPS, " (leave it out for no limit)")
warmup_steps = whole(0, MOST_STEPS, " (--warmup_ratio takes a share of all steps)")
_epochs = whole(1, MOST_STEPS, " (--max_steps can stop within an epoch)")
ranks = whole(1, 2**17)
rank_of_adapters = whole(1, 2**16)
block_length = whole(2, 2**24, " (a block holds a token and its successor)")
seed = whole(0, 2**63 - 1)
seconds = whole(1, 2_000_000)  # must fit 32 bits in milliseconds
positive_float = real(1e9)
natural_float = real(1e9, zero=True)
rate = real(1000)
ratio = real(1, zero=True)
probability = real(1, zero=True, below=True)
share = real(1, below=True, note=" (--no_eval evaluates on nothing)")


def epochs(text: str) -> int:
    """Parse a number of epochs; other trainers write whole ones as 3.0."""
    return _epochs(re.sub(r"\.0*$", "", text))


def boolean(text: str) -> bool:
    """Parse the value of a switch: --compile and --compile True are the same."""
    value = {**dict.fromkeys(("true", "1", "yes"), True)}
    value |= dict.fromkeys(("false", "0", "no"), False)
    if text.lower() not in value:
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither true nor false")
    return value[text.lower()]


def opposite(text: str) -> bool:
    """Parse the value of --no_NAME, for the flag NAME."""
    return not boolean(text)


def renamed(names: dict[str, str]) -> Callable[[str], str]:
    """Return a type that converts other programs' names; argparse checks the choices."""
    return lambda text: names.get(text, text)


scheduler = renamed({"constant_with_warmup": "constant"})  # Trainer's
precision = renamed({"no": "fp32", "false": "fp32"})  # accelerate's; YAML reads no as false
when = renamed({"false": "no"})
optimizer = renamed(  # Trainer's
    {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
        "adamw_bnb_8bit": "adamw_8bit",
    }
)


def word(text: str) -> str:
    """Check a name, of a column for example: not empty, UTF-8, without control characters."""
    prompt(text)
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise argparse.ArgumentTypeError(f"{shown(text)} has control characters")
    return text


def prompt(text: str) -> str:
    """Check a text that the model continues: not empty, and UTF-8."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; is a variable of the shell not set?")
    if re.search("[\ud800-\udfff]", text):
        raise argparse.ArgumentTypeError("the text is not UTF-8")
    return text


def name(text: str) -> str:
    """Check a path or a name on the hub, and replace ~ by the home folder.

    The shell replaces it neither in a run file nor, in some shells, in --output_dir=~/runs.
    """
    expanded = os.path.expanduser(word(text))
    if len(expanded) > 4000 or any(len(part) > 255 for part in os.fsencode(expanded).split(b"/")):
        raise argparse.ArgumentTypeError(f"{shown(text)} is longer than a file name may be")
    return expanded


def path(text: str) -> Path:
    """Check a path, as `name` does, and convert it."""
    return Path(name(text))


def checkpoint(text: str) -> str | None:
    """Check the value of --resume: a path, or true and false as Trainer takes them."""
    return {"true": NEWEST, "false": None}.get(text.lower(), name(text))


def file_or_switch(text: str) -> str | bool:
    """Check the value of --deepspeed: a path, or true and false."""
    return {"true": True, "false": False}.get(text.lower(), name(text))


def words(text: str) -> str:
    """Check names or patterns with commas between: not empty."""
    if not all(part.strip() for part in word(text).split(",")):
        raise argparse.ArgumentTypeError("there is nothing before or after a comma")
    return text


layer_names = words


def tags(text: str) -> list[str]:
    """Parse words with commas between; duplicates are removed."""
    return list(dict.fromkeys(filter(None, map(str.strip, word(text).split(",")))))


def reporters(text: str) -> list[str]:
    """Parse the comma-separated trackers of --report_to; duplicates and "none" are removed."""
    names = [name for name in tags(text) if name != "none"] if text.strip() else []
    for name in names:
        if name not in REPORTERS:
            guess = did_you_mean(name, REPORTERS) or f" (there are {', '.join(REPORTERS)})"
            raise argparse.ArgumentTypeError(f"{shown(name)} is not a tracker{guess}")
    return names


def fsdp_options(text: str) -> str:
    """Check the options of --fsdp, as Trainer has them; empty, as its default, is no FSDP."""
    options = {"false": "", "true": "full_shard auto_wrap"}.get(text.lower(), text)
    options = options.replace(",", " ")
    for option in options.split():
        if option not in FSDP_OPTIONS:
            raise argparse.ArgumentTypeError(f"{shown(option)} is not in {', '.join(FSDP_OPTIONS)}")
    return " ".join(options.split())


def repository(text: str) -> str:
    """Check a name on the hub: NAME or OWNER/NAME."""
    if not re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", word(text)):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not the name of a repository, such as my-model or owner/my-model"
        )
    return text


# --------------------------------------------------------------------------------------- the parser


class Options(argparse.Namespace):
    """The values of a script's flags."""

    def replace(self, **values) -> Options:
        """Return a copy with other values."""
        return Options(**{**vars(self), **values})


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError with one line, and suggests a similar spelling."""

    _typed: Sequence[str] = ()

    @classmethod
    def of_script(cls, doc: str) -> Parser:
        """Return the parser of a script; its --help shows the docstring of the script."""
        about, _, details = doc.partition("\n\n")
        raw = argparse.RawDescriptionHelpFormatter
        return cls(description=about, epilog=details, allow_abbrev=False, formatter_class=raw)

    def error(self, message: str):
        """Raise a UserError with the message, which names the flag as it was typed."""
        if names := re.match("argument ((--[a-z0-9_]+)(?:/--[a-z0-9_]+)+): ", message):
            typed = {argument.partition("=")[0] for argument in self._typed}
            used = [name for name in names[1].split("/") if name in typed]
            message = f"argument {(used or [names[2]])[-1]}{message[names.end(1) :]}"
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
        raise UserError(f"{shown(message, 400)} (--help lists every flag)")

    def parse_known_args(self, args=None, namespace=None):
        """Parse as argparse does, into `Options`."""
        self._typed = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, Options() if namespace is None else namespace)

    def parse_args(self, args=None, namespace=None) -> Options:  # type: ignore[override]
        """Parse as argparse does, into `Options`.

        Raises:
            UserError: an argument is unknown (see `refuse_unknown`), or a value is not valid.
        """
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse_unknown(unknown[0])
        return options

    def refuse_unknown(self, argument: str) -> None:
        """Report an argument that is neither a flag nor the value of one.

        Raises:
            UserError: always; with the most similar flag, if one is similar enough.
        """
        flags = [option for action in self._actions for option in action.option_strings]
        if argument.startswith("-"):
            unknown = argument.partition("=")[0]  # the value may be a secret
            advice = did_you_mean(unknown, flags)
            if "--config" in flags and not advice:
                advice = ": see docs/COMING_FROM.md for flags of other trainers"
            self.error(f"unknown argument {shown(unknown)}{advice}")
        advice = ": write several with commas between" if argument in REPORTERS else ""
        if argument.endswith((".json", ".yaml", ".yml")) and "--config" in flags:
            advice = f": did you mean --config {shown(argument)}?"
        self.error(f"{shown(argument)} is not the value of a flag{advice}")
