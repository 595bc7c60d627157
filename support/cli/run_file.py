"""A YAML file that says what the command line would say.

Every flag goes by its name. The sections `training:` and `distributed:` only group them, and a few
keys have the names that other trainers give them. The file becomes arguments in front of the
command line, which therefore wins.
"""

from __future__ import annotations

import argparse
import difflib

from support.cli.argument_types import CLOSE
from support.errors import UserError
from support.files.user_files import read_yaml, shown

SECTIONS = ("training", "distributed")
# What other trainers call our flags, also on the command line.
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
NOT_IN_FILES = ("help", "version", "config", "deepspeed")  # the last one is one of two others
NOT_SHOWN = (
    "config",
    "print_config",
    "check",
    "prefetch",
    "local_rank",
    "given",
    "ds_config_dict",
    "nvme_folder",
    "hub_offline",
    "hub_problem",
    "fsdp",
    "use_deepspeed",
    "use_fsdp",
)


def read_run_file(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """The file's contents as arguments.

    Raises:
        UserError: the file is missing or no YAML, a key is unknown or given twice, or switches
            contradict each other.
    """
    values = _flatten(read_yaml("--config", path), path)
    flags = {action.dest: action for action in reversed(parser._actions) if action.option_strings}
    flags |= {
        "no_eval": next(
            action for action in parser._actions if action.option_strings == ["--no_eval"]
        )
    }
    for name in NOT_IN_FILES:
        del flags[name]
    found: dict[str, object] = {}
    for key, value in values.items():
        name = OTHER_NAMES.get(key, key)
        if name == "deepspeed":  # true, or the file
            found["use_deepspeed"] = value if isinstance(value, bool) else value is not None
            if isinstance(value, bool) or value is None:
                continue
            name = "ds_config"
        if name not in flags:
            near = difflib.get_close_matches(key, [*flags, *OTHER_NAMES], n=1, cutoff=CLOSE)
            guess = f": did you mean {near[0]}?" if near else " (--help lists all)."
            raise UserError(f"{path}: unknown key {shown(key)}{guess}")
        if name in found:
            raise UserError(f"{path} gives {name} twice, the second time as {key}: leave one out.")
        found[name] = value
    _apply_switches(found, path)
    arguments: list[str] = []
    for name, value in found.items():
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
    """use_deepspeed and use_fsdp choose a strategy, or must fit the one that is given."""
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
            f"{path}: use_deepspeed needs deepspeed_config, or strategy: zero1, zero2, zero3, offload or infinity."
        )
    if fsdp:
        found["strategy"] = "fsdp"
    # One file serves both: the configuration of the one that is off is not used.
    if fsdp or (without_deepspeed and strategy in (None, "dp", "fsdp")):
        found.pop("ds_config", None)
    if not fsdp and strategy != "fsdp":
        found.pop("fsdp_config", None)


def _as_arguments(name: str, value, action: argparse.Action, path: str) -> list[str]:
    option = action.option_strings[0]
    if name == "precision" and value is False:  # YAML's reading of accelerate's word "no"
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
    """The resolved run, to be read or fed back with --config."""
    import yaml

    shown = {name: value for name, value in sorted(vars(args).items()) if name not in NOT_SHOWN}
    # What is off or unset is what it would be without a line; evaluation alone is on by default.
    unset = {
        name for name, value in shown.items() if value is None or value is False or value == []
    }  # 0 is a value
    kept = {name: value for name, value in shown.items() if name == "eval" or name not in unset}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
