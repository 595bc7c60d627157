"""Run files (--config): the flags of the command line, in YAML.

The keys are the names of the flags; names that other trainers use for them are accepted, too. The
sections `training:` and `distributed:` only group keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from support.cli.argument_types import Parser
from support.cli.arguments import Arguments
from support.cli.flags import DEFAULTS
from support.errors import UserError
from support.files.user_files import did_you_mean, read_yaml, shown

SECTIONS = ("training", "distributed")
NOT_IN_FILES = ("help", "version", "config")
SEPARATOR = {"fsdp": " "}  # of the words of a list; a comma for other flags
# Fields of `Arguments` that --print_config leaves out.
NOT_SHOWN = frozenset(
    """
    config print_config check prefetch show_sample prove local_rank given sources mixture
    ds_config_dict hub_offline hub_problem fsdp bf16 fp16 use_peft do_train do_eval eval_strategy
    save_strategy deepspeed use_deepspeed use_fsdp
    """.split()
)


def read_run_file(path: str, parser: Parser) -> list[str]:
    """Read a run file and convert it to command-line arguments.

    Args:
        parser: the parser with all flags.
    Returns:
        Arguments such as "--lr=1e-4".
    Raises:
        UserError: the file cannot be read or is not YAML, a key is unknown, or its value has the
            wrong type.
    """
    actions = {
        option[2:]: action
        for option, action in parser._option_string_actions.items()
        if option.startswith("--") and option[2:] not in NOT_IN_FILES
    }
    arguments: list[str] = []
    for key, value in _without_sections(read_yaml("--config", path), path):
        if key not in actions:
            guess = did_you_mean(str(key), actions) or " (--help lists all; docs/COMING_FROM.md)."
            raise UserError(f"{shown(path)}: unknown key {shown(key)}{guess}")
        if value is None:
            continue
        action = actions[key]
        parts = list(map(str, value)) if isinstance(value, list) else []
        if isinstance(value, dict) or any(part.startswith("-") for part in parts):
            raise UserError(f"{shown(path)}: {key} cannot be {shown(value)}.")
        if parts and action.nargs in ("+", "*"):
            arguments += [f"--{key}", *parts]
            continue
        value = SEPARATOR.get(action.dest, ",").join(parts) if isinstance(value, list) else value
        value = str(value).lower() if isinstance(value, bool) else value
        arguments.append(f"--{key}={value}")
    return arguments


def _without_sections(content: dict, path: str) -> Iterator[tuple[str, object]]:
    """Yield the keys and values of a run file, those in SECTIONS as if there were no sections."""
    for key, value in content.items():
        if key not in SECTIONS:
            yield key, value
        elif isinstance(value, dict):
            yield from value.items()
        else:
            raise UserError(
                f"{shown(path)}: {key} is a section; write its keys below it, indented."
            )


def settings_of(args: Arguments) -> dict:
    """Return the resolved flags by name, without those that are off or unset."""
    # Flags that are off or unset need no line (0 is a value), except those that are on by default.
    settings = {
        name: value
        for name, value in vars(args).items()
        if name not in NOT_SHOWN
        and not ((value is None or value is False or value == []) and DEFAULTS[name] is not True)
    }
    if args.fsdp and args.fsdp.words:
        settings["fsdp"] = args.fsdp.words
    if args.mixture:
        settings["dataset"] = [str(dataset) for dataset in args.mixture]
    return settings


def as_yaml(args: Arguments) -> str:
    """Return the resolved flags as YAML that --config can read.

    A comment after each value names its source: the default, a flag, or a file with its key.
    """
    import yaml

    lines = []
    for name, value in settings_of(args).items():
        value = True if name == "resume" and value == "" else value
        text = yaml.safe_dump({name: value}, allow_unicode=True, width=math.inf).rstrip()
        source = shown(args.sources.get(name, "default"))
        # The user's DeepSpeed file has an optimizer or a scheduler, which other flags contradict.
        unused = "# " if source.endswith(("its own optimizer", "its own scheduler")) else ""
        lines.append(f"{unused}{text}  # {source}\n")
    return "".join(lines)
