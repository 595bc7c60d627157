"""Run files (--config): the flags of the command line, in YAML.

The keys are the names of the flags; names that other trainers use for them are accepted, too. The
sections `training:` and `distributed:` only group keys. The file is converted to arguments that are
placed in front of the command line, so the command line overrides the file.
"""

from __future__ import annotations

import argparse
import difflib

from support.cli.argument_types import CLOSE
from support.errors import UserError
from support.files.user_files import read_yaml, shown

SECTIONS = ("training", "distributed")
# Names that other trainers use -> our flag; accepted in files and on the command line.
OTHER_NAMES = {
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "mixed_precision": "precision",
    "per_device_train_batch_size": "batch_size",
    "max_seq_length": "seq_length",
    "max_length": "seq_length",
    "model_name_or_path": "model",
    "model_name": "model",
    "deepspeed_config": "ds_config",
    "data_size": "num_samples",
}
SWITCHES = ("use_deepspeed", "use_fsdp")
# `deepspeed` is a key of run files, but stands for use_deepspeed or ds_config (see read_run_file).
NOT_IN_FILES = ("help", "version", "config", "deepspeed")
# Attributes that --print_config leaves out.
NOT_SHOWN = (
    "config",
    "print_config",
    "check",
    "prefetch",
    "local_rank",
    "given",
    "ds_config_dict",
    "hub_offline",
    "hub_problem",
    "fsdp",
    "use_deepspeed",
    "use_fsdp",
)


def read_run_file(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """Read a run file and convert it to command-line arguments.

    Args:
        path: the YAML file.
        parser: the parser with all flags; its actions say how a value becomes an argument.
    Returns:
        Arguments such as "--lr=1e-4".
    Raises:
        UserError: the file cannot be read or is not YAML, a key is unknown or given twice, a value
            has the wrong type, or switches contradict each other.
    """
    values = _flatten(read_yaml("--config", path), path)
    flags = {action.dest: action for action in reversed(parser._actions) if action.option_strings}
    for action in parser._actions:
        if action.option_strings in (["--no_eval"], ["--no_fused_gelu"]):
            flags[action.option_strings[0][2:]] = action
    for name in NOT_IN_FILES:
        del flags[name]
    settings: dict[str, object] = {}
    for key, value in values.items():
        name = OTHER_NAMES.get(key, key)
        if name == "deepspeed":  # true, false, or the path of a DeepSpeed file
            settings["use_deepspeed"] = value if isinstance(value, bool) else value is not None
            if isinstance(value, bool) or value is None:
                continue
            name = "ds_config"
        if name not in flags:
            matches = difflib.get_close_matches(key, [*flags, *OTHER_NAMES], n=1, cutoff=CLOSE)
            guess = f": did you mean {matches[0]}?" if matches else " (--help lists all)."
            raise UserError(f"{path}: unknown key {shown(key)}{guess}")
        if name in settings:
            raise UserError(f"{path} gives {name} twice, the second time as {key}: leave one out.")
        settings[name] = value
    _apply_switches(settings, path)
    arguments: list[str] = []
    for name, value in settings.items():
        arguments += _as_arguments(name, value, flags[name], path)
    return arguments


def _flatten(content: dict, path: str) -> dict:
    values: dict[str, object] = {}
    for key, value in content.items():
        inner = value if key in SECTIONS else {key: value}
        if not isinstance(inner, dict):
            raise UserError(f"{path}: {key} is a section; write its keys below it, indented.")
        for name, item in inner.items():
            if name in values:
                raise UserError(f"{path} gives {name} twice: leave one out.")
            values[name] = item
    return values


def _apply_switches(found: dict, path: str) -> None:
    """Let use_deepspeed and use_fsdp choose the strategy, or check that they fit the given one.

    Args:
        found: settings by flag; changed in place.
        path: of the file, for messages.
    Raises:
        UserError: the switches contradict each other or the strategy.
    """
    for name in SWITCHES:
        if not isinstance(found.get(name, False), bool):
            _wrong(path, name, found[name])
    without_deepspeed = found.get("use_deepspeed") is False
    deepspeed, fsdp = (found.pop(name, False) for name in SWITCHES)
    strategy = found.get("strategy")
    if deepspeed and fsdp:
        raise UserError(f"{path}: use_deepspeed and use_fsdp cannot both be true.")
    if fsdp and strategy not in (None, "fsdp"):
        raise UserError(f"{path}: use_fsdp is true, but strategy is {strategy}: leave one out.")
    if deepspeed and strategy in ("dp", "fsdp"):
        raise UserError(
            f"{path}: use_deepspeed is true, but strategy is {strategy}: leave one out."
        )
    if deepspeed and strategy is None and not found.get("ds_config"):
        raise UserError(
            f"{path}: use_deepspeed needs deepspeed_config, or strategy: zero1, zero2, zero3, "
            "offload or infinity."
        )
    if fsdp:
        found["strategy"] = "fsdp"
    # A file may configure both libraries: ignore the configuration of the one that is off.
    if fsdp or (without_deepspeed and strategy in (None, "dp", "fsdp")):
        found.pop("ds_config", None)
    if not fsdp and strategy != "fsdp":
        found.pop("fsdp_config", None)


def _as_arguments(name: str, value, action: argparse.Action, path: str) -> list[str]:
    option = action.option_strings[0]
    if name == "precision" and value is False:  # YAML reads accelerate's value "no" as false
        value = "fp32"
    if name == "resume" and value in ("", True):
        return [option]
    if value is None:
        return []
    if isinstance(action, argparse.BooleanOptionalAction):
        return (
            [f"--{name}" if value else f"--no_{name}"]
            if isinstance(value, bool)
            else _wrong(path, name, value)
        )
    if action.nargs == 0:
        return ([option] if value else []) if isinstance(value, bool) else _wrong(path, name, value)
    if name in ("report_to", "include") and isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, bool | dict | list):
        return _wrong(path, name, value)
    return [f"{option}={value}"]


def _wrong(path: str, name: str, value):
    raise UserError(f"{path}: {name} cannot be {shown(repr(value))}.")


def as_yaml(args: argparse.Namespace) -> str:
    """Return the resolved flags as YAML that --config can read."""
    import yaml

    flags = {name: value for name, value in sorted(vars(args).items()) if name not in NOT_SHOWN}
    # Flags that are off or unset need no line (0 is a value), except those that are on by default.
    unset = {
        name for name, value in flags.items() if value is None or value is False or value == []
    }
    settings = {
        name: value
        for name, value in flags.items()
        if name in ("eval", "fused_gelu") or name not in unset
    }
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
