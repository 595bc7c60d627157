"""The settings of a run for a program: from a list of arguments, or from values by name."""

import re
from collections.abc import Mapping, Sequence

from distributed_training.cli.flags import build_parser
from distributed_training.cli.given import read_flags
from distributed_training.cli.parse import complete
from distributed_training.cli.parser import HINT
from distributed_training.cli.run_file import as_arguments
from distributed_training.errors import UserError
from distributed_training.files.user_files import shown
from distributed_training.settings.settings import AsGiven, Settings

Flags = Sequence[str] | Mapping[str, object]  # see `resolve_settings`


def resolve_settings(flags: Flags) -> Settings:
    """Return the settings of a run: the flags, the files that they name, and all defaults.

    Nothing is written, downloaded or printed. A run checks only when it starts whether the model,
    the data and the folders exist.

    Args:
        flags: arguments of a command line, such as ["--strategy", "zero2"]; or values by the names
            of the flags, as in a run file: {"strategy": "zero2", "batch_size": 8}. docs/FLAGS.md
            lists the flags with their units. A value of None leaves a flag out.
    Returns:
        The settings, which cannot be changed. Each flag is a field of a section, such as
        `settings.training.batch_size`; `settings.flags()` returns all flags by name.
    Raises:
        UserError: a flag is unknown, has an invalid value or contradicts another one, or a file
            that a flag names cannot be read.
    """
    return complete(_read_given(flags), None).settings


def change_settings(settings: Settings, flags: Flags, world_size: int | None = None) -> Settings:
    """Return settings with some flags changed, and what follows from them computed anew.

    Args:
        flags: those that change; see `resolve_settings`.
        world_size: number of ranks; None: as the launcher has set it.
    Raises:
        UserError: see `resolve_settings`.
    """
    before, changed = settings.as_given, _read_given(flags)
    as_given = AsGiven({**before.values, **changed.values}, {**before.sources, **changed.sources})
    return complete(as_given, settings.parallelism.choice, world_size).settings


def _read_given(flags: Flags) -> AsGiven:
    """Return the flags that are given.

    Raises:
        UserError: a flag is unknown or has an invalid value, or it would end this program.
    """
    if isinstance(flags, str) or not isinstance(flags, Mapping | Sequence):
        raise UserError(
            f"The flags are {shown(repr(flags))}: use a dictionary, or a list of arguments."
        )
    if isinstance(flags, Mapping):
        names = [str(name).removeprefix("--") for name in flags]
        if len({*names}) < len(names):
            raise UserError(f"A flag is given twice, with and without --: {', '.join(names)}.")
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in zip(names, flags.values(), strict=True)
        }
        file = values.pop("config", None)  # the other flags override it, as on a command line
        arguments = [f"--config={file}"] if file else []
        arguments += as_arguments(values, "The flags", build_parser())
    else:
        arguments = list(map(str, flags))
    for argument in arguments:
        if re.fullmatch("-h+|--help|--version", argument):
            raise UserError(f"{argument} prints a text and ends the program: leave it out.")
    try:
        return AsGiven(*read_flags(arguments))
    except UserError as error:
        error.args = (str(error).removesuffix(HINT),)  # a program has no --help
        raise
