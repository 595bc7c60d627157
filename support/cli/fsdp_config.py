"""FSDP's options (--fsdp_config): from the JSON of accelerate to PyTorch's FSDP2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.errors import UserError
from support.files.user_files import did_you_mean, read_json, shown

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
PRECISIONS = {"BFLOAT16": "bf16", "BF16": "bf16", "FLOAT16": "fp16", "FP16": "fp16"}
PRECISIONS |= {"FLOAT32": "fp32", "FP32": "fp32", "NO": "fp32"}
LAYERS = "fsdp_transformer_layer_cls_to_wrap"
LIKE_FORWARD = "fsdp_backward_prefetch"  # an option of FSDP1, and no misspelled one
# Key -> the allowed values.
CHOICES: dict[str, tuple] = {
    "fsdp_sharding_strategy": SHARDING,
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "NO_WRAP"),
    "fsdp_mixed_precision": tuple(PRECISIONS),
    "fsdp_reshard_after_forward": (True, False),
    "fsdp_offload_params": (True, False),
    "fsdp_forward_prefetch": (True, False),
}


@dataclass(frozen=True)
class FsdpOptions:
    """Options of FSDP."""

    # True frees a layer's all-gathered parameters after forward (FULL_SHARD); False keeps them
    # until backward (SHARD_GRAD_OP), as ZeRO 2 does.
    reshard_after_forward: bool = True
    hybrid: bool = False  # shard within a node and replicate across nodes (HYBRID_SHARD)
    no_shard: bool = False  # NO_SHARD, which is --strategy dp
    # Class names of the layers that are sharded separately; empty for the model's own transformer
    # blocks.
    layers: tuple[str, ...] = ()
    wrap_layers: bool = True  # False shards the whole model as one unit (NO_WRAP)
    precision: str | None = None  # fsdp_mixed_precision, in the terms of --precision
    offload: bool = False  # keep parameters, gradients and optimizer states in host memory
    forward_prefetch: bool = False  # all-gather the next layer while forward computes one
    words: str = field(default="", compare=False)  # of --fsdp
    notes: tuple[str, ...] = ()  # for the user


def read_fsdp_config(path: str | None, words: str = "") -> FsdpOptions:
    """Return the options of --fsdp_config and of --fsdp.

    Args:
        path: the file; None for the defaults.
        words: those of --fsdp, as Trainer takes them, with spaces between.
    Raises:
        UserError: the file is not a JSON object, or has a wrong value or a misspelled key.
    """
    values: dict[str, Any] = {}  # by key, with the prefix fsdp_
    ignored = []
    for key, value in (read_json("--fsdp_config", path) if path else {}).items():
        name = key if key.startswith("fsdp_") else f"fsdp_{key}"
        value = value.upper() if isinstance(value, str) and name != LAYERS else value
        if name in CHOICES and value not in CHOICES[name]:
            allowed = ", ".join(map(str, CHOICES[name]))
            raise UserError(f"{shown(path)}: {shown(key)} {shown(value)} is not in {allowed}.")
        if name in CHOICES or name == LAYERS:
            values[name] = value
        elif (guess := did_you_mean(name, (*CHOICES, LAYERS))) and name != LIKE_FORWARD:
            raise UserError(f"{shown(path)}: unknown key {shown(key)}{guess}")
        elif not key.startswith("_"):  # used for comments
            ignored.append(shown(key))
    layers = values.get(LAYERS, [])
    layers = layers if isinstance(layers, list) else str(layers).split(",")
    chosen = {values.get("fsdp_sharding_strategy"), *words.upper().split()}
    keeps = bool(chosen & {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"})
    return FsdpOptions(
        reshard_after_forward=values.get("fsdp_reshard_after_forward", True) and not keeps,
        hybrid=bool(chosen & {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}),
        no_shard="NO_SHARD" in chosen,
        layers=tuple(str(name).strip() for name in layers),
        wrap_layers=values.get("fsdp_auto_wrap_policy") != "NO_WRAP",
        precision=PRECISIONS.get(values.get("fsdp_mixed_precision", "")),
        offload=values.get("fsdp_offload_params", False) or "OFFLOAD" in chosen,
        forward_prefetch=values.get("fsdp_forward_prefetch", False),
        words=words,
        notes=(f"ignored, as there is no such option: {', '.join(ignored)}",) if ignored else (),
    )
