"""FSDP's options (--fsdp_config): from the JSON of accelerate to PyTorch's FSDP2."""

from typing import Any

from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.files.user_files import did_you_mean, read_user_json, shown
from distributed_training.strategies.fsdp.options import FsdpOptions
from distributed_training.strategies.strategy import Flags

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
PRECISIONS = {"BFLOAT16": "bf16", "BF16": "bf16", "FLOAT16": "fp16", "FP16": "fp16"}
PRECISIONS |= {"FLOAT32": "fp32", "FP32": "fp32", "NO": "fp32"}
# Key without the prefix fsdp_ -> the allowed values; None: names of classes.
KEYS: dict[str, Any] = {
    "sharding_strategy": SHARDING,
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "NO_WRAP"),
    "mixed_precision": tuple(PRECISIONS),
    "reduce_dtype": tuple(name for name in PRECISIONS if name != "NO"),  # MixedPrecisionPolicy's
    "reshard_after_forward": (True, False),
    "offload_params": (True, False),
    "forward_prefetch": (True, False),
    "transformer_layer_cls_to_wrap": None,
}
LIKE_FORWARD = "backward_prefetch"  # an option of FSDP1, and not a misspelled one


def read_fsdp_config(path: str | None, words: str) -> FsdpOptions:
    """Return the options of --fsdp_config and of --fsdp.

    Args:
        path: the file; None for the defaults.
        words: those of --fsdp, as Trainer takes them, with spaces between.
    Raises:
        UserError: the file is not a JSON object, or has a wrong value or a misspelled key.
    """
    content = read_user_json("--fsdp_config", path, unique_keys=True) if path else {}
    return options_of(content, words, shown(path))


def options_of(content: JsonObject, words: str, place: str) -> FsdpOptions:
    """Return the options of the keys of an FSDP file.

    Args:
        words: see `read_fsdp_config`.
        place: where the keys are from, for messages.
    Raises:
        UserError: a value is wrong, or a key is misspelled.
    """
    values: dict[str, Any] = {}  # by key, without the prefix
    ignored = []
    for given, value in content.items():
        key = given.removeprefix("fsdp_")
        allowed = KEYS.get(key)
        value = value.upper() if allowed and isinstance(value, str) else value
        if allowed and value not in allowed:
            known = ", ".join(map(str, allowed))
            raise UserError(f"{place}: {shown(given)} {shown(value)} is not in {known}.")
        values[key] = value
        if key in KEYS or key.startswith("_"):  # "_…" is a comment
            continue
        guess = did_you_mean(f"fsdp_{key}", [f"fsdp_{name}" for name in KEYS])
        if guess and key != LIKE_FORWARD:
            raise UserError(f"{place}: unknown key {shown(given)}{guess}")
        ignored.append(shown(given))
    layers = values.get("transformer_layer_cls_to_wrap") or []
    layers = layers if isinstance(layers, list) else str(layers).split(",")
    chosen = {values.get("sharding_strategy"), *words.upper().split()}
    return FsdpOptions(
        reshard_after_forward=values.get("reshard_after_forward", True)
        and not chosen & {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"},
        hybrid=bool(chosen & {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}),
        no_shard="NO_SHARD" in chosen,
        layers=tuple(str(name).strip() for name in layers),
        wrap_layers=values.get("auto_wrap_policy") != "NO_WRAP",
        precision=PRECISIONS.get(values.get("mixed_precision", "")),
        reduce_dtype=PRECISIONS.get(values.get("reduce_dtype", "")),
        offload=values.get("offload_params", False) or "OFFLOAD" in chosen,
        forward_prefetch=values.get("forward_prefetch", False),
        ignored=tuple(ignored),
    )


def read_options(flags: Flags) -> tuple[FsdpOptions, dict[str, Any], dict[str, str]]:
    """Read the options of --fsdp and of the FSDP file.

    Returns:
        The options; the values of the flags that they set, and the sources of these values.
    Raises:
        UserError: the file cannot be used, or contradicts --precision or --reduce_dtype.
    """
    path, values, sources = flags.values["fsdp_config"], {}, {}
    options = read_fsdp_config(path, flags.values["fsdp"] or "")
    for flag, key, value in (
        ("precision", "fsdp_mixed_precision", options.precision),
        ("reduce_dtype", "fsdp_reduce_dtype", options.reduce_dtype),
    ):
        if value is None:
            continue
        requested = flags.values[flag]
        if flag in flags.given and requested != value:
            raise UserError(
                f"--{flag} {requested} contradicts {key} in {path} ({value}): change one of them."
            )
        values[flag], sources[flag] = value, f"{path}: {key}"
    if options.no_shard:
        values["strategy"], sources["strategy"] = "dp", "NO_SHARD of FSDP"
    return options, values, sources


def notices(options: FsdpOptions, path: str | None) -> tuple[str, ...]:
    """Return lines about options of a file that have no effect, or another one.

    Args:
        path: --fsdp_config.
    """
    lines = []
    if options.ignored:
        names = ", ".join(options.ignored)
        lines.append(f"{path}: ignored, as there is no such option: {names}")
    if options.no_shard:
        lines.append("NO_SHARD: each rank holds the whole model: --strategy dp")
    return tuple(lines)
