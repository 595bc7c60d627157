"""DeepSpeed's configuration (--ds_config): read it, merge it with the flags, complete it."""

import argparse
import copy
import importlib.util
import json
import logging
import os
import re
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from support import PROJECT
from support.cli.arguments import Arguments
from support.cli.buckets import bucket_sizes
from support.cli.flags import FLAGS
from support.errors import UserError, redact_value, remember_secrets
from support.files.atomic import write_text
from support.files.user_files import (
    TOO_DEEP,
    check_depth,
    did_you_mean,
    read_text,
    shown,
    unique_object,
)
from support.tables import GROWTH_INTERVAL, INITIAL_SCALE_POWER, STRATEGIES

SECTIONS = """
    zero_optimization zero_optimization.offload_optimizer zero_optimization.offload_param optimizer
    optimizer.params scheduler scheduler.params bf16 fp16 aio
""".split()
# Hugging Face's convention for "as on the command line"; DeepSpeed itself does not know it.
AUTO = "auto"
LOSS_SCALING = {
    "initial_scale_power": INITIAL_SCALE_POWER,
    # DeepSpeed does not count the first step after an overflow. (From the second doubling without
    # an overflow in between, it doubles one step earlier than torch.)
    "loss_scale_window": GROWTH_INTERVAL - 1,
    "hysteresis": 1,  # DeepSpeed's default of 2 does not reduce the scale at the first overflow
}
# Key of a DeepSpeed file -> the flags with the same meaning.
FLAGS_OF_KEY = {
    "train_micro_batch_size_per_gpu": ("batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "optimizer.params.lr": ("lr",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "zero_optimization.offload_optimizer.nvme_path": ("nvme_path",),
    "zero_optimization.offload_param.nvme_path": ("nvme_path",),
}
# Parameters of an optimizer for which DeepSpeed's AdamW and PyTorch's are the same.
PARAMS_OF_ADAM = ("lr", "weight_decay", "betas", "eps")
# Schedulers that Hugging Face's files have with "auto" values, and the same --lr_scheduler.
AUTO_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}
OFFLOADED = ("offload_optimizer", "offload_param")


def read_ds_config(path: str) -> dict[str, Any]:
    """Read a DeepSpeed configuration with DeepSpeed's parser, if installed: JSON with comments.

    Raises:
        UserError: the file cannot be read or parsed, or has no valid ZeRO stage.
    """
    text = read_text("--ds_config", path)
    parser = importlib.import_module("hjson" if importlib.util.find_spec("hjson") else "json")
    try:
        config = parser.loads(text, object_pairs_hook=_object)
        check_depth(config)
    except RecursionError as error:
        raise UserError(f"{shown(path)}: {TOO_DEEP}.") from error
    except ValueError as error:
        raise UserError(f"{shown(path)}: {shown(error)}.") from error
    remember_secrets(config)
    for key in SECTIONS:
        if not isinstance(lookup(config, key) or {}, dict):
            raise UserError(f"{shown(path)}: {key} must be an object.")
    stage = lookup(config, "zero_optimization.stage")
    if stage not in (1, 2, 3) or stage is True:
        raise UserError(f"{shown(path)}: zero_optimization.stage {shown(stage)} is not 1, 2 or 3.")
    return config


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the file, without keys that are null and comments ("_…" keys)."""
    values = unique_object([(key, value) for key, value in pairs if key[:1] != "_"])
    return {key: value for key, value in values.items() if value is not None}


def check_with_deepspeed(args: Arguments) -> None:
    """Let DeepSpeed check --ds_config. It imports DeepSpeed, so the device must have been chosen.

    Raises:
        UserError: a value is not valid, or a key is unknown.
    """
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    if not args.verbose:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config, file = _without_auto(args.ds_config_dict or {}), shown(args.ds_config)
    # DeepSpeed ignores a misspelled name in the outermost object, and checks those in sections.
    known = {value for value in vars(constants).values() if isinstance(value, str)}
    for key in config.keys() - known:
        if guess := did_you_mean(key, known):
            raise UserError(f"{file}: {shown(key)} is unknown{guess}")
    del config["train_batch_size"]  # DeepSpeed does not know the number of ranks yet
    try:
        DeepSpeedConfig(config)
    except (DeepSpeedConfigError, ValueError, TypeError, AssertionError) as error:
        problem = shown(error, 300)
        if hasattr(error, "errors"):  # pydantic's ValidationError
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc']))} {shown(first['input'])}: {first['msg']}"
        raise UserError(f"{file}: {problem}.") from error


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without the values that are "auto"."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != AUTO
    }


def lookup(config: dict[str, Any], key: str) -> Any:
    """Return the value at a dotted key ("optimizer.params.lr"), or None."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def nvme_folder(config: dict[str, Any] | None) -> str | None:
    """Return the folder of a complete configuration's NVMe files; None without such files."""
    return next((section["nvme_path"] for section in _nvme_sections(config or {})), None)


def _nvme_sections(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sections of the model states that are kept on NVMe."""
    sections = (lookup(config, f"zero_optimization.{part}") or {} for part in OFFLOADED)
    return [section for section in sections if section.get("device") == "nvme"]


def choose_strategy(config: dict[str, Any]) -> str:
    """Return the strategy that a DeepSpeed file describes."""
    stage = lookup(config, "zero_optimization.stage")
    device = lookup(config, "zero_optimization.offload_optimizer.device")
    return {(2, "cpu"): "offload", (3, "nvme"): "infinity"}.get(
        (stage, str(device)), f"zero{stage}"
    )


@dataclass
class Resolved:
    """A DeepSpeed file, merged with the flags."""

    args: Arguments
    file: str
    config: dict[str, Any]  # with "auto" where the model or the device decides
    flags: dict[str, Any] = field(default_factory=dict)  # values that the file sets
    keys: dict[str, str] = field(default_factory=dict)  # key of the file by the flag that it sets

    def value(self, flag: str) -> Any:
        """Return the merged value of a flag."""
        return self.flags.get(flag, getattr(self.args, flag))

    def follow(self, flag: str, key: str, value: Any) -> None:
        """Set a flag to a value of the file, unless the flag was given with another value."""
        if value in (None, AUTO):
            return
        try:
            required = FLAGS[flag].metadata["kind"](str(value))  # a number may be in quotes
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{self.file}: {key}: {error}.") from error
        own = getattr(self.args, flag)
        if flag in self.args.given and own not in (required, AUTO):
            raise self.contradiction(f"{flag} {own}", f"{key} {value}")
        self.flags[flag], self.keys[flag] = required, key

    def contradiction(self, flag: str, value: str) -> UserError:
        return UserError(f"--{flag} contradicts {value} in {self.file}: change one of them.")


def with_deepspeed(args: Arguments) -> Arguments:
    """Merge the flags with the DeepSpeed file: the user's, or the strategy's own."""
    file = args.ds_config or f"{PROJECT}/{STRATEGIES[args.strategy].config_file}"
    world_size = args.simulate_gpus or int(os.environ.get("WORLD_SIZE", 1))
    resolved = merge(args, read_ds_config(file), file, world_size)
    sources = {name: f"{file}: {key}" for name, key in resolved.keys.items()}
    return args.replace(
        **resolved.flags, sources={**args.sources, **sources}, ds_config_dict=resolved.config
    )


def merge(args: Arguments, content: dict[str, Any], file: str, world_size: int) -> Resolved:
    """Merge a DeepSpeed file with the flags, before torch or a model is loaded.

    If a flag was not given, the file's value is used. "auto" and missing values come from the flags
    or, in `complete_ds_config`, from the model and the device.

    Args:
        content: what `read_ds_config` returned for `file`.
    Raises:
        UserError: the file contradicts --strategy or another given flag, or has a value that is not
            supported.
    """
    if (described := choose_strategy(content)) != args.strategy:
        raise UserError(
            f"{file} describes {described} (zero_optimization.stage and offload_optimizer.device), "
            f"and --strategy is {args.strategy}: change one of them."
        )
    if args.strategy != "infinity" and _nvme_sections(content):
        raise UserError(f"{file}: only --strategy infinity keeps states on nvme.")
    resolved = Resolved(args, file, copy.deepcopy(content))
    _merge_optimizer(resolved)
    _merge_flags(resolved)
    _merge_precision_and_schedule(resolved)
    batch, steps = resolved.value("batch_size"), resolved.value("gradient_accumulation_steps")
    product, total = batch * steps * world_size, content.get("train_batch_size", AUTO)
    if total not in (AUTO, product):
        raise UserError(
            f"{file} has train_batch_size {total}, but --batch_size {batch} × "
            f"--gradient_accumulation_steps {steps} × {world_size} ranks = {product}: change one."
        )
    resolved.config["train_batch_size"] = product
    return resolved


def _merge_optimizer(resolved: Resolved) -> None:
    """Add AdamW, unless --optim is another optimizer, which the script creates."""
    config, args = resolved.config, resolved.args
    kind = lookup(config, "optimizer.type")
    # DeepSpeed's Adam is AdamW unless the file says otherwise.
    if kind and str(kind).lower() not in ("adam", "adamw"):
        raise UserError(
            f"{resolved.file}: leave the optimizer {shown(kind)} out, and use --optim "
            f"({', '.join(FLAGS['optim'].metadata['choices'])})."
        )
    if args.optim != "adamw":
        if kind and args.ds_config:
            raise resolved.contradiction(f"optim {args.optim}", f"the optimizer {kind}")
        config.pop("optimizer", None)
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        return
    if not config.get("optimizer"):
        config["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(PARAMS_OF_ADAM, AUTO)}
    params = config["optimizer"].setdefault("params", {})
    offloads_to = lookup(config, "zero_optimization.offload_optimizer.device")
    if offloads_to in (None, "none") and {*params} <= {*PARAMS_OF_ADAM}:
        # The same updates as DeepSpeed's FusedAdam, which compiles an op.
        params |= {"torch_adam": True, "fused": True}


def _merge_flags(resolved: Resolved) -> None:
    """Merge the keys that are flags."""
    for key, flags in FLAGS_OF_KEY.items():
        parent, _, name = key.rpartition(".")
        section = lookup(resolved.config, parent) if parent else resolved.config
        if section is None or (name == "nvme_path" and section.get("device") != "nvme"):
            continue
        value = section.get(name)
        parts: Any = value if len(flags) > 1 and isinstance(value, list) else repeat(value)
        for flag, part in zip(flags, parts, strict=False):
            resolved.follow(flag, key, part)
        values = [resolved.value(flag) for flag in flags]
        section[name] = values if len(flags) > 1 else values[0]


def _merge_precision_and_schedule(resolved: Resolved) -> None:
    """Merge bf16, fp16 and a scheduler of "auto" values with --precision and --lr_scheduler."""
    enabled = {name: lookup(resolved.config, f"{name}.enabled") for name in ("bf16", "fp16")}
    for name, value in enabled.items():
        if value is True:
            resolved.follow("precision", f"{name}.enabled", name)
    requested = resolved.value("precision")
    if enabled.get(requested) is False or [*enabled.values()] == [True, True]:
        raise resolved.contradiction(f"precision {requested}", "bf16.enabled or fp16.enabled")
    if requested == AUTO and enabled["bf16"] is False:
        resolved.follow("precision", "bf16.enabled", "fp32")

    scheduler = resolved.config.pop("scheduler", None) or {}
    kind, params = scheduler.get("type", "WarmupDecayLR"), scheduler.get("params") or {}
    if str(kind) not in AUTO_SCHEDULERS or any(value != AUTO for value in params.values()):
        raise UserError(
            f"{resolved.file}: leave the scheduler {shown(kind)} out, and use --lr_scheduler, "
            "--warmup_steps and --lr."
        )
    if scheduler:
        resolved.follow("lr_scheduler", "scheduler", AUTO_SCHEDULERS[kind])


@dataclass(frozen=True)
class ModelSizes:
    """What DeepSpeed's configuration depends on."""

    hidden_size: int
    parameters: int
    largest_parameter: int  # number of elements of the largest one (usually the embedding)
    tied: bool  # the output layer shares the input embedding's weights


def complete_ds_config(
    config: dict, precision: str, model: ModelSizes, world_size: int, nvme_folder: str | None
) -> dict:
    """Fill in the values of `config`, in place, that depend on the device and the model.

    Raises:
        UserError: a value is "auto", and there is no rule for it.
    """
    for name in ("bf16", "fp16"):
        if precision == name or name in config:
            config.setdefault(name, {})["enabled"] = precision == name
    if "fp16" in config:
        _fill(config["fp16"], LOSS_SCALING, where=(None, AUTO))
    zero = config["zero_optimization"]
    tied_on_nvme = model.tied and lookup(zero, "offload_param.device") == "nvme"
    # A single rank has no communication to overlap. Stages 1 and 2 would still synchronize the
    # device after each backward, and allocate a second bucket.
    overlap = {"overlap_comm": world_size > 1}
    _fill(zero, bucket_sizes(model.hidden_size, model.parameters, tied_on_nvme) | overlap)
    for section in _nvme_sections(config):
        section["nvme_path"] = nvme_folder
    # A buffer must hold a rank's shard of any parameter, with its padding.
    shard = -(-model.largest_parameter // world_size)
    _fill(zero.get("offload_param") or {}, {"buffer_size": shard + 4096})
    # Such a shard (2 bytes an element) fills NVMe's queue once, with blocks of 128 KiB to 1 MiB.
    block = 2 * shard // (lookup(config, "aio.queue_depth") or 8)
    block_size = min(2**20, max(2**17, 2 ** (block.bit_length() - 1)))
    _fill(config.get("aio") or {}, {"block_size": block_size})
    # DeepSpeed's timer synchronizes the device in each micro-batch, and --compile fails on it.
    config.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    if left := re.search(r'"(\w+)": "auto"', json.dumps(config)):
        raise UserError(f'DeepSpeed configuration: {left[1]} cannot be "auto": give a value.')
    return config


def _fill(section: dict, values: dict, where: tuple = (AUTO,)) -> None:
    """Set the keys whose values are "auto", or among `where`; a missing key has the value None."""
    section.update({key: value for key, value in values.items() if section.get(key) in where})


def write_ds_config(args: Arguments, folder: Path) -> None:
    """Write a complete configuration to ds_config.json in a folder, for --ds_config.

    Its secrets are null: DeepSpeed's clients then look for them in the environment.
    """
    config = redact_value(args.ds_config_dict or {}, hidden=None)
    for section in _nvme_sections(config):
        # The run's own folder in it is removed at the end.
        section["nvme_path"] = args.nvme_path or gettempdir()
    write_text(folder / "ds_config.json", json.dumps(config, indent=2) + "\n")
