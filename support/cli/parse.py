"""From the command line to the arguments: defaults, overridden by the run file, by the flags."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from support import PROJECT
from support.cli import aliases
from support.cli.argument_types import Parser
from support.cli.arguments import Arguments
from support.cli.conflicts import refuse_conflicts
from support.cli.datasets import parse_datasets
from support.cli.ds_config import choose_strategy, configured_strategy, merge, read_ds_config
from support.cli.flags import FLAGS, build_parser
from support.cli.fsdp_config import FsdpOptions, read_fsdp_config, with_words
from support.cli.run_file import read_run_file
from support.errors import UserError
from support.files.user_files import shown
from support.known_models import EMBEDDED_MODEL
from support.optimizers import OPTIMIZERS
from support.strategy import STRATEGIES

CHECK_SECONDS = 60  # --check: the longest wait for another rank
SIMULATED_STEPS = 3  # the first creates Adam's states; the last is measured
# Flags of torchrun, deepspeed and accelerate launch, which belong before the script's name.
LAUNCHER_FLAGS = frozenset(
    """
    nnodes nproc_per_node node_rank rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone
    max_restarts monitor_interval start_method role master_addr master_port local_addr log_dir
    redirects tee no_python
    hostfile exclude num_nodes num_gpus launcher launcher_args ssh_port no_ssh force_multi
    enable_each_rank_log bind_cores_to_rank
    multi_gpu cpu num_processes num_machines machine_rank main_process_ip main_process_port
    config_file gpu_ids
    """.split()
)


def parse_arguments(argv: list[str]) -> Arguments:
    """Parse the command line and its files, and resolve all values that they determine.

    Raises:
        UserError: unknown or contradicting flags, or an invalid run file, DeepSpeed file or FSDP
            file.
    """
    try:
        return _resolve(*_given(argv))
    except UserError as error:
        error.args = (as_typed(str(error), argv),)
        raise


def output_dir_of(argv: list[str]) -> str:
    """Return --output_dir of a command line and its run file; "" without one.

    Raises:
        UserError: as `parse_arguments`.
    """
    return _given(argv)[0].get("output_dir") or ""


def as_typed(message: str, argv: list[str]) -> str:
    """Return a message with the flags under the names that the user gave them."""
    for argument in argv if " two names " not in message else ():
        option = argument.partition("=")[0]
        for name, others in aliases.RENAMED.items():
            if option[2:] in others:
                message = re.sub(rf"--{name}(?!\w)", option, message)
    return message


def _given(argv: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values on the command line and in its run file, and where each is from."""
    parser = build_parser()
    flags, sources = _read(parser, argv)
    values: dict[str, Any] = {}
    if file := flags.get("config"):
        values, keys = _read(parser, read_run_file(file, parser), f"{shown(file)}: ")
        aliases.convert_precision(values, {})
        aliases.convert_strategy(values, {}, f"{shown(file)}: ")
        renamed = {name: key[2:] for name, key in keys.items() if key != f"--{name}"}
        of_file = {name: f"{file}: {renamed[name]}" if name in renamed else file for name in keys}
        sources = {**of_file, **sources}
    aliases.convert_precision(flags, values)
    aliases.convert_strategy(flags, values)
    switch = next((sources[name] for name in ("fsdp", "use_fsdp") if name in sources), "")
    if "strategy" in {**values, **flags}:
        sources.setdefault("strategy", switch)
    return {**values, **flags}, sources


def _read(parser: Parser, argv: list[str], place: str = "") -> tuple[dict, dict[str, str]]:
    """Parse arguments that come from one place.

    Returns:
        The values, and the spelling of each flag, by the names of the given flags.
    """
    try:
        options, unknown = parser.parse_known_args(argv)
    except UserError as error:
        error.args = (f"{place}{error}",)
        raise
    if unknown:
        flag = unknown[0].split("=")[0]
        if flag.startswith("--") and flag[2:].replace("-", "_") in LAUNCHER_FLAGS:
            raise UserError(
                f"{shown(flag)} is a flag of the launcher: write it before real_model_example.py "
                "(torchrun, deepspeed or accelerate launch … real_model_example.py …)."
            )
        parser.refuse_unknown(unknown[0])
    spelled = getattr(options, "spelled", {})
    sources = {aliases.SAME.get(name, name): option for name, option in spelled.items()}
    return {name: getattr(options, name) for name in spelled}, sources


def _resolve(given_values: dict[str, Any], sources: dict[str, str]) -> Arguments:
    """Return the arguments, with all values that the given ones determine."""
    values = {name: value for name, value in given_values.items() if name in FLAGS}
    datasets = parse_datasets(values.pop("dataset", []))
    fsdp_words = values.pop("fsdp", "")
    args = Arguments(
        **values,
        dataset=" ".join(map(str, datasets)) or None,  # type: ignore[arg-type]  # set below
        mixture=datasets if len(datasets) > 1 else (),
        given=frozenset({*given_values, *sources}),
        sources=sources,
    )
    args = _set(args, "Trainer's flags", **aliases.convert_trainer(args))
    refuse_conflicts(args)
    args = _resolve_strategy(_with_defaults(args), fsdp_words)
    _check_strategy_supports(args)
    return args


def _set(args: Arguments, source: str, **values) -> Arguments:
    """Return a copy with other values, and their source."""
    return args.replace(**values, sources={**args.sources, **dict.fromkeys(values, source)})


def _with_defaults(args: Arguments) -> Arguments:
    """Set the values that depend on other flags."""
    if args.check and args.ddp_timeout > CHECK_SECONDS:
        args = _set(args, "--check", ddp_timeout=CHECK_SECONDS)
    if args.simulate_gpus:
        steps = args.max_steps or SIMULATED_STEPS
        off = {"eval": False, "no_save": True, "no_export": True, "epochs": None}
        args = _set(args, "--simulate_gpus", max_steps=steps, **off)
    dataset, is_embedded = args.dataset, args.model == EMBEDDED_MODEL
    if dataset is None and args.eval_only and args.validation_file:
        dataset = args.validation_file  # no other text is used
    # At 1e-3 the embedded model's loss sometimes jumps; at such a step rounding differences
    # between strategies become visible.
    usual = 5e-4 if args.from_scratch or is_embedded else 2e-4 if args.lora_r else 5e-5
    alpha = 2.0 * args.lora_r if args.lora_r and args.lora_alpha is None else args.lora_alpha
    return args.replace(
        hang_seconds=args.hang_seconds or max(1, args.ddp_timeout // 10),
        dataset=dataset or ("pydocs" if is_embedded else "wikitext"),
        lora_alpha=alpha,
        lr=OPTIMIZERS[args.optim].lr or usual if args.lr is None else args.lr,
    )


def _resolve_strategy(args: Arguments, fsdp_words: str) -> Arguments:
    """Resolve the strategy and its settings from the flags, a DeepSpeed file and an FSDP file."""
    config = read_ds_config(args.ds_config) if args.ds_config else None
    if config is not None and args.ds_config and "strategy" not in args.given:
        chosen = choose_strategy(config)
        args = _set(args, f"{args.ds_config}: zero_optimization", strategy=chosen)
    if args.strategy == "fsdp":
        return _resolve_fsdp(args, fsdp_words)
    if STRATEGIES[args.strategy].uses_deepspeed:
        own = f"{PROJECT}/{STRATEGIES[args.strategy].config_file}"
        file = args.ds_config or own
        content = read_ds_config(own) if config is None else config
        world_size = args.simulate_gpus or int(os.environ.get("WORLD_SIZE", 1))
        resolved = merge(args, content, file, world_size)
        sources = {
            name: f"{file}{key}" if key.startswith(" ") else f"{file}: {key}"
            for name, key in resolved.keys.items()
        }
        args = args.replace(**resolved.flags, sources={**args.sources, **sources})
        args = args.replace(ds_config_dict=resolved.config)
    return args


def _resolve_fsdp(args: Arguments, words: str) -> Arguments:
    """Apply --fsdp and the FSDP file; a contradicting --precision is an error."""
    options = read_fsdp_config(args.fsdp_config) if args.fsdp_config else FsdpOptions()
    args = args.replace(fsdp=with_words(options, words))
    precision = args.fsdp.precision
    if precision and "precision" in args.given and args.precision != precision:
        raise UserError(
            f"--precision {args.precision} contradicts fsdp_mixed_precision in {args.fsdp_config} "
            f"({precision}): change one of them."
        )
    if precision:
        args = _set(args, f"{args.fsdp_config}: fsdp_mixed_precision", precision=precision)
    if args.fsdp.no_shard:
        note = "NO_SHARD: each rank holds the whole model, as with --strategy dp"
        options = replace(args.fsdp, notes=(*args.fsdp.notes, note))
        args = _set(args, args.fsdp_config or "--fsdp", strategy="dp", fsdp=options)
    return args


def _check_strategy_supports(args: Arguments) -> None:
    """Check that the strategy supports --optim and --load_in_4bit."""
    if args.load_in_4bit and STRATEGIES[args.strategy].shards_parameters:
        raise UserError(
            f"--load_in_4bit does not work under {args.strategy}, which would have to shard "
            "bitsandbytes' packed weights: use dp, zero1, zero2 or offload."
        )
    if reason := OPTIMIZERS[args.optim].problem(configured_strategy(args)):
        raise UserError(f"--optim {args.optim} does not work under {args.strategy}: {reason}.")


def ignored_flags(args: Arguments) -> list[str]:
    """Return one line for each given flag that has no effect in this run, and FSDP's notes."""
    uses = {
        "ds_config": ("the DeepSpeed strategies", args.ds_config_dict is not None),
        "nvme_path": ("infinity", configured_strategy(args).uses_nvme),
        "fsdp_config": ("fsdp", args.strategy == "fsdp" or args.fsdp.no_shard),
    }
    lines = [
        f"--{flag} is used by {users} only: ignored under {args.strategy}"
        for flag, (users, is_used) in uses.items()
        if flag in args.given and getattr(args, flag) is not None and not is_used
    ] + [f"{args.fsdp_config or '--fsdp'}: {note}" for note in args.fsdp.notes]
    lines += [
        f"--{flag} is used by --report_to only: ignored"
        for flag in ("run_name", "project", "tags")
        if flag in args.given and not args.report_to
    ]
    if args.logging_dir and "tensorboard" not in args.report_to:
        lines.append("--logging_dir is used by --report_to tensorboard only: ignored")
    return lines + aliases.lines_for_user(args)
