"""From the command line to the arguments: files, defaults that depend on other flags, conflicts."""

from __future__ import annotations

import argparse
import itertools
import re

from support import PROJECT
from support.cli.aliases import apply_converted, lines_for_user
from support.cli.argument_types import NEWEST
from support.cli.arguments import Arguments
from support.cli.conflicts import refuse_conflicts
from support.cli.datasets import parse_datasets
from support.cli.ds_config import choose_strategy, configured_strategy, read_ds_config, reconcile
from support.cli.flags import build_parser
from support.cli.fsdp_config import FsdpOptions, apply_fsdp_flag, read_fsdp_config
from support.cli.run_file import read_run_file, strategy_of_switches
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

    Returns:
        The flags by name, frozen, and more attributes: `given` (names of the flags on the command
        line or in the run file), `ds_config_dict` (DeepSpeed's configuration, in which some values
        may still be "auto", or None), `fsdp` (FsdpOptions), and `hub_offline` and `hub_problem`
        (False and None, until the hub was probed).
    Raises:
        UserError: unknown or contradicting flags, or an invalid run file, DeepSpeed file or FSDP
            file.
    """
    parser = build_parser()
    _refuse_two_spellings(parser, argv)
    if file := parser.parse_known_args(argv)[0].config:
        argv = [*_not_overridden(read_run_file(file, parser), parser, argv), *argv]
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        if flag.startswith("--") and flag[2:].replace("-", "_") in LAUNCHER_FLAGS:
            raise UserError(
                f"{shown(flag)} is a flag of the launcher: write it before real_model_example.py "
                "(torchrun, deepspeed or accelerate launch … real_model_example.py …)."
            )
        parser.refuse_unknown(unknown[0])
    args.given = _given_flags(parser, argv)
    args.resume = "" if args.resume is NEWEST else args.resume
    try:
        apply_converted(args)
        _set_datasets(args)
        refuse_conflicts(args)
        _set_defaults(args)
        _resolve_strategy(args)
        _check_strategy_supports(args)
    except UserError as error:
        error.args = (as_typed(str(error), argv),)
        raise
    args.hub_offline, args.hub_problem = False, None
    return args.freeze()


def as_typed(message: str, argv: list[str]) -> str:
    """Return a message with the flags under the names that the user gave them."""
    parser = build_parser()
    for option in {argument.partition("=")[0] for argument in argv}:
        action = parser._option_string_actions.get(option)
        if action and action.option_strings[0] != option:
            message = re.sub(rf"{action.option_strings[0]}(?!\w)", option, message)
    return message


def _not_overridden(
    from_file: list[str], parser: argparse.ArgumentParser, argv: list[str]
) -> list[str]:
    """Remove a run file's --fsdp if the command line chooses another strategy."""
    given = any(argument.split("=")[0] == "--strategy" for argument in argv)
    if given and parser.parse_known_args(argv)[0].strategy != "fsdp":
        return [argument for argument in from_file if not argument.startswith("--fsdp=")]
    return from_file


def _refuse_two_spellings(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Refuse a flag that is given under two of its names, or set by two flags."""
    spelled: dict[str, str] = {}
    for argument, following in itertools.pairwise([*argv, "--"]):
        option, _, value = argument.partition("=")
        action = parser._option_string_actions.get(option)
        if action is None or action.nargs == 0:  # --eval and --no_eval: the last one counts
            continue
        value = value or ("" if following.startswith("-") else following)
        flag = "ds_config" if action.dest == "deepspeed" and value else action.dest
        if value.lower() == "false":  # --bf16 True --fp16 False
            continue
        if (other := spelled.setdefault(flag, option)) != option:
            same = parser._option_string_actions[other] is action
            verb = "are two names of one flag" if same else f"both set --{flag}"
            raise UserError(f"{other} and {option} {verb}: leave one out.")


def _given_flags(parser: argparse.ArgumentParser, argv: list[str]) -> set[str]:
    """Return the names of the flags in `argv`, and remove all defaults from `parser`.

    Parsed without defaults, the result has only the flags that were given.
    """
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_known_args(argv)[0]))


def _set_datasets(args) -> None:
    """Set `mixture` to the datasets with their weights if there are several, else to ().

    `dataset` is then one text, for messages and results.json.
    """
    datasets = parse_datasets(args.dataset or [])
    args.mixture = datasets if len(datasets) > 1 else ()
    args.dataset = " ".join(map(str, datasets)) or None


def _set_defaults(args) -> None:
    """Set the values that depend on other flags."""
    if args.check:
        args.ddp_timeout = min(args.ddp_timeout, CHECK_SECONDS)
    args.hang_seconds = args.hang_seconds or max(1, args.ddp_timeout // 10)
    if args.simulate_gpus:
        args.eval, args.no_save, args.no_export = False, True, True
        args.max_steps, args.epochs = args.max_steps or SIMULATED_STEPS, None
    if args.dataset is None and args.eval_only and args.validation_file:
        args.dataset = args.validation_file  # no other text is used
    if args.dataset is None:
        args.dataset = "pydocs" if args.model == EMBEDDED_MODEL else "wikitext"
    if args.lora_r and args.lora_alpha is None:
        args.lora_alpha = 2.0 * args.lora_r
    if args.lr is None:
        random = args.from_scratch or args.model == EMBEDDED_MODEL
        # At 1e-3 the embedded model's loss sometimes jumps; at such a step rounding differences
        # between strategies become visible.
        usual = 5e-4 if random else 2e-4 if args.lora_r else 5e-5
        args.lr = OPTIMIZERS[args.optim].lr or usual


def _resolve_strategy(args) -> None:
    """Resolve the strategy and its settings from the flags, a DeepSpeed file and an FSDP file."""
    given = args.strategy if "strategy" in args.given else None
    use_fsdp, fsdp_flag = args.use_fsdp or bool(args.fsdp), args.fsdp
    chosen = strategy_of_switches(args.use_deepspeed, use_fsdp, given, args.ds_config)
    del args.use_deepspeed, args.use_fsdp
    config, args.ds_config_dict, args.fsdp = None, None, FsdpOptions()
    if args.ds_config is not None:
        config = read_ds_config(args.ds_config)
        chosen = chosen or choose_strategy(config, args.ds_config)
    args.strategy = chosen or args.strategy
    if args.fsdp_config is not None and args.strategy == "fsdp":
        args.fsdp = read_fsdp_config(args.fsdp_config)
    if args.strategy == "fsdp":
        apply_fsdp_flag(args.fsdp, fsdp_flag)
        _follow_fsdp_options(args)
    if STRATEGIES[args.strategy].uses_deepspeed:
        file = args.ds_config or f"{PROJECT}/{STRATEGIES[args.strategy].config_file}"
        args.ds_config_dict = reconcile(args, config or read_ds_config(file), file)


def _check_strategy_supports(args) -> None:
    """Check that the strategy supports --optim and --load_in_4bit."""
    if args.load_in_4bit and STRATEGIES[args.strategy].shards_parameters:
        raise UserError(
            f"--load_in_4bit does not work under {args.strategy}, which would have to shard "
            "bitsandbytes' packed weights: use dp, zero1, zero2 or offload."
        )
    if reason := OPTIMIZERS[args.optim].problem(configured_strategy(args)):
        raise UserError(f"--optim {args.optim} does not work under {args.strategy}: {reason}.")


def _follow_fsdp_options(args) -> None:
    """Apply the FSDP file's precision and NO_SHARD; a contradicting --precision is an error."""
    fsdp_precision = args.fsdp.precision
    if fsdp_precision and "precision" in args.given and args.precision != fsdp_precision:
        raise UserError(
            f"--precision {args.precision} contradicts fsdp_mixed_precision in {args.fsdp_config} "
            f"({fsdp_precision}): change one of them."
        )
    args.precision = fsdp_precision or args.precision
    if args.fsdp.no_shard:
        args.fsdp.notes.append("NO_SHARD: each rank holds the whole model, as with --strategy dp")
        args.strategy = "dp"


def ignored_flags(args) -> list[str]:
    """Return one line for each given flag that has no effect in this run, and FSDP's notes."""
    uses = {
        "ds_config": ("the DeepSpeed strategies", args.ds_config_dict is not None),
        "nvme_path": ("infinity", configured_strategy(args).uses_nvme),
        "fsdp_config": ("fsdp", args.strategy == "fsdp" or args.fsdp.no_shard),
    }
    lines = [
        f"--{flag} is used by {users} only: ignored under {args.strategy}"
        for flag, (users, is_used) in uses.items()
        if flag in args.given and not is_used
    ] + [f"{args.fsdp_config or '--fsdp'}: {note}" for note in args.fsdp.notes]
    lines += [
        f"--{flag} is used by --report_to only: ignored"
        for flag in ("run_name", "project", "tags")
        if flag in args.given and not args.report_to
    ]
    if args.logging_dir and "tensorboard" not in args.report_to:
        lines.append("--logging_dir is used by --report_to tensorboard only: ignored")
    return lines + lines_for_user(args)
