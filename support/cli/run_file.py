"""Run files (--config): the flags of the command line, in YAML.

The keys are the names of the flags, also those that other trainers use. The sections `training:`
and `distributed:` only group keys.
"""

from __future__ import annotations

import math

from support.cli.argument_types import Parser
from support.cli.arguments import Arguments
from support.cli.flags import DEFAULTS
from support.errors import UserError
from support.files.user_files import printable, read_yaml, shown

SECTIONS = ("training", "distributed")
# Flags that --print_config leaves out: they are no settings, or have set another flag.
NOT_SHOWN = """
    config print_config check prefetch show_sample prove local_rank fsdp bf16 fp16 use_peft do_train
    do_eval eval_strategy save_strategy deepspeed
    """.split()


def read_run_file(path: str, parser: Parser) -> list[str]:
    """Read a run file, and return arguments of the command line such as "--lr=1e-4".

    Raises:
        UserError: the file cannot be read or is not YAML.
    """
    content = read_yaml("--config", path)
    for section in SECTIONS:
        values = content.pop(section, None) or {}
        if not isinstance(values, dict):
            raise UserError(f"{shown(path)}: {section} is a section: indent its keys below it.")
        content |= values
    actions = {option[2:]: a for option, a in parser._option_string_actions.items()}
    arguments: list[str] = []
    for key, value in content.items():
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list | set) for item in items):
            raise UserError(f"{shown(path)}: {key} cannot have nested values.")
        values = list(map(str, items)) if isinstance(value, list) else []
        if any(text.startswith("-") for text in values):
            raise UserError(f"{shown(path)}: {key} cannot be {shown(value)}.")
        if values and key in actions and actions[key].nargs in ("+", "*"):
            arguments += [f"--{key}", *values]
        elif value is not None:
            text = ",".join(values) if isinstance(value, list) else str(value)
            arguments.append(f"--{key}={text.lower() if isinstance(value, bool) else text}")
    return arguments


def settings_of(args: Arguments) -> dict:
    """Return the resolved flags by name, without those that are off or unset."""
    settings = {}
    for name in (name for name in DEFAULTS if name not in NOT_SHOWN):
        value = getattr(args, name)
        is_off = value is None or value is False or value == []
        if not is_off or DEFAULTS[name] is True:
            settings[name] = value
    if args.fsdp.words:
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
        lines.append(f"{text}  # {printable(args.sources.get(name, 'default'))}\n")
    return "".join(lines)
