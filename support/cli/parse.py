"""Parsing of the command line: defaults that depend on other flags, and flags that contradict."""

from __future__ import annotations

import argparse
import itertools

from support import PROJECT
from support.cli.arguments import Arguments
from support.cli.ds_config import adopt_strategy, read_ds_config, reconcile
from support.cli.flags import NEWEST, build_parser
from support.cli.fsdp_config import FsdpOptions, read_fsdp_config
from support.cli.run_file import OTHER_NAMES, read_run_file
from support.errors import UserError
from support.files.user_files import shown
from support.known_models import EMBEDDED_MODEL
from support.strategy import STRATEGIES

CHECK_SECONDS = 60  # --check: the longest wait for another rank
SIMULATED_STEPS = 3  # the first creates Adam's states; the last is measured
# Flags that need evaluations.
NEED_EVALUATIONS = ("eval_only", "eval_every", "early_stopping_patience", "load_best_at_end")
# Flags of torchrun, deepspeed and accelerate launch, which belong before the script's name.
LAUNCHER_FLAGS = frozenset(
    (
        "nnodes",
        "nproc_per_node",
        "node_rank",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "rdzv_conf",
        "standalone",
        "max_restarts",
        "monitor_interval",
        "start_method",
        "role",
        "master_addr",
        "master_port",
        "local_addr",
        "log_dir",
        "redirects",
        "tee",
        "hostfile",
        "exclude",
        "num_nodes",
        "num_gpus",
        "launcher",
        "launcher_args",
        "ssh_port",
        "no_ssh",
        "force_multi",
        "enable_each_rank_log",
        "bind_cores_to_rank",
        "multi_gpu",
        "cpu",
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "config_file",
        "gpu_ids",
    )
)


def parse_arguments(argv: list[str]) -> Arguments:
    """Parse the command line and its files, and resolve all values that they determine.

    Args:
        argv: the arguments, without the program's name.
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
    _refuse_two_spellings(argv)
    if file := parser.parse_known_args(argv)[0].config:
        argv = [*read_run_file(file, parser), *argv]
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse_launcher_flag(unknown[0])
        parser.refuse_unknown(unknown[0])
    args.given = _given_flags(parser, argv)
    args.resume = "" if args.resume is NEWEST else args.resume
    _refuse_contradictions(args)
    if args.check:
        args.ddp_timeout = min(args.ddp_timeout, CHECK_SECONDS)
    if args.simulate_gpus:
        _only_measure(args)
    if args.dataset is None:
        args.dataset = "pydocs" if args.model == EMBEDDED_MODEL else "wikitext"
    if args.lr is None:
        random = args.from_scratch or args.model == EMBEDDED_MODEL
        # At 1e-3 the embedded model's loss sometimes jumps; at such a step rounding differences
        # between strategies become visible.
        args.lr = 5e-4 if random else 2e-4 if args.lora_r else 5e-5
    _settle_strategy(args)
    args.hub_offline, args.hub_problem = False, None
    return args.freeze()


def _refuse_two_spellings(argv: list[str]) -> None:
    """Refuse a flag that is given under two of its names.

    Raises:
        UserError: names both.
    """
    spelled: dict[str, str] = {}
    for argument, following in itertools.pairwise([*argv, "--"]):
        option = argument.partition("=")[0]
        flag = OTHER_NAMES.get(option[2:], option[2:])
        if flag == "deepspeed" and ("=" in argument or not following.startswith("-")):
            flag = "ds_config"
        if option.startswith("--") and spelled.setdefault(flag, option) != option:
            raise UserError(
                f"{spelled[flag]} and {option} are two names of one flag: leave one out."
            )


def _refuse_launcher_flag(argument: str) -> None:
    flag = argument.split("=")[0]
    if flag.startswith("--") and flag[2:].replace("-", "_") in LAUNCHER_FLAGS:
        raise UserError(
            f"{shown(flag)} is a flag of the launcher: write it before real_model_example.py "
            "(torchrun, deepspeed or accelerate launch … real_model_example.py …)."
        )


def _given_flags(parser: argparse.ArgumentParser, argv: list[str]) -> set[str]:
    """Return the names of the flags in `argv`, and remove all defaults from `parser`.

    Parsed without defaults, the result has only the flags that were given.
    """
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_known_args(argv)[0]))


def _settle_strategy(args) -> None:
    """Resolve the strategy and its settings from the flags, a DeepSpeed file and an FSDP file."""
    _follow_switches(args)
    config, args.ds_config_dict = None, None
    if args.ds_config is not None:
        config = read_ds_config(args.ds_config)
        adopt_strategy(args, config)
    args.fsdp = FsdpOptions()
    if args.fsdp_config is not None and args.strategy == "fsdp":
        args.fsdp = read_fsdp_config(args.fsdp_config)
        _follow_fsdp_config(args)
    if STRATEGIES[args.strategy].uses_deepspeed:
        file = args.ds_config or str(PROJECT / STRATEGIES[args.strategy].config_file)
        args.ds_config_dict = reconcile(args, config or read_ds_config(file), file)


def _follow_switches(args) -> None:
    """Apply --deepspeed, --use_deepspeed and --use_fsdp, which choose the library that shards."""
    given = args.strategy if "strategy" in args.given else None
    deepspeed, fsdp = args.use_deepspeed, args.use_fsdp
    del args.use_deepspeed, args.use_fsdp
    if deepspeed and fsdp:
        raise UserError("--deepspeed and --use_fsdp cannot both hold: leave one out.")
    if deepspeed and given and not STRATEGIES[given].uses_deepspeed:
        raise UserError(
            f"--deepspeed contradicts --strategy {given}, which runs without DeepSpeed: "
            "leave one out."
        )
    if deepspeed and not given and args.ds_config is None:
        raise UserError(
            "--deepspeed needs a configuration (--deepspeed FILE), or --strategy zero1, zero2, "
            "zero3, offload or infinity."
        )
    if fsdp and given not in (None, "fsdp"):
        raise UserError(f"--use_fsdp contradicts --strategy {given}: leave one out.")
    if fsdp:
        args.strategy = "fsdp"
        args.given.add("strategy")


def _follow_fsdp_config(args) -> None:
    """Apply the FSDP file's precision and NO_SHARD; a contradicting --precision is an error."""
    fsdp_precision = args.fsdp.precision
    if fsdp_precision and "precision" in args.given and args.precision != fsdp_precision:
        raise UserError(
            f"--precision {args.precision} contradicts fsdp_mixed_precision in {args.fsdp_config} "
            f"({fsdp_precision}): change one of them."
        )
    args.precision = fsdp_precision or args.precision
    if args.fsdp.no_shard:
        args.fsdp.notes.append(
            "NO_SHARD: a whole model on each rank is --strategy dp, which this run takes"
        )
        args.strategy = "dp"


def _refuse_contradictions(args) -> None:
    """Refuse flags that exclude each other, or a flag without another one that it needs.

    Raises:
        UserError: names the flags.
    """
    if args.eval_only and not args.eval:
        raise UserError("--eval_only and --no_eval cannot both hold: leave one out.")
    if args.resume == "" and args.output_dir is None:
        raise UserError(
            "--resume needs --output_dir, the run to go on with; or name a checkpoint: "
            "--resume PATH."
        )
    if args.no_save and (args.save_every or args.save_epochs):
        raise UserError("--no_save contradicts --save_every and --save_epochs: leave one out.")
    if args.eval_only and (args.save_every or args.save_epochs or args.resume is not None):
        raise UserError(
            "--eval_only neither saves nor resumes: leave out --save_every, "
            "--save_epochs and --resume."
        )
    _check_evaluation(args)
    _check_lora(args)
    if args.streaming:
        _check_streaming(args)
    if args.export_hf and (args.no_export or args.eval_only):
        raise UserError(
            f"--export_hf contradicts {'--no_export' if args.no_export else '--eval_only'}: "
            "leave one out."
        )
    if args.export_dtype != "fp32" and (args.no_export or args.eval_only):
        other = "--no_export" if args.no_export else "--eval_only"
        raise UserError(f"--export_dtype {args.export_dtype} contradicts {other}: leave one out.")
    if args.resume_force and args.resume is None:
        raise UserError("--resume_force needs --resume.")
    if args.profile and (args.profile_memory or args.simulate_gpus):
        other = "--profile_memory" if args.profile_memory else "--simulate_gpus"
        raise UserError(f"--profile and {other} both need torch's profiler: leave one out.")
    if args.prefetch and (args.check or args.simulate_gpus):
        raise UserError(
            f"--prefetch and --{'check' if args.check else 'simulate_gpus'} cannot both hold: "
            "leave one out."
        )
    if args.logging_dir and "tensorboard" not in args.report_to:
        raise UserError("--logging_dir is TensorBoard's: add --report_to tensorboard.")
    if args.check and args.simulate_gpus:
        raise UserError(
            "--check looks at what there is, and --simulate_gpus at what there is not: "
            "leave one out."
        )


def _check_evaluation(args) -> None:
    if args.validation_file and args.validation_split:
        raise UserError("--validation_file and --validation_split cannot both hold: leave one out.")
    for flag in NEED_EVALUATIONS[1:]:
        other = "--no_eval" if not args.eval else "--eval_only" if args.eval_only else None
        if other and getattr(args, flag):
            raise UserError(
                f"--{flag} needs evaluations during training, which {other} leaves out: "
                "drop one of them."
            )
    if args.load_best_at_end and args.no_save:
        raise UserError(
            "--load_best_at_end goes back to a checkpoint, which --no_save forbids: leave one out."
        )


def _check_lora(args) -> None:
    for flag in ("lora_alpha", "lora_dropout", "lora_targets", "merge_lora"):
        if flag in args.given and getattr(args, flag) and args.lora_r is None:
            raise UserError(f"--{flag} needs --lora_r.")
    if args.lora_r and args.eval_only:
        raise UserError(
            "--eval_only evaluates --model as it is, and new adapters change nothing: "
            "leave out --lora_r."
        )
    if args.merge_lora and args.no_export:
        raise UserError(
            "--merge_lora is for the export, which --no_export leaves out: drop one of them."
        )
    if args.lora_r and args.lora_alpha is None:
        args.lora_alpha = 2.0 * args.lora_r


def _check_streaming(args) -> None:
    if args.max_steps is None or args.epochs:
        raise UserError(
            "--streaming has no end that is known before: give --max_steps, and no --epochs."
        )
    if args.early_stopping_patience and not args.eval_every:
        raise UserError(
            "--streaming has no epochs after which to evaluate: "
            "--early_stopping_patience needs --eval_every."
        )
    for flag in ("num_samples", "validation_split"):
        if getattr(args, flag):
            raise UserError(
                f"--{flag} needs to know how long the corpus is, which --streaming does not: "
                "leave one out" + (" (--validation_file)." if flag == "validation_split" else ".")
            )
    if args.dataset == "pydocs" or (args.dataset is None and args.model == EMBEDDED_MODEL):
        raise UserError(
            "--streaming is for files and for the hub, and pydocs is in Python itself: "
            "leave it out."
        )


def _only_measure(args) -> None:
    """Refuse flags that a memory simulation cannot use, and switch off evaluation and saving."""
    for flag in (
        "resume",
        "save_every",
        "save_epochs",
        "eval_only",
        "eval_first",
        "generate",
        "export_hf",
        "eval_every",
        "early_stopping_patience",
        "load_best_at_end",
        "merge_lora",
    ):
        if getattr(args, flag) not in (None, False):
            raise UserError(
                f"--simulate_gpus trains no model, so --{flag} has nothing to work on: "
                "leave one out."
            )
    if args.max_steps == 1:
        raise UserError(
            "--simulate_gpus needs --max_steps 2 or more: Adam's states are there after the first."
        )
    args.eval, args.no_save, args.no_export = False, True, True
    args.max_steps, args.epochs = args.max_steps or SIMULATED_STEPS, None


def ignored_flags(args: argparse.Namespace) -> list[str]:
    """Return one line for each given flag that the chosen strategy ignores, and FSDP's notes."""
    lines = []
    if "ds_config" in args.given and args.ds_config_dict is None:
        lines.append(
            f"--ds_config is used by the DeepSpeed strategies only: ignored under {args.strategy}"
        )
    if "nvme_path" in args.given and not STRATEGIES[args.strategy].uses_nvme:
        lines.append(f"--nvme_path is used by infinity only: ignored under {args.strategy}")
    if "fsdp_config" in args.given and args.strategy != "fsdp" and not args.fsdp.no_shard:
        lines.append(f"--fsdp_config is used by fsdp only: ignored under {args.strategy}")
    return lines + [f"{args.fsdp_config}: {note}" for note in args.fsdp.notes]
