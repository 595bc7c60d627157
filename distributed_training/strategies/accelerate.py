"""What the configuration of `accelerate launch` asks for, compared with the flags of a run.

The launcher passes it on in environment variables, which only a program with an `Accelerator`
follows. A choice that the flags of a run do not have is an error that names the flags to add.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import shown
from distributed_training.process import ACCELERATE
from distributed_training.strategies.deepspeed.options import OFFLOADED
from distributed_training.strategies.deepspeed.strategy import DeepSpeed
from distributed_training.strategies.fsdp.options import FsdpOptions
from distributed_training.strategies.fsdp.read_options import options_of
from distributed_training.strategies.fsdp.strategy import FSDP
from distributed_training.strategies.strategy import FlagValues, Strategy
from distributed_training.strategies.table import STRATEGIES

DEEPSPEED = "ACCELERATE_DEEPSPEED_"
PLACES = {"none": "device", "cpu": "host", "nvme": "nvme"}
DEFAULTS_OF_FSDP = {
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_forward_prefetch": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
}
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
# Choices without a flag, and the values that this project has anyway. "None" is one without value.
REFUSED = {
    "ACCELERATE_USE_MEGATRON_LM": ("false",),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": ("no",),
    "FSDP_IGNORED_MODULES": (),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false",),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": ("1",),
    "PARALLELISM_CONFIG_TP_SIZE": ("1",),
    "PARALLELISM_CONFIG_CP_SIZE": ("1",),
    "PARALLELISM_CONFIG_SP_SIZE": ("1",),
}
# Choices that change neither the training nor its files here: one line names them.
WITHOUT_EFFECT = {
    "ACCELERATE_CPU_AFFINITY": ("0", "false"),
    "ACCELERATE_DEBUG_MODE": ("false",),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": ("true",),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": ("false",),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": (),
    "FSDP_BACKWARD_PREFETCH": ("backward_pre",),
    "FSDP_STATE_DICT_TYPE": (),
    "FSDP_USE_ORIG_PARAMS": ("true",),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("true",),
    "FSDP_SYNC_MODULE_STATES": ("true",),
}


@dataclass
class Choices:
    """The choices of accelerate's variables, next to the flags of a run."""

    env: Mapping[str, str]
    flags: FlagValues  # of the run, by name
    missing: list[str] = field(default_factory=list)  # flags to add, as on a command line

    def text(self, name: str, default: str = "") -> str:
        """Return the value of a variable in lower case; `default` if it is not set, or is None."""
        value = self.env.get(name, "").lower()
        return default if value in ("", "none", "auto") else value

    def is_on(self, name: str) -> bool:
        """Return whether a variable is a true switch."""
        return self.text(name) in ("true", "1", "yes", "on", "y", "t")

    def number(self, name: str) -> float | None:
        """Return the number in a variable; None if it has none."""
        if not (text := self.text(name)):
            return None
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(text)):
                return number
        raise UserError(f"{name}={shown(text)} is not a number: correct it, or unset it.")

    def need(self, flag: str, value: object) -> None:
        """Note a flag of which the run has another value; None asks for nothing."""
        if value is None or self.flags[flag] == value:
            return
        text = f"{value:g}" if isinstance(value, float) else str(value)
        self.missing.append(f"--{flag}" if value is True else f"--{flag} {text}")

    def need_file(self, flag: str, content: JsonObject, strategy: str = "") -> None:
        """Note a file that the run does not have, or the strategy that has the same content."""
        file = f"--{flag} FILE (with {shown(json.dumps(content), 300)})"
        self.missing.append(f"--strategy {strategy}" if strategy else file)


def check(flags: FlagValues, strategy: Strategy, env: Mapping[str, str]) -> tuple[str, ...]:
    """Check that the flags of a run have what accelerate's configuration asks for.

    Args:
        flags: the values of all flags by name.
        strategy: that of the run, with the options of its file.
        env: the environment of this process, which `accelerate launch` has started.
    Returns:
        Lines about choices that have no effect here.
    Raises:
        UserError: a choice is not among the flags, or is not supported.
    """
    choices = Choices(env, flags)
    for name, same in REFUSED.items():
        if choices.text(name, *same[:1]) not in ("", *same):
            raise _unsupported(f"{name}={shown(env[name])}")
    if choices.is_on("ACCELERATE_USE_DEEPSPEED"):
        _compare_deepspeed(choices, strategy)
    elif choices.is_on("ACCELERATE_USE_FSDP"):
        _compare_fsdp(choices, strategy)
    precision = choices.text(ACCELERATE)
    if precision not in ("", "no", "fp16", "bf16"):
        raise _unsupported(f"{ACCELERATE}={shown(precision)}")
    choices.need("precision", precision if precision not in ("", "no") else None)
    choices.need(
        "gradient_accumulation_steps", choices.number("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    )
    _compare_compile(choices)
    if choices.missing:
        raise UserError(
            f"The configuration of accelerate launch asks for {' '.join(choices.missing)}, and the "
            "flags of this run do not: add them to the command, or remove these choices from the "
            "configuration."
        )
    return tuple(_notices(choices, precision))


def _unsupported(choice: str) -> UserError:
    return UserError(
        f"The configuration of accelerate launch has {choice}, which is not supported here: remove "
        "it from the configuration (docs/FLAGS.md lists what a run can do)."
    )


def _compare_deepspeed(choices: Choices, strategy: Strategy) -> None:
    """Compare the ZeRO stage, where its states are, and the gradient clipping."""
    file = choices.env.get(f"{DEEPSPEED}CONFIG_FILE", "none")
    if file == "none":
        _compare_zero(choices, strategy)
    else:  # accelerate takes the stage and the places from it
        own = choices.flags["ds_config"]
        if own is None or os.path.realpath(own) != os.path.realpath(file):
            choices.missing.append(f"--ds_config {shown(file)}")
    choices.need("max_grad_norm", choices.number("ACCELERATE_GRADIENT_CLIPPING"))


def _compare_zero(choices: Choices, strategy: Strategy) -> None:
    stage = choices.number(f"{DEEPSPEED}ZERO_STAGE")
    stage = 2 if stage is None else int(stage)
    devices = {
        part: choices.text(f"{DEEPSPEED}{part}_DEVICE".upper(), "none") for part in OFFLOADED
    }
    wanted = (stage, *(PLACES.get(device, device) for device in devices.values()))
    if _described(strategy) != wanted:
        zero = {"stage": stage, **{part: {"device": devices[part]} for part in OFFLOADED}}
        names = [name for name, row in STRATEGIES.items() if _described(row) == wanted]
        choices.need_file("ds_config", {"zero_optimization": zero}, names[0] if names else "")
    for part in OFFLOADED:
        path = choices.env.get(f"{DEEPSPEED}{part}_NVME_PATH".upper(), "none")
        if devices[part] == "nvme" and path != "none":
            choices.need("nvme_path", path)


def _described(strategy: Strategy) -> tuple[object, ...]:
    """Return the ZeRO stage, and where the optimizer states and the parameters are."""
    if isinstance(strategy, DeepSpeed):
        return strategy.stage, strategy.optimizer_on, strategy.parameters_on
    return () if strategy.sharded else (0, "device", "device")


def _compare_fsdp(choices: Choices, strategy: Strategy) -> None:
    """Compare the options of FSDP, and the recomputation of activations."""
    content = _fsdp_file(choices)
    wanted = options_of(content, "", "The configuration of accelerate launch")
    own = strategy.options if isinstance(strategy, FSDP) else None
    if wanted.no_shard:
        choices.need("strategy", "dp")
    elif own is None or replace(own, precision=None, reduce_dtype=None) != wanted:
        choices.need("strategy", "fsdp")
        if own is not None or wanted != FsdpOptions():
            choices.need_file("fsdp_config", content)
    if choices.is_on("FSDP_ACTIVATION_CHECKPOINTING"):
        choices.need("gradient_checkpointing", True)


def _fsdp_file(choices: Choices) -> JsonObject:
    """Return the variables of FSDP as a file of --fsdp_config, without those of the default."""
    content: JsonObject = {}
    if choices.text("FSDP_VERSION", "1") == "1":
        sharding = choices.text("FSDP_SHARDING_STRATEGY", "full_shard").upper()
        if sharding in ("1", "2", "3", "4", "5"):
            sharding = SHARDING[int(sharding) - 1]
        # Of both words of HYBRID_SHARD_ZERO2 a file has a key.
        keeps = sharding in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
        content["fsdp_sharding_strategy"] = sharding.removesuffix("_ZERO2")
        content["fsdp_forward_prefetch"] = choices.is_on("FSDP_FORWARD_PREFETCH")
    else:  # the variable of the strategy is that of version 1, and always set
        keeps = not choices.is_on("FSDP_RESHARD_AFTER_FORWARD")
    content["fsdp_reshard_after_forward"] = not keeps
    content["fsdp_offload_params"] = choices.is_on("FSDP_OFFLOAD_PARAMS")
    policy = choices.text("FSDP_AUTO_WRAP_POLICY", "transformer_based_wrap").upper()
    content["fsdp_auto_wrap_policy"] = policy
    layers = choices.env.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "None")
    if policy == "TRANSFORMER_BASED_WRAP" and layers not in ("", "None"):
        content["fsdp_transformer_layer_cls_to_wrap"] = layers
    return {key: value for key, value in content.items() if DEFAULTS_OF_FSDP.get(key) != value}


def _compare_compile(choices: Choices) -> None:
    """Compare the compilation, of which --compile decides the mode."""
    prefix = "ACCELERATE_DYNAMO_"
    backend = choices.text(f"{prefix}BACKEND", "no")
    if backend == "no":
        return
    others = {"BACKEND": ("inductor",), "MODE": ("default",), "USE_FULLGRAPH": ("false",)}
    others |= {"USE_DYNAMIC": ("false",)}
    for name, (same,) in others.items():
        if (value := choices.text(prefix + name, same)) != same:
            raise _unsupported(f"{prefix}{name}={shown(value)}")
    choices.need("compile", True)


def _notices(choices: Choices, precision: str) -> list[str]:
    """Return lines about choices that have no effect, and about the default of the precision."""
    lines = []
    if precision == "no" and choices.flags["precision"] == "auto":
        lines.append(
            "accelerate's mixed_precision is no, its default: --precision auto decides, and "
            "--precision fp32 is full precision"
        )
    names = [
        name
        for name, same in WITHOUT_EFFECT.items()
        if choices.text(name, *same[:1]) not in ("", *same)
    ]
    if names:
        lines.append(f"Ignored, because it has no effect here: {', '.join(names)}")
    return lines
