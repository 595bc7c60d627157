"""A parser of command lines whose errors are one line, for the run and for all scripts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distributed_training.about import command_of, name_of
from distributed_training.errors import UserError
from distributed_training.files.user_files import did_you_mean, shown

# Ends the message about a flag, on a command line.
HINT = " (--help lists every flag)"


class Options(argparse.Namespace):
    """The values of a script's flags."""

    def replace(self, **values) -> Options:
        """Return a copy with other values."""
        return Options(**{**vars(self), **values})


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError with one line, and suggests a similar flag."""

    def __init__(self, unknown_advice: str = "", **options) -> None:
        """Create an ArgumentParser; `unknown_advice` is about a flag that is similar to none."""
        super().__init__(**options)
        self._unknown_advice = unknown_advice

    @classmethod
    def of_script(cls, doc: str) -> Parser:
        """Return the parser of a script; its --help shows the docstring of the script."""
        program = f"scripts/{Path(sys.argv[0]).name}"
        doc = doc.replace(f"python {program}", command_of(program))
        about, _, details = doc.partition("\n\n")
        raw = argparse.RawDescriptionHelpFormatter
        return cls(
            prog=name_of(program),
            description=about,
            epilog=details,
            allow_abbrev=False,
            formatter_class=raw,
        )

    def error(self, message: str):
        """Raise a UserError."""
        raise UserError(f"{shown(message, 400)}{HINT}")

    def parse_args(self, args=None, namespace=None) -> Options:  # type: ignore[override]
        """Parse as argparse does, into `Options`.

        Raises:
            UserError: an argument is unknown, or a value is not valid.
        """
        options, unknown = self.parse_known_args(args, namespace or Options())
        if unknown and not unknown[0].startswith("-"):
            self.error(f"{shown(unknown[0])} is not the value of a flag")
        elif unknown:
            flag = unknown[0].partition("=")[0]  # the value may be a secret
            advice = did_you_mean(flag, self._option_string_actions) or self._unknown_advice
            self.error(f"unknown argument {shown(flag)}{advice}")
        return options
