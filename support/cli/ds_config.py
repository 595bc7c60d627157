"""DeepSpeed's configuration (--ds_config): read it, reconcile it with the flags, complete it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from support.cli.arguments import global_batch
from support.cli.flags import build_parser
from support.errors import UserError
from support.files.user_files import parse_json, read_text, shown
from support.strategy import STRATEGIES, Strategy

# Hugging Face's convention for "as on the command line"; DeepSpeed itself does not know it.
AUTO = "auto"
# Loss scaling in fp16, the same for torch's GradScaler and DeepSpeed: an overflow skips the update
# and halves the scale; GROWTH_INTERVAL steps without an overflow double it.
INITIAL_SCALE_POWER, GROWTH_INTERVAL = 16, 2000
LOSS_SCALING = {
    "initial_scale_power": INITIAL_SCALE_POWER,
    # DeepSpeed does not count the first step after an overflow. (From the second doubling without
    # an overflow in between, it doubles one step earlier than torch.)
    "loss_scale_window": GROWTH_INTERVAL - 1,
    "hysteresis": 1,  # DeepSpeed's default of 2 does not reduce the scale at the first overflow
}
# Keys of DeepSpeed's files by the type of their values. A key has the same type in all sections.
OBJECTS = frozenset(
    """
    optimizer scheduler params bf16 fp16 zero_optimization offload_optimizer offload_param aio
    data_types activation_checkpointing flops_profiler comms_logger
    """.split()
)
NEVER_NULL = frozenset("optimizer scheduler params bf16 fp16 zero_optimization".split())
SWITCHES = frozenset(
    """
    enabled torch_adam fused adam_w_mode amsgrad overlap_comm contiguous_gradients reduce_scatter
    allgather_partitions round_robin_gradients pin_memory pipeline_read pipeline_write fast_init
    single_submit overlap_events use_gds auto_cast check_grad_overflow consecutive_hysteresis
    stage3_gather_16bit_weights_on_model_save wall_clock_breakdown memory_breakdown dump_state
    prescale_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    load_from_fp32_weights elastic_checkpoint ignore_unused_parameters
    save_muon_momentum_buffer_in_memory
    """.split()
)
NUMBERS = frozenset(
    """
    stage train_batch_size steps_per_print gradient_predivide_factor reduce_bucket_size
    allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    buffer_count buffer_size max_in_cpu block_size queue_depth intra_op_parallelism loss_scale
    initial_scale_power loss_scale_window hysteresis min_loss_scale eps ratio
    """.split()
)
DEVICES = ("none", "cpu", "nvme")  # values of offload_….device

# Key of a DeepSpeed file -> the flag with the same meaning.
FLAG_OF_KEY = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "lr",
    "optimizer.params.weight_decay": "weight_decay",
    "zero_optimization.offload_optimizer.nvme_path": "nvme_path",
    "zero_optimization.offload_param.nvme_path": "nvme_path",
}
# Parameters of an optimizer for which DeepSpeed's AdamW and PyTorch's are the same.
PARAMS_OF_ADAM = ("lr", "weight_decay", "betas", "eps")
# Schedulers that Hugging Face's files have with "auto" values, and the same --lr_scheduler.
AUTO_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}


def read_ds_config(path: str) -> dict:
    """Read a DeepSpeed configuration.

    As in DeepSpeed, the file is JSON, or JSON with comments and trailing commas (hjson).

    Raises:
        UserError: the file cannot be read, is not valid JSON (with line and column) or no object,
            or a value has the wrong type.
    """
    text = read_text("--ds_config", path)
    try:
        config = parse_json(text, path)
    except json.JSONDecodeError as strict:
        import hjson  # not needed for plain JSON

        try:
            config = json.loads(json.dumps(parse_json(text, path, hjson.loads)))
        except hjson.HjsonDecodeError as error:
            raise UserError(
                f"{path}, line {error.lineno}, column {error.colno}: {error.msg}."
            ) from error
        # hjson reads an unquoted value to the end of its line. A missing comma thus gives a string
        # such as `4 "fp16": {`.
        if _swallowed_a_line(config):
            raise UserError(
                f"{path}, line {strict.lineno}, column {strict.colno}: {strict.msg}."
            ) from strict
    if not isinstance(config, dict):
        raise UserError(f"{path}: a DeepSpeed configuration is a JSON object, {{ … }}.")
    # DeepSpeed would convert wrong types silently or ignore them: pydantic reads "yes" as true.
    for place, key, value in _values(config):
        if expected := _expected(key, value):
            raise UserError(
                f"{path}: {place} must be {expected}, and is {shown(json.dumps(value))}."
            )
    return config


def _values(config: dict, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (dotted key, last part of the key, value) of an object and of the objects in it."""
    for key, value in config.items():
        yield prefix + key, key, value
        if isinstance(value, dict):
            yield from _values(value, f"{prefix}{key}.")


def _expected(key: str, value) -> str | None:
    """Return what the value of a key must be; None if it is."""
    if key in OBJECTS:
        is_right = isinstance(value, dict) or (value is None and key not in NEVER_NULL)
        return None if is_right else "an object, { … }"
    if value is None or value == AUTO:
        return None
    if key in SWITCHES:
        return None if isinstance(value, bool) else "true or false, without quotes"
    if key in NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        return "a number, without quotes"
    if key == "stage" and isinstance(value, float):
        return "a whole number"
    if key == "device" and value not in DEVICES:
        return f"one of {', '.join(DEVICES)}"
    return None


def _swallowed_a_line(value) -> bool:
    if isinstance(value, dict):
        return any(_swallowed_a_line(item) for item in value.values())
    if isinstance(value, list):
        return any(_swallowed_a_line(item) for item in value)
    return isinstance(value, str) and any(mark in value for mark in '"{}[]\n')


def lookup(config: dict, key: str):
    """Return the value at a dotted key ("optimizer.params.lr"), or None."""
    for name in key.split("."):
        if not isinstance(config, dict) or name not in config:
            return None
        config = config[name]
    return config


def configured_strategy(args) -> Strategy:
    """Return the row of --strategy, with the places of the states that the DeepSpeed file chooses.

    ZeRO stages 1 and 3 with an optimizer in host memory have no row of their own.
    """
    row, config = STRATEGIES[args.strategy], args.ds_config_dict
    if config is None:
        return row

    def place(part: str) -> str:
        device = lookup(config, f"zero_optimization.{part}.device")
        return {"cpu": "host", "nvme": "nvme"}.get(device, "device")

    return replace(
        row, optimizer_on=place("offload_optimizer"), parameters_on=place("offload_param")
    )


def nvme_folder(config: dict | None) -> str | None:
    """Return the folder of a complete configuration's NVMe files; None without such files."""
    zero = (config or {}).get("zero_optimization", {})
    for part in ("offload_optimizer", "offload_param"):
        if lookup(zero, f"{part}.device") == "nvme":
            return zero[part]["nvme_path"]
    return None


def _put(config: dict, key: str, value) -> None:
    *parents, last = key.split(".")
    for name in parents:
        config = config.setdefault(name, {})
    config[last] = value


def choose_strategy(config: dict, file: str) -> str:
    """Return the strategy that a DeepSpeed file describes."""
    stage = lookup(config, "zero_optimization.stage")
    offloads_to = lookup(config, "zero_optimization.offload_optimizer.device")
    if stage not in (1, 2, 3):
        raise UserError(
            f"{file} has zero_optimization.stage {stage}: it must be 1, 2 or 3 "
            "(0 is --strategy dp)."
        )
    return {(2, "cpu"): "offload", (3, "nvme"): "infinity"}.get(
        (stage, offloads_to), f"zero{stage}"
    )


def reconcile(args, config: dict, file: str) -> dict:
    """Reconcile a DeepSpeed file with the flags, before torch or a model is loaded.

    A value in the file that contradicts a given flag is an error. If the flag was not given, the
    file's value is used and copied to `args`. Values that are "auto" or missing come from the
    flags. Values that depend on the model or the device (precision, bucket sizes) stay "auto" until
    `complete_ds_config`.

    Args:
        args: the parsed flags; changed in place.
        config: the file's content; changed in place.
    Returns:
        `config`.
    Raises:
        UserError: the file contradicts --strategy or another given flag, or has a value that is not
            supported.
    """
    _check_strategy(args.strategy, config, file)
    _set_optimizer(args, config, file)
    # Before the loop, which replaces "auto" by the flag's value.
    accumulation_is_open = "gradient_accumulation_steps" not in args.given and config.get(
        "gradient_accumulation_steps"
    ) in (None, AUTO)
    for key, flag in FLAG_OF_KEY.items():
        value = lookup(config, key)
        if key.startswith("optimizer.") and "optimizer" not in config:
            continue
        if flag == "nvme_path" and (
            value is None or lookup(config, key.rsplit(".", 1)[0] + ".device") != "nvme"
        ):
            continue
        if value not in (None, AUTO):
            _follow(args, flag, key, value, file)
        _put(config, key, getattr(args, flag))
    _reconcile_total_batch(args, config, accumulation_is_open, file)
    _reconcile_precision(args, config, file)
    _reconcile_scheduler(args, config, file)
    return config


def _follow(args, flag: str, key: str, value, file: str) -> None:
    """Set a flag to a value of the file, unless the flag was given with another value."""
    required = _as_flag(flag, key, value, file)  # the file may have a number in quotes
    if flag in args.given and required != getattr(args, flag):
        raise _contradiction(f"{flag} {getattr(args, flag)}", f"{key} {value}", file)
    setattr(args, flag, required)


def _contradiction(flag: str, value: str, file: str) -> UserError:
    return UserError(f"--{flag} contradicts {value} in {file}: change one of them.")


def _check_strategy(strategy: str, config: dict, file: str) -> None:
    stage = lookup(config, "zero_optimization.stage")
    if stage != STRATEGIES[strategy].stage:
        raise UserError(
            f"{file} has zero_optimization.stage {stage}, but --strategy {strategy} is stage "
            f"{STRATEGIES[strategy].stage}: change one of them."
        )
    if stage == 1 and lookup(config, "data_types.grad_accum_dtype") not in (None, AUTO):
        raise UserError(
            f"{file}: data_types.grad_accum_dtype gives stage 1 another optimizer, which "
            "checkpoints and the export do not support: leave it out, or use stage 2."
        )
    offloads_to = lookup(config, "zero_optimization.offload_optimizer.device")
    required = {"offload": "cpu", "infinity": "nvme"}.get(strategy)
    if required and offloads_to != required:
        raise UserError(
            f"{file} has zero_optimization.offload_optimizer.device {offloads_to}, but --strategy "
            f"{strategy} keeps the optimizer on {required}: change one of them."
        )
    parameters_to = lookup(config, "zero_optimization.offload_param.device")
    if required != "nvme" and "nvme" in (offloads_to, parameters_to):
        raise UserError(
            f"{file} keeps model states on nvme, but --strategy is {strategy}: use --strategy "
            "infinity, with offload_optimizer.device nvme."
        )


def _set_optimizer(args, config: dict, file: str) -> None:
    """Add AdamW, unless the file has an optimizer, and reconcile Adam's betas and epsilon.

    The other optimizers of --optim are created by us (strategies/optimizer.py), and DeepSpeed must
    allow them.
    """
    if args.ds_config and (users_type := lookup(config, "optimizer.type")):
        _check_optimizer_flags(args, str(users_type), file)
    if args.optim != "adamw":
        config.pop("optimizer", None)
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        return
    if "optimizer" not in config:
        config["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(PARAMS_OF_ADAM, AUTO)}
    params = config["optimizer"].get("params", {})
    offloads_to = lookup(config, "zero_optimization.offload_optimizer.device")
    is_adam = str(config["optimizer"].get("type")).lower() in ("adam", "adamw")
    if is_adam and offloads_to in (None, "none") and {*params} <= {*PARAMS_OF_ADAM}:
        # The same updates as DeepSpeed's FusedAdam, which compiles an op.
        params |= {"torch_adam": True, "fused": True}
        config["optimizer"]["params"] = params
    _reconcile_adam(args, config, params, file)


def _check_optimizer_flags(args, users_type: str, file: str) -> None:
    """Check the flags next to an optimizer of the file."""
    # DeepSpeed's Adam is AdamW unless the file says otherwise.
    is_adamw = users_type.lower() in ("adam", "adamw")
    if "optim" in args.given and not (is_adamw and args.optim == "adamw"):
        raise UserError(
            f"{file} has the optimizer {users_type}, and --optim is {args.optim}: remove the "
            "section optimizer from the file, or leave --optim out."
        )
    flags = sorted({"adam_beta1", "adam_beta2", "adam_epsilon"} & args.given)
    if flags and "adam" not in users_type.lower():
        raise UserError(
            f"{file} has the optimizer {users_type}, and --{flags[0]} is for Adam: "
            "leave the flag out."
        )


def _reconcile_adam(args, config: dict, params: dict, file: str) -> None:
    """Reconcile the betas and epsilon of `params`, the optimizer's section, with the flags."""
    betas = params.get("betas", AUTO)
    betas = betas if isinstance(betas, list) and len(betas) == 2 else [AUTO, AUTO]
    values = {"adam_beta1": betas[0], "adam_beta2": betas[1], "adam_epsilon": params.get("eps")}
    for flag, value in values.items():
        if value not in (None, AUTO):
            key = "optimizer.params.eps" if flag == "adam_epsilon" else "optimizer.params.betas"
            _follow(args, flag, key, value, file)
    # An optimizer of the file without these keys may not have them.
    if params.get("betas") == AUTO or {"adam_beta1", "adam_beta2"} & args.given:
        _put(config, "optimizer.params.betas", [args.adam_beta1, args.adam_beta2])
    if params.get("eps") == AUTO or "adam_epsilon" in args.given:
        _put(config, "optimizer.params.eps", args.adam_epsilon)


def _as_flag(flag: str, key: str, value, file: str):
    """Convert and check a value of the file as the flag's value would be on the command line."""
    action = next(action for action in build_parser()._actions if action.dest == flag)
    convert: Callable = action.type or str  # type: ignore[assignment]
    try:
        return convert(str(value))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{file}: {key}: {error}.") from error


def _reconcile_total_batch(args, config: dict, accumulation_is_open: bool, file: str) -> None:
    world_size = args.simulate_gpus or int(os.environ.get("WORLD_SIZE", 1))
    file_total, micro_batch_total = config.get("train_batch_size"), args.batch_size * world_size
    if (
        accumulation_is_open
        and isinstance(file_total, int)
        and file_total >= micro_batch_total
        and file_total % micro_batch_total == 0
    ):
        steps = _as_flag(
            "gradient_accumulation_steps",
            f"train_batch_size / {micro_batch_total}",
            file_total // micro_batch_total,
            file,
        )
        args.gradient_accumulation_steps = config["gradient_accumulation_steps"] = steps
    product = global_batch(args, world_size)
    total = config.get("train_batch_size", AUTO)
    if total not in (AUTO, product):
        raise UserError(
            f"{file} has train_batch_size {total}, but --batch_size {args.batch_size} × "
            f"--gradient_accumulation_steps {args.gradient_accumulation_steps} × {world_size} "
            f"ranks = {product}: change one."
        )
    config["train_batch_size"] = product


def _reconcile_precision(args, config: dict, file: str) -> None:
    enabled = {name: lookup(config, f"{name}.enabled") for name in ("bf16", "fp16")}
    if enabled["bf16"] is True and enabled["fp16"] is True:
        raise UserError(f"{file} enables both bf16 and fp16: keep one.")
    requested = args.precision if "precision" in args.given else AUTO
    enabled_name = next((name for name, value in enabled.items() if value is True), None)
    if enabled_name and requested not in (AUTO, enabled_name):
        raise _contradiction(f"precision {requested}", f"{enabled_name}.enabled true", file)
    if requested != AUTO and enabled.get(requested) is False:
        raise _contradiction(f"precision {requested}", f"{requested}.enabled false", file)
    if enabled_name:
        args.precision = enabled_name
    elif requested == AUTO and enabled["bf16"] is False:
        args.precision = "fp32"


def _reconcile_scheduler(args, config: dict, file: str) -> None:
    """Replace a scheduler of "auto" values by --lr_scheduler; check that flags leave others alone.

    Raises:
        UserError: a flag contradicts the scheduler, or only some of its values are "auto".
    """
    scheduler = config.get("scheduler")
    if scheduler is None:
        return
    kind, params = lookup(scheduler, "type"), lookup(scheduler, "params") or {}
    same = AUTO_SCHEDULERS.get(str(kind))
    ours = {"warmup_min_lr": 0, "warmup_type": "linear"}
    if (
        same
        and AUTO in params.values()
        and all(value in (AUTO, ours.get(key, AUTO)) for key, value in params.items())
    ):
        if "lr_scheduler" in args.given and args.lr_scheduler != same:
            raise _contradiction(f"lr_scheduler {args.lr_scheduler}", f"the scheduler {kind}", file)
        args.lr_scheduler = same
        del config["scheduler"]
        return
    for flag in ("lr_scheduler", "warmup_steps", "warmup_ratio", "lr"):
        if flag in args.given:
            raise _contradiction(flag, f"the scheduler {kind}", file)
    if AUTO in params.values():
        raise UserError(
            f'{file}: replace "auto" in the scheduler by numbers, '
            "or remove the scheduler and use --lr_scheduler."
        )


def bucket_sizes(hidden_size: int, parameters: int, tied_on_nvme: bool) -> dict[str, int]:
    """Choose the sizes of DeepSpeed's buckets for a model.

    DeepSpeed's default buckets hold 5e8 elements, more than the whole of GPT-2 medium. Ours hold
    one transformer block, about 12 · hidden² parameters (4 · hidden² in attention, 8 · hidden² in
    the MLP), so that communication overlaps with the computation of the next transformer block and
    a bucket is small compared with the model.

    Args:
        tied_on_nvme: parameters are offloaded to NVMe, and two layers share one.
    Returns:
        Numbers of elements, by their keys under zero_optimization.
    """
    block = min(max(12 * hidden_size**2, 1_000_000), max(parameters, 1))
    return {
        "reduce_bucket_size": block,
        "allgather_bucket_size": block,
        # DeepSpeed 0.19 prefetches a tied weight from NVMe a second time while it is being read,
        # and stops with "already assigned swap buffer"; without prefetching it does not.
        "stage3_prefetch_bucket_size": 0 if tied_on_nvme else block,
        # Norms and biases are not sharded: they are small, and an all-gather of each costs time.
        "stage3_param_persistence_threshold": 10 * hidden_size,
        # An all-gathered parameter is freed at once if the next transformer block does not need it.
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": block,
        "sub_group_size": max(4 * block, 10_000_000),
    }


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
    """Fill in the values that depend on the device and the model.

    Args:
        config: the reconciled configuration; changed in place.
        world_size: number of ranks; each keeps 1 / world_size of a parameter.
    Returns:
        `config`, without any "auto".
    Raises:
        UserError: a value is "auto", and there is no rule for it.
    """
    for name in ("bf16", "fp16"):
        if precision == name or name in config:
            config.setdefault(name, {})["enabled"] = precision == name
    if "fp16" in config:
        _set_if(config["fp16"], (None, AUTO), LOSS_SCALING)
    zero = config["zero_optimization"]
    tied_on_nvme = model.tied and lookup(zero, "offload_param.device") == "nvme"
    _set_if(zero, (AUTO,), bucket_sizes(model.hidden_size, model.parameters, tied_on_nvme))
    # A single rank has no communication to overlap. Stages 1 and 2 would still synchronize the
    # device after each backward, and allocate a second bucket.
    _set_if(zero, (AUTO,), {"overlap_comm": world_size > 1})
    for part in ("offload_optimizer", "offload_param"):
        if lookup(zero, f"{part}.device") == "nvme":
            zero[part]["nvme_path"] = nvme_folder
    # A buffer must hold a rank's shard of any parameter, with its padding.
    shard = -(-model.largest_parameter // world_size) + 4096
    _set_if(zero.get("offload_param") or {}, (AUTO,), {"buffer_size": shard})
    if lookup(config, "aio.block_size") == AUTO:
        config["aio"]["block_size"] = _io_block_size(config, model, world_size)
    for place, _, value in _values(config):
        if value == AUTO:
            raise UserError(
                f'DeepSpeed configuration: "auto" cannot be filled in for {place}: give a value.'
            )
    return config


def _set_if(section: dict, open_values: tuple, defaults: dict) -> None:
    """Set the keys whose values are among `open_values`; a missing key has the value None."""
    section.update(
        {key: value for key, value in defaults.items() if section.get(key) in open_values}
    )


def _io_block_size(config: dict, model: ModelSizes, world_size: int) -> int:
    """Return the bytes of one read or write of NVMe, from 128 KiB to 1 MiB.

    Reading or writing a rank's part of the largest parameter (2 bytes an element) then fills the
    queue once.
    """
    part, depth = 2 * model.largest_parameter // world_size, lookup(config, "aio.queue_depth") or 8
    return min(2**20, max(2**17, 2 ** ((part // depth).bit_length() - 1)))
