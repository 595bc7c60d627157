"""DeepSpeed's configuration (--ds_config): read it, merge it with the flags, complete it."""

import argparse
import copy
import importlib.util
import json
import logging
import re
import sys
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from tempfile import gettempdir
from types import NoneType
from typing import Any

from distributed_training.about import PROJECT
from distributed_training.errors import UserError, redact_value, remember_secrets
from distributed_training.files.atomic import write_text
from distributed_training.files.json_types import JsonObject, is_count, lookup
from distributed_training.files.user_files import (
    TOO_DEEP,
    check_depth,
    did_you_mean,
    read_text,
    shown,
    unique_object,
)
from distributed_training.optimizers import GROWTH_INTERVAL, INITIAL_SCALE_POWER, OPTIMIZERS
from distributed_training.strategies.deepspeed.buckets import bucket_sizes
from distributed_training.strategies.strategy import Flags

SECTIONS = """
    zero_optimization zero_optimization.offload_optimizer zero_optimization.offload_param optimizer
    optimizer.params scheduler scheduler.params bf16 fp16 aio timers timers.throughput
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
    "communication_data_type": ("reduce_dtype",),
    "optimizer.params.lr": ("lr",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "zero_optimization.offload_optimizer.nvme_path": ("nvme_path",),
    "zero_optimization.offload_param.nvme_path": ("nvme_path",),
}
# Parameters of an optimizer for which DeepSpeed's AdamW and PyTorch's are the same.
PARAMS_OF_ADAM = ("lr", "weight_decay", "betas", "eps")
DEFAULTS_OF_ADAM = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}
IMPLEMENTATIONS = ("torch_adam", "fused", "foreach", "fp32_optimizer_states")  # of the same updates
# Schedulers that Hugging Face's files have with "auto" values, and the same --lr_scheduler.
AUTO_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}
OFFLOADED = ("offload_optimizer", "offload_param")


def read_ds_config(path: str) -> JsonObject:
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
    except OverflowError as error:  # of hjson, which converts it to an integer
        raise UserError(
            f"{shown(path)}: a number is larger than {sys.float_info.max:g}."
        ) from error
    except ValueError as error:
        raise UserError(f"{shown(path)}: {shown(error)}.") from error
    remember_secrets(config)
    for key in SECTIONS:
        if not isinstance(lookup(config, key), dict | NoneType):
            raise UserError(f"{shown(path)}: {key} must be an object.")
    depth = lookup(config, "aio.queue_depth")
    if depth is not None and not (is_count(depth) and depth):
        raise UserError(f"{shown(path)}: aio.queue_depth {shown(depth)} is not a whole number.")
    stage = lookup(config, "zero_optimization.stage")
    if stage not in (1, 2, 3) or stage is True:
        raise UserError(f"{shown(path)}: zero_optimization.stage {shown(stage)} is not 1, 2 or 3.")
    return config


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Return an object of the file, without keys that are null and comments ("_…" keys)."""
    values = unique_object([(key, value) for key, value in pairs if key[:1] != "_"])
    return {key: value for key, value in values.items() if value is not None}


def check_with_deepspeed(path: str, merged: JsonObject, verbose: bool) -> None:
    """Let DeepSpeed check --ds_config. It imports DeepSpeed, so the device must have been chosen.

    Args:
        path: the file.
        merged: its content, merged with the flags.
    Raises:
        UserError: a value is not valid, or a key is unknown.
    """
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    if not verbose:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config, file = _without_auto(merged), shown(path)
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


def _without_auto(config: JsonObject) -> JsonObject:
    """Return a copy without the values that are "auto"."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != AUTO
    }


def nvme_folder(config: JsonObject | None) -> str | None:
    """Return the folder of a complete configuration's NVMe files; None without such files."""
    return next((section["nvme_path"] for section in _nvme_sections(config or {})), None)


def _nvme_sections(config: JsonObject) -> list[JsonObject]:
    """Return the sections of the model states that are kept on NVMe."""
    sections = (lookup(config, f"zero_optimization.{part}") or {} for part in OFFLOADED)
    return [section for section in sections if section.get("device") == "nvme"]


def choose_strategy(config: JsonObject) -> str:
    """Return the strategy that a DeepSpeed file describes."""
    stage = lookup(config, "zero_optimization.stage")
    device = lookup(config, "zero_optimization.offload_optimizer.device")
    return {(2, "cpu"): "offload", (3, "nvme"): "infinity"}.get(
        (stage, str(device)), f"zero{stage}"
    )


@dataclass
class Merged:
    """A DeepSpeed file, merged with the flags."""

    flags: Flags
    file: str
    config: JsonObject  # with "auto" where the model or the device decides
    values: JsonObject = field(default_factory=dict)  # of flags that the file sets
    keys: dict[str, str] = field(default_factory=dict)  # key of the file by the flag that it sets

    def value(self, flag: str) -> Any:
        """Return the merged value of a flag."""
        return self.values.get(flag, self.flags.values[flag])

    def places(self) -> list[str]:
        """Return where the optimizer states and the parameters are: "device", "host" or "nvme"."""
        zero, names = self.config["zero_optimization"], {"cpu": "host", "nvme": "nvme"}
        devices = ((zero.get(part) or {}).get("device") for part in OFFLOADED)
        return [names.get(str(device), "device") for device in devices]

    def sources(self) -> dict[str, str]:
        """Return the sources of the values that the file sets, by flag."""
        return {name: f"{self.file}: {key}" for name, key in self.keys.items()}

    def follow(self, flag: str, key: str, value: Any) -> None:
        """Set a flag to a value of the file, unless the flag was given with another value."""
        if value in (None, AUTO):
            return
        try:
            required = self.flags.parse(flag, str(value))  # a number may be in quotes
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{self.file}: {key}: {error}.") from error
        own = self.flags.values[flag]
        if flag in self.flags.given and own not in (required, AUTO):
            raise self.contradiction(f"{flag} {own}", f"{key} {value}")
        self.values[flag], self.keys[flag] = required, key

    def contradiction(self, flag: str, value: str) -> UserError:
        return UserError(f"--{flag} contradicts {value} in {self.file}: change one of them.")


def read_and_merge(flags: Flags, config_file: str) -> Merged:
    """Merge the flags with the DeepSpeed file: the user's, or this project's `config_file`."""
    file = flags.values["ds_config"] or f"{PROJECT}/{config_file}"
    return merge(flags, read_ds_config(file), file)


def merge(flags: Flags, content: JsonObject, file: str) -> Merged:
    """Merge a DeepSpeed file with the flags, before torch or a model is loaded.

    If a flag was not given, the file's value is used. "auto" and missing values come from the flags
    or, in `complete_ds_config`, from the model and the device.

    Args:
        content: what `read_ds_config` returned for `file`.
    Raises:
        UserError: the file contradicts --strategy or another given flag, or has a value that is not
            supported.
    """
    name, described = flags.values["strategy"], choose_strategy(content)
    if flags.values["ds_config"] and described != name:
        raise UserError(
            f"{file} describes {described} (zero_optimization.stage and offload_optimizer.device), "
            f"and --strategy is {name}: change one of them."
        )
    if described != "infinity" and _nvme_sections(content):
        raise UserError(f"{file}: only --strategy infinity keeps states on nvme.")
    merged = Merged(flags, file, copy.deepcopy(content))
    _merge_optimizer(merged)
    _merge_flags(merged)
    _merge_precision_and_schedule(merged)
    if flags.values["simulate_gpus"] and "fp16" in merged.config:
        # With a larger scale gradients would overflow and their steps would be skipped.
        merged.config["fp16"]["loss_scale"] = 1
    if flags.values["eval_only"]:
        merged.config.pop("optimizer", None)
    batch, steps = merged.value("batch_size"), merged.value("gradient_accumulation_steps")
    product, total = batch * steps * flags.world_size, content.get("train_batch_size", AUTO)
    if total not in (AUTO, product):
        raise UserError(
            f"{file} has train_batch_size {total}, but --batch_size {batch} × "
            f"--gradient_accumulation_steps {steps} × {flags.world_size} ranks = {product}: "
            "change one."
        )
    merged.config["train_batch_size"] = product
    return merged


def _merge_optimizer(merged: Merged) -> None:
    """Add AdamW, unless --optim is another optimizer, which the script creates."""
    config, optimizer = merged.config, merged.flags.values["optim"]
    kind = lookup(config, "optimizer.type")
    # DeepSpeed's Adam is AdamW unless the file says otherwise.
    if kind and str(kind).lower() not in ("adam", "adamw"):
        raise UserError(
            f"{merged.file}: leave the optimizer {shown(kind)} out, and use --optim "
            f"({', '.join(OPTIMIZERS)})."
        )
    if not OPTIMIZERS[optimizer].in_ds_config:
        if kind and merged.flags.values["ds_config"]:
            raise merged.contradiction(f"optim {optimizer}", f"the optimizer {kind}")
        config.pop("optimizer", None)
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        return
    if not config.get("optimizer"):
        config["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(PARAMS_OF_ADAM, AUTO)}
    params = config["optimizer"].setdefault("params", {})
    known = (*PARAMS_OF_ADAM, *DEFAULTS_OF_ADAM, *IMPLEMENTATIONS)
    for name in params.keys() - {*known}:
        guess = did_you_mean(name, known) or "; leave it out."
        raise UserError(f"{merged.file}: optimizer.params.{shown(name)} is unknown{guess}")
    for name, value in DEFAULTS_OF_ADAM.items():
        # DeepSpeed ignores adam_w_mode if the type is AdamW.
        is_ignored = name == "adam_w_mode" and str(kind).lower() == "adamw"
        if params.pop(name, value) != value and not is_ignored:
            raise UserError(
                f"{merged.file}: optimizer.params.{name} must be {json.dumps(value)}, or left out: "
                "every strategy computes the same AdamW."
            )
    offloads_to = lookup(config, "zero_optimization.offload_optimizer.device")
    if offloads_to in (None, "none"):
        # The same updates as DeepSpeed's FusedAdam, which compiles an op, and whose states no
        # checkpoint of another strategy has.
        params |= {"torch_adam": True, "fused": True}


def _merge_flags(merged: Merged) -> None:
    """Merge the keys that are flags."""
    for key, flags in FLAGS_OF_KEY.items():
        parent, _, name = key.rpartition(".")
        section = lookup(merged.config, parent) if parent else merged.config
        if section is None or (name == "nvme_path" and section.get("device") != "nvme"):
            continue
        value = section.get(name)
        parts: Any = value if len(flags) > 1 and isinstance(value, list) else repeat(value)
        for flag, part in zip(flags, parts, strict=False):
            merged.follow(flag, key, part)
        values = [merged.value(flag) for flag in flags]
        if flags == ("reduce_dtype",) and values == [None]:
            section.pop(name, None)  # DeepSpeed reduces in the precision of the computation
            continue
        section[name] = values if len(flags) > 1 else values[0]


def _merge_precision_and_schedule(merged: Merged) -> None:
    """Merge bf16, fp16 and a scheduler of "auto" values with --precision and --lr_scheduler."""
    enabled = {name: lookup(merged.config, f"{name}.enabled") for name in ("bf16", "fp16")}
    for name, value in enabled.items():
        if value is True:
            merged.follow("precision", f"{name}.enabled", name)
    requested = merged.value("precision")
    if enabled.get(requested) is False or [*enabled.values()] == [True, True]:
        raise merged.contradiction(f"precision {requested}", "bf16.enabled or fp16.enabled")
    if requested == AUTO and enabled["bf16"] is False:
        merged.follow("precision", "bf16.enabled", "fp32")

    scheduler = merged.config.pop("scheduler", None) or {}
    kind, params = scheduler.get("type", "WarmupDecayLR"), scheduler.get("params") or {}
    if str(kind) not in AUTO_SCHEDULERS or any(value != AUTO for value in params.values()):
        raise UserError(
            f"{merged.file}: leave the scheduler {shown(kind)} out, and use --lr_scheduler, "
            "--warmup_steps and --lr."
        )
    if scheduler:
        merged.follow("lr_scheduler", "scheduler", AUTO_SCHEDULERS[kind])


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
        UserError: a value is "auto", and there is no rule for it; or gradients are to be added in
            fp32 where the states of DeepSpeed's optimizer cannot be read.
    """
    for name in ("bf16", "fp16"):
        if precision == name or name in config:
            config.setdefault(name, {})["enabled"] = precision == name
    sums = str(lookup(config, "data_types.grad_accum_dtype")).removeprefix("torch.")
    stage = config["zero_optimization"]["stage"]
    if (precision, stage) == ("bf16", 1) and sums in ("fp32", "float32"):
        # DeepSpeed would use another optimizer, BF16_Optimizer, whose states have another layout.
        raise UserError(
            "DeepSpeed configuration: data_types.grad_accum_dtype fp32 is not supported at stage 1 "
            "in bf16: use --strategy zero2 with stage 2, or leave the key out."
        )
    if "bf16" in config:
        # Stages 1 and 2 would read the GPU in each step to skip the update of a gradient that is
        # not finite; such a run stops anyway. It is the default since DeepSpeed's PR 8035.
        config["bf16"].setdefault("check_grad_overflow", False)
    if "fp16" in config:
        _fill(config["fp16"], LOSS_SCALING, where=(None, AUTO))
    zero = config["zero_optimization"]
    tied_on_nvme = model.tied and lookup(zero, "offload_param.device") == "nvme"
    # A single rank has no communication to overlap. Stages 1 and 2 would still synchronize the
    # device after each backward, and allocate a second bucket. But offload overlaps the copies of
    # the gradients to the host. And stage 3 waits for the stream on which it gathers, for each
    # parameter on a single rank (NoGatherHandle): without overlap this is the default stream, so
    # that the host could never launch kernels ahead.
    copies = zero["stage"] == 3 or lookup(zero, "offload_optimizer.device") not in (None, "none")
    overlap = {"overlap_comm": world_size > 1 or copies}
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


def write_ds_config(config: JsonObject, nvme_path: str | None, folder: Path) -> None:
    """Write a complete configuration to ds_config.json in a folder, for --ds_config.

    Its secrets are null: DeepSpeed's clients then look for them in the environment.

    Args:
        nvme_path: --nvme_path. The run's own folder on that disk is removed at the end.
    """
    config = redact_value(config, hidden=None)
    for section in _nvme_sections(config):
        section["nvme_path"] = nvme_path or gettempdir()
    write_text(folder / "ds_config.json", json.dumps(config, indent=2) + "\n")
