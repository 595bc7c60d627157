"""FSDP's options (--fsdp_config): from the JSON of accelerate to PyTorch's FSDP2."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from support.errors import UserError
from support.files.user_files import did_you_mean, read_json, shown

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
WRAPPING = ("TRANSFORMER_BASED_WRAP", "NO_WRAP")
PRECISIONS = {
    **dict.fromkeys(("BFLOAT16", "BF16"), "bf16"),
    **dict.fromkeys(("FLOAT16", "FP16"), "fp16"),
    **dict.fromkeys(("FLOAT32", "FP32", "NO"), "fp32"),
}
# Key -> attribute of FsdpOptions, for true and false.
SWITCHES = {
    "fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_offload_params": "offload",
    "fsdp_forward_prefetch": "forward_prefetch",
}
CHOICES = {
    "fsdp_sharding_strategy": SHARDING,
    "fsdp_auto_wrap_policy": WRAPPING,
    "fsdp_mixed_precision": tuple(PRECISIONS),
}
LAYERS = "fsdp_transformer_layer_cls_to_wrap"
# Options of FSDP1, for which FSDP2 has no choice.
IGNORED = """
    fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_cpu_ram_efficient_loading
    fsdp_cuda_graphs fsdp_state_dict_type fsdp_sync_module_states fsdp_use_orig_params fsdp_version
    """.split()


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


def read_fsdp_config(path: str) -> FsdpOptions:
    """Read the file of --fsdp_config.

    Raises:
        UserError: the file cannot be read, is not a JSON object, or has an unknown key or value.
    """
    values: dict[str, Any] = {}
    ignored = []
    for key, value in read_json("--fsdp_config", path).items():
        if key.startswith("_"):  # used for comments
            continue
        name = key if key.startswith("fsdp_") else f"fsdp_{key}"
        if name in IGNORED:
            ignored.append(key)
        elif name in SWITCHES or name in CHOICES or name == LAYERS:
            values |= _attributes(name, value, f"{shown(path)}: {shown(key)}")
        else:
            guess = did_you_mean(name, [*SWITCHES, *CHOICES, LAYERS, *IGNORED])
            raise UserError(f"{shown(path)}: unknown key {shown(key)}{guess or '.'}")
    notes = (f"FSDP2 has no {', '.join(ignored)}: ignored",) if ignored else ()
    return FsdpOptions(**values, notes=notes)


def _attributes(name: str, value: Any, place: str) -> dict[str, Any]:
    """Return what a key of the file sets, by attribute of FsdpOptions."""
    if name in SWITCHES:
        if not isinstance(value, bool):
            raise UserError(f"{place} must be true or false, and is {shown(value)}.")
        return {SWITCHES[name]: value}
    if name == LAYERS:
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{place} must be the name of a layer class, or a list of them.")
        return {"layers": tuple(name.strip() for name in names)}
    choice = str(value).upper()
    if choice not in CHOICES[name]:
        raise UserError(f"{place} {shown(value)} is not in {', '.join(CHOICES[name])}.")
    if name == "fsdp_mixed_precision":
        return {"precision": PRECISIONS[choice]}
    if name == "fsdp_auto_wrap_policy":
        return {"wrap_layers": choice != "NO_WRAP"}
    return {
        "reshard_after_forward": choice != "SHARD_GRAD_OP",
        "hybrid": choice == "HYBRID_SHARD",
        "no_shard": choice == "NO_SHARD",
    }


def with_words(options: FsdpOptions, flag: str) -> FsdpOptions:
    """Return the options with what the words of --fsdp choose, as Trainer takes them.

    Args:
        flag: checked words with a space between.
    """
    words = {*flag.split()}
    notes = options.notes
    if words and not words & {"auto_wrap", "no_shard"}:
        notes += ("each transformer block is sharded separately, as with auto_wrap",)
    keeps = bool(words & {"shard_grad_op", "hybrid_shard_zero2"})
    return replace(
        options,
        reshard_after_forward=options.reshard_after_forward and not keeps,
        hybrid=options.hybrid or bool(words & {"hybrid_shard", "hybrid_shard_zero2"}),
        no_shard=options.no_shard or "no_shard" in words,
        offload=options.offload or "offload" in words,
        words=flag,
        notes=notes,
    )
