"""FSDP's options (--fsdp_config): from the JSON of accelerate and transformers to PyTorch's FSDP2.

Their keys are those of FSDP1; each is converted, or a note says what FSDP2 does instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from support.errors import UserError
from support.files.user_files import did_you_mean, read_json, shown

# accelerate also writes them as numbers, from 1.
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PRECISIONS = {
    "BFLOAT16": "bf16",
    "BF16": "bf16",
    "FLOAT16": "fp16",
    "FP16": "fp16",
    "FLOAT32": "fp32",
    "FP32": "fp32",
    "NO": "fp32",
}

PREFETCHES = "FSDP2 always fetches the next layer while backward computes one"
# Key -> (the value that describes what FSDP2 always does, the note for any other value).
ALWAYS = {
    "fsdp_backward_prefetch_policy": ("BACKWARD_PRE", PREFETCHES),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", PREFETCHES),
    "fsdp_use_orig_params": (True, "FSDP2 always keeps the original parameters"),
    "fsdp_sync_module_states": (True, "rank 0's weights are always broadcast to all ranks"),
    "fsdp_cpu_ram_efficient_loading": (True, "only rank 0 ever holds the whole model"),
    "fsdp_cuda_graphs": (False, "CUDA graphs are not used; --compile reduces the launch time"),
    "fsdp_version": (2, "this is FSDP2"),
}
# Key -> attribute of FsdpOptions, for true and false.
SWITCHES = {
    "fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_offload_params": "offload",
    "fsdp_forward_prefetch": "forward_prefetch",
}
# Keys whose values are converted by `_take`.
CONVERTED = """
    fsdp_sharding_strategy fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap
    fsdp_mixed_precision fsdp_state_dict_type
    """.split()


@dataclass
class FsdpOptions:
    """Options of FSDP."""

    # True frees a layer's all-gathered parameters after forward (FULL_SHARD); False keeps them
    # until backward (SHARD_GRAD_OP), as ZeRO 2 does.
    reshard_after_forward: bool = True
    hybrid: bool = False  # shard within a node and replicate across nodes (HYBRID_SHARD)
    no_shard: bool = False  # NO_SHARD, which is --strategy dp
    # Class names of the layers that are sharded separately; empty for the model's own transformer
    # blocks.
    layers: list[str] = field(default_factory=list)
    wrap_layers: bool = True  # False shards the whole model as one unit (NO_WRAP)
    # The value of fsdp_mixed_precision, in the terms of --precision; None if not set.
    precision: str | None = None
    offload: bool = False  # keep parameters, gradients and optimizer states in host memory
    # All-gather the next layer explicitly while forward computes one.
    forward_prefetch: bool = False
    words: str = field(default="", compare=False)  # those of --fsdp
    # One line for each key to which FSDP2 has no equal option.
    notes: list[str] = field(default_factory=list)


def read_fsdp_config(path: str) -> FsdpOptions:
    """Read the file of --fsdp_config.

    Raises:
        UserError: the file cannot be read, is not a JSON object, or has an unknown key or value.
    """
    config = read_json("--fsdp_config", path)
    options = FsdpOptions()
    for key, value in config.items():
        if not key.startswith("_"):  # used for comments
            _take(options, key, value, path)
    return options


def apply_fsdp_flag(options: FsdpOptions, flag: str | None) -> None:
    """Set what the words of --fsdp choose, as Trainer takes them.

    Args:
        options: of --fsdp_config, or the defaults; changed in place.
        flag: checked words with a space between; None or empty if the flag is not given.
    """
    options.words = flag or ""
    words = options.words.split()
    if words and not {"auto_wrap", "no_shard"} & {*words}:
        options.notes.append("each transformer block is sharded separately, as with auto_wrap")
    if {"shard_grad_op", "hybrid_shard_zero2"} & {*words}:
        options.reshard_after_forward = False
    options.hybrid |= bool({"hybrid_shard", "hybrid_shard_zero2"} & {*words})
    options.no_shard |= "no_shard" in words
    options.offload |= "offload" in words


def _take(options: FsdpOptions, key: str, value, path: str) -> None:
    """Set what a key of the file chooses, or add a note on what FSDP2 does instead."""
    name = key if key.startswith("fsdp_") else f"fsdp_{key}"
    place = f"{path}: {key}"
    if name in ALWAYS:
        always, note = ALWAYS[name]
        if value != always:
            options.notes.append(f"{key} {json.dumps(value)}: {note}")
    elif name in SWITCHES:
        if not isinstance(value, bool):
            raise UserError(f"{place} must be true or false, and is {json.dumps(value)}.")
        setattr(options, SWITCHES[name], value)
    elif name == "fsdp_sharding_strategy":
        if type(value) is int and 1 <= value <= len(SHARDING):
            value = SHARDING[value - 1]
        _check_choice(value, SHARDING, place)
        options.reshard_after_forward = value != "SHARD_GRAD_OP"
        options.hybrid, options.no_shard = value == "HYBRID_SHARD", value == "NO_SHARD"
    elif name == "fsdp_auto_wrap_policy":
        _check_choice(value, WRAPPING, place)
        options.wrap_layers = value != "NO_WRAP"
        if value == "SIZE_BASED_WRAP":
            note = "each layer is a unit of its own, whatever its size"
            options.notes.append(f"SIZE_BASED_WRAP: {note}")
    elif name == "fsdp_transformer_layer_cls_to_wrap":
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{place} must be the name of a layer class, or a list of them.")
        options.layers = names
    elif name == "fsdp_mixed_precision":
        _check_choice(str(value).upper(), PRECISIONS, place)
        options.precision = PRECISIONS[str(value).upper()]
    elif name == "fsdp_state_dict_type":
        options.notes.append(
            f"{name} {value}: checkpoints have this project's own format (every rank writes its "
            "part), and the trained model is exported as a whole"
        )
    else:
        guess = did_you_mean(name, [*ALWAYS, *SWITCHES, *CONVERTED]) or "."
        raise UserError(f"{path}: unknown key {shown(key)}{guess}")


def _check_choice(value, known: Iterable[str], place: str) -> None:
    if value not in known:
        raise UserError(f"{place} {json.dumps(value)} is none of {', '.join(known)}.")
