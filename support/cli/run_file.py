"""Run files (--config): the flags of the command line, in YAML.

The keys are the names of the flags; names that other trainers use for them are accepted, too. The
sections `training:` and `distributed:` only group keys. The file is converted to arguments that are
placed in front of the command line, so the command line overrides the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from support.errors import UserError
from support.files.user_files import did_you_mean, read_yaml, shown

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
    flags = {action.dest: action for action in reversed(parser._actions) if action.option_strings}
    for action in parser._actions:
        if action.option_strings in (["--no_eval"], ["--no_fused_gelu"]):
            flags[action.option_strings[0][2:]] = action
    for name in NOT_IN_FILES:
        del flags[name]
    settings: dict[str, object] = {}
    for key, value in _without_sections(read_yaml("--config", path), path):
        name = OTHER_NAMES.get(key, key)
        if name == "deepspeed":  # true, false, or the path of a DeepSpeed file
            if "use_deepspeed" in settings:
                raise UserError(f"{path} gives {shown(key)} twice: leave one out.")
            settings["use_deepspeed"] = value if isinstance(value, bool) else value is not None
            if isinstance(value, bool) or value is None:
                continue
            name = "ds_config"
        if name not in flags:
            guess = did_you_mean(key, [*flags, *OTHER_NAMES]) or " (--help lists all)."
            raise UserError(f"{path}: unknown key {shown(key)}{guess}")
        if name in settings:
            raise UserError(f"{path} gives {name} twice, the second time as {key}: leave one out.")
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
        path: of the file, for messages.
    Raises:
        UserError: the switches contradict each other or the strategy.
    """
    for name in SWITCHES:
        if not isinstance(settings.get(name, False), bool):
            raise _wrong(path, name, settings[name])
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
        deepspeed, fsdp: whether the switch is on.
        strategy: the given strategy, or None.
        ds_config: the given DeepSpeed file, or None.
        path: the run file that has the switches; empty for the command line.
    Returns:
        The strategy; None if the DeepSpeed file or the default decides.
    Raises:
        UserError: the switches contradict each other or the strategy.
    """
    place, dashes = (f"{path}: ", "") if path else ("", "--")
    if deepspeed and fsdp:
        raise UserError(
            f"{place}{dashes}use_deepspeed and {dashes}use_fsdp cannot both hold: leave one out."
        )
    for switch, is_on, contradicts in (
        ("deepspeed", deepspeed, strategy in ("dp", "fsdp")),
        ("use_fsdp", fsdp, strategy not in (None, "fsdp")),
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
    if name == "precision" and value is False:  # YAML reads accelerate's value "no" as false
        value = "fp32"
    if name == "resume" and value in ("", True):
        return [option]
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise _wrong(path, name, value)
        has_opposite = isinstance(action, argparse.BooleanOptionalAction)
        return [option] if value else [f"--no_{name}"] * has_opposite
    if name in ("report_to", "include") and isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, bool | dict | list):
        raise _wrong(path, name, value)
    return [f"{option}={value}"]


def _wrong(path: str, name: str, value) -> UserError:
    return UserError(f"{path}: {name} cannot be {shown(repr(value))}.")


def as_yaml(args: argparse.Namespace) -> str:
    """Return the resolved flags as YAML that --config can read."""
    import yaml

    # Flags that are off or unset need no line (0 is a value), except those that are on by default.
    settings = {
        name: value
        for name, value in sorted(vars(args).items())
        if name not in NOT_SHOWN
        and (name in ("eval", "fused_gelu") or not (value is None or value is False or value == []))
    }
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
