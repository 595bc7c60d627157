"""Run files (--config): the flags of the command line, in YAML.

The keys are the names of the flags; names that other trainers use for them are accepted, too. The
sections `training:` and `distributed:` only group keys. The file is converted to arguments that are
placed in front of the command line, so the command line overrides the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from support.cli.aliases import IGNORED, REFUSED
from support.cli.argument_types import boolean
from support.errors import UserError
from support.files.user_files import did_you_mean, read_yaml, shown

SECTIONS = ("training", "distributed")
SWITCHES = ("use_deepspeed", "use_fsdp")
NOT_IN_FILES = ("help", "version", "config")
# Keys whose value "no" YAML reads as false, and their value then.
NO = {"precision": "fp32", "eval_strategy": "no", "save_strategy": "no"}
LISTS = {"report_to": ",", "include": ",", "fsdp": " ", "lora_targets": ",", "tags": ","}
# Attributes that --print_config leaves out.
NOT_SHOWN = frozenset(
    """
    config print_config check prefetch show_sample prove local_rank given mixture ds_config_dict
    hub_offline hub_problem fsdp use_deepspeed use_fsdp
    """.split()
)


def read_run_file(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """Read a run file and convert it to command-line arguments.

    Args:
        parser: the parser with all flags; its actions say how a value becomes an argument.
    Returns:
        Arguments such as "--lr=1e-4".
    Raises:
        UserError: the file cannot be read or is not YAML, a key is unknown or given twice, a value
            has the wrong type, or switches contradict each other.
    """
    flags = {
        name[2:]: action
        for name, action in parser._option_string_actions.items()
        if name.startswith("--") and name[2:] not in NOT_IN_FILES
    }
    settings: dict[str, object] = {}
    keys: dict[str, str] = {}  # the key in the file by the flag that it sets
    for key, value in _without_sections(read_yaml("--config", path), path):
        # Our own name; --bf16 and --no_eval set another flag, but have other values than it.
        name = flags[key].option_strings[0][2:] if key in flags else key
        if name == "deepspeed":  # true, false, or the path of a DeepSpeed file
            if "use_deepspeed" in settings:
                raise UserError(f"{path} gives use_deepspeed and deepspeed: leave one out.")
            settings["use_deepspeed"] = value if isinstance(value, bool) else value is not None
            if isinstance(value, bool) or value is None:
                continue
            name = "ds_config"
        if name not in flags:
            guess = did_you_mean(key, flags) or " (--help lists all)."
            raise UserError(f"{path}: unknown key {shown(key)}{guess}")
        # A file may have both bf16: true and fp16: false.
        target = name if value is False or value is None else flags[name].dest
        if target in keys:
            raise UserError(f"{path}: {keys[target]} and {key} set one flag: leave one out.")
        keys[target] = key
        settings[name] = value
    _apply_switches(settings, path)
    arguments: list[str] = []
    for name, value in settings.items():
        arguments += _as_arguments(name, value, flags[name], path)
    return arguments


def _without_sections(content: dict, path: str) -> Iterator[tuple[str, object]]:
    """Yield the keys and values of a run file, those in SECTIONS as if there were no sections."""
    for key, value in content.items():
        if key not in SECTIONS:
            yield key, value
        elif isinstance(value, dict):
            yield from value.items()
        else:
            raise UserError(f"{path}: {key} is a section; write its keys below it, indented.")


def _apply_switches(settings: dict, path: str) -> None:
    """Let use_deepspeed and use_fsdp choose the strategy, or check that they fit the given one.

    Args:
        settings: values by flag; changed in place.
    """
    for name in SWITCHES:
        if not isinstance(settings.get(name, False), bool):
            raise _wrong(path, name, settings[name])
    if "fsdp" in settings and settings["fsdp"] not in (None, False, "", []):
        settings["use_fsdp"] = True
    without_deepspeed = settings.get("use_deepspeed") is False
    deepspeed, fsdp = (settings.pop(name, False) for name in SWITCHES)
    strategy = strategy_of_switches(
        deepspeed, fsdp, settings.get("strategy"), settings.get("ds_config"), path
    )
    if strategy is not None:
        settings["strategy"] = strategy
    # A file may configure both libraries: ignore the configuration of the one that is off.
    if fsdp or (without_deepspeed and strategy in (None, "dp", "fsdp")):
        settings.pop("ds_config", None)
    if strategy != "fsdp":
        settings.pop("fsdp_config", None)


def strategy_of_switches(
    deepspeed: bool, fsdp: bool, strategy: str | None, ds_config: str | None, path: str = ""
) -> str | None:
    """Return the strategy that --deepspeed, --use_deepspeed, --use_fsdp and --strategy choose.

    Args:
        path: the run file that has the switches; empty for the command line.
    Returns:
        The strategy; None if the DeepSpeed file or the default decides.
    """
    place, dashes = (f"{path}: ", "") if path else ("", "--")
    if deepspeed and fsdp:
        raise UserError(
            f"{place}{dashes}deepspeed and {dashes}fsdp cannot both hold: leave one out."
        )
    for switch, is_on, contradicts in (
        ("deepspeed", deepspeed, strategy in ("dp", "fsdp")),
        ("fsdp (or use_fsdp)", fsdp, strategy not in (None, "fsdp")),
    ):
        if is_on and contradicts:
            raise UserError(
                f"{place}{dashes}{switch} contradicts {dashes}strategy {strategy}: leave one out."
            )
    if deepspeed and strategy is None and not ds_config:
        raise UserError(
            f"{place}{dashes}deepspeed needs a configuration ({dashes}deepspeed_config), or "
            f"{dashes}strategy zero1, zero2, zero3, offload or infinity."
        )
    return "fsdp" if fsdp else strategy


def _as_arguments(name: str, value, action: argparse.Action, path: str) -> list[str]:
    option = action.option_strings[0]
    if name in NO and value is False:
        value = NO[name]
    if name == "resume" and value in ("", True):
        return [option]
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise _wrong(path, name, value)
        has_opposite = isinstance(action, argparse.BooleanOptionalAction)
        return [option] if value else [f"--no_{name}"] * has_opposite
    if action.nargs == "?" and isinstance(value, bool):
        return [f"{option}={value}"]
    if action.type is boolean:
        raise _wrong(path, name, value)
    if action.nargs == "+" and isinstance(value, list):
        if not all(isinstance(item, str) and not item.startswith("-") for item in value):
            raise _wrong(path, name, value)
        return [option, *value]
    if name in LISTS and isinstance(value, list):
        value = LISTS[name].join(map(str, value))
    if name in (*IGNORED, *REFUSED) and isinstance(value, dict | list):  # such as label_names
        value = json.dumps(value)
    if isinstance(value, bool | dict | list):
        raise _wrong(path, name, value)
    return [f"{option}={value}"]


def _wrong(path: str, name: str, value) -> UserError:
    return UserError(f"{path}: {name} cannot be {shown(repr(value))}.")


def settings_of(args: argparse.Namespace) -> dict:
    """Return the resolved flags by name, without those that are off or unset."""
    # Flags that are off or unset need no line (0 is a value), except those that are on by default.
    settings = {
        name: value
        for name, value in sorted(vars(args).items())
        if name not in NOT_SHOWN
        and (name in ("eval", "fused_gelu") or not (value is None or value is False or value == []))
    }
    if args.fsdp and args.fsdp.words:
        settings["fsdp"] = args.fsdp.words
    if args.mixture:
        settings["dataset"] = [str(dataset) for dataset in args.mixture]
    return settings


def as_yaml(args: argparse.Namespace) -> str:
    """Return the resolved flags as YAML that --config can read."""
    import yaml

    return yaml.safe_dump(settings_of(args), sort_keys=False, allow_unicode=True)
