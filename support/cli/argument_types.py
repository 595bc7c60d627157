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
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from support.cli.arguments import Arguments
from support.errors import UserError
from support.files.user_files import did_you_mean, shown

REPORTERS = ("tensorboard", "wandb")
# Words in the value of --fsdp.
FSDP_OPTIONS = """
    full_shard shard_grad_op no_shard hybrid_shard hybrid_shard_zero2 auto_wrap offload
    """.split()
# --resume without a path. Not a string, so that `--resume "$UNSET"`, an empty path, is an error.
NEWEST = True


# ------------------------------------------------------------------------------------------ numbers


def whole(low: int, high: int, note: str = ""):
    """Return a type for whole numbers from `low` to `high`, both included.

    A larger number is a typing error and would make a later loop too long or overflow.

    Args:
        note: text at the end of the error message.
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # raised for thousands of digits, too
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not a whole number from {low} to {high:,}{note}"
            )
        return value

    return parse


def real(high: float, zero: bool = False):
    """Return a type for numbers above 0 and up to `high`; `zero` allows 0, too."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value <= high or (zero and value == 0)):
            expected = "a number from 0" if zero else "a number above 0 and up"
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {expected} to {high:g}")
        return value

    return parse


# The limits are far above any useful value, and low enough for every loop, product and conversion.
positive_int = whole(1, 10**9)
natural_int = whole(0, 10**9)
sequences = whole(1, 10**12)  # of a corpus
tokens = whole(1, 10**15)
batch = whole(1, 2**20)
MOST_STEPS = 99_999_999  # eight digits, as in the names of checkpoint folders
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


def epochs(text: str) -> int:
    """Parse a number of epochs; other trainers write whole ones as 3.0."""
    return _epochs(re.sub(r"\.0*$", "", text))


def probability(text: str) -> float:
    """Parse a dropout probability p, 0 <= p < 1."""
    value = natural_float(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a probability below 1")
    return value


def share(text: str) -> float:
    """Parse a share p of the corpus, 0 < p < 1."""
    value = positive_float(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a share between 0 and 1 (--no_eval evaluates on nothing)"
        )
    return value


# ----------------------------------------------------------------------------- switches and choices


def boolean(text: str) -> bool:
    """Parse the value of a switch: --compile and --compile True are the same."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in value:
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither true nor false")
    return value[text.lower()]


def renamed(names: dict[str, str]):
    """Return a type that converts other programs' names; argparse checks the choices."""
    return lambda text: names.get(text, text)


scheduler = renamed({"constant_with_warmup": "constant"})  # Trainer's
precision = renamed({"no": "fp32"})  # accelerate's
optimizer = renamed(  # Trainer's
    {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
        "adamw_bnb_8bit": "adamw_8bit",
    }
)


def fsdp_options(text: str) -> str:
    """Check the options of --fsdp, as Trainer has them; empty, as its default, is no FSDP."""
    words = "" if text.lower() == "false" else text.replace(",", " ")
    words = "full_shard auto_wrap" if text.lower() == "true" else words
    for word in words.split():
        if word not in FSDP_OPTIONS:
            raise argparse.ArgumentTypeError(f"{shown(word)} is none of {', '.join(FSDP_OPTIONS)}")
    return " ".join(words.split())


# ---------------------------------------------------------------------------------- names and texts


def word(text: str) -> str:
    """Check a name, of a column for example: not empty, and printable."""
    _not_blank(text)
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} has control characters, or bytes that are not UTF-8"
        )
    return text


def name(text: str) -> str:
    """Check a path or a name on the hub, and replace ~ by the home folder.

    The shell replaces it neither in a run file nor, in some shells, in --output_dir=~/runs.
    """
    expanded = os.path.expanduser(word(text))
    if expanded.startswith("~"):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} begins with the home folder of an unknown user"
        )
    encoded = os.fsencode(expanded)
    if len(encoded) > 4000 or any(len(part) > 255 for part in encoded.split(b"/")):
        raise argparse.ArgumentTypeError(f"{shown(text)} is longer than a file name may be")
    return expanded


def checkpoint(text: str) -> str | bool | None:
    """Check the value of --resume: a path, or true and false as Trainer takes them."""
    return {"true": NEWEST, "false": None}.get(text.lower(), name(text))


def path(text: str) -> Path:
    """Check a path, as `name` does, and convert it."""
    return Path(name(text))


def prompt(text: str) -> str:
    """Check a text that the model continues: not empty, and UTF-8."""
    _not_blank(text)
    if any(unicodedata.category(character) == "Cs" for character in text):
        raise argparse.ArgumentTypeError("the text is not UTF-8")
    return text


def layer_names(text: str) -> str:
    """Check the comma-separated layer names of --lora_targets."""
    if not word(text).replace(",", "").strip():
        raise argparse.ArgumentTypeError("it names no layer")
    return text


def name_patterns(text: str) -> str:
    """Check the comma-separated patterns of --include."""
    if not all(pattern.strip() for pattern in word(text).split(",")):
        raise argparse.ArgumentTypeError("it has an empty pattern")
    return text


def tags(text: str) -> list[str]:
    """Parse the comma-separated words of --tags."""
    return list(dict.fromkeys(filter(None, map(str.strip, word(text).split(",")))))


def repository(text: str) -> str:
    """Check a name on the hub: NAME or OWNER/NAME."""
    part = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
    if not re.fullmatch(f"(?:{part}/)?{part}", word(text)) or "--" in text or ".." in text:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no name of a repository, such as my-model or organization/my-model"
        )
    return text


def reporters(text: str) -> list[str]:
    """Parse the comma-separated trackers of --report_to; duplicates and "none" are removed."""
    names = list(
        dict.fromkeys(name.strip() for name in text.split(",") if name.strip() not in ("", "none"))
    )
    for name in names:
        if name not in REPORTERS:
            guess = did_you_mean(name, REPORTERS) or f" (there are {', '.join(REPORTERS)})"
            raise argparse.ArgumentTypeError(f"{shown(name)} is no tracker{guess}")
    return names


def _not_blank(text: str) -> None:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; is a variable of the shell not set?")


# --------------------------------------------------------------------------- the flags' parser


def flag(name: str, kind, text: str, **options) -> tuple[str, dict]:
    """Return a row for a flag with a value.

    Args:
        name: its name, and after a space the placeholder of its value in --help if it has another
            one than its name in capitals.
        kind: a type of this module, or a tuple with the allowed values.
        text: its help, to which the default is appended.
        options: further arguments of argparse's `add_argument`.
    """
    name, _, metavar = name.partition(" ")
    if options.get("default") not in (None, [], argparse.SUPPRESS) and "(default:" not in text:
        text += " (default: %(default)s)"
    options |= {"metavar": metavar} if metavar else {}
    return name, {"choices" if isinstance(kind, tuple) else "type": kind, "help": text, **options}


def switch(name: str, text: str, default: bool | None = False) -> tuple[str, dict]:
    """Return a row for a flag that is off by default, and may have the value true or false."""
    return name, {"nargs": "?", "const": True, "type": boolean, "default": default, "help": text}


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
        if names := re.match("argument ((--[a-z0-9_]+)(?:/--[a-z0-9_]+)+): ", message):
            # argparse lists all names of the flag: keep the one that was typed.
            typed = {argument.partition("=")[0] for argument in self._typed}
            used = [name for name in names[1].split("/") if name in typed]
            message = f"argument {(used or [names[2]])[-1]}{message[names.end(1) :]}"
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
        raise UserError(f"{shown(message, 400)} (--help lists every flag)")

    def parse_known_args(self, args=None, namespace=None):
        """Parse as argparse does, into `Arguments` that are not frozen."""
        self._typed = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, Arguments() if namespace is None else namespace)

    def parse_args(self, args=None, namespace=None) -> Arguments:  # type: ignore[override]
        """Parse as argparse does, into frozen `Arguments`.

        Raises:
            UserError: an argument is unknown (see `refuse_unknown`), or a value is not valid.
        """
        flags, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse_unknown(unknown[0])
        return flags.freeze()

    def refuse_unknown(self, argument: str) -> None:
        """Report an argument that is no flag, or the value of none.

        Raises:
            UserError: always; with the most similar flag, if one is similar enough.
        """
        if not argument.startswith("-"):
            self.error(f"{shown(argument)} is the value of no flag{self._advice_on(argument)}")
        flag = argument.split("=")[0]
        flags = [option for action in self._actions for option in action.option_strings]
        self.error(f"unknown argument {shown(argument)}{did_you_mean(flag, flags)}")

    def _advice_on(self, argument: str) -> str:
        """Return what to write instead of an argument that is the value of no flag, if known."""
        is_run_file = argument.endswith((".json", ".yaml", ".yml"))
        if is_run_file and "--config" in self._option_string_actions:
            return f": did you mean --config {shown(argument)}?"
        return ": write several with commas between" if argument in REPORTERS else ""
