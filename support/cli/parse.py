"""From the command line to the arguments: defaults, overridden by the run file, by the flags."""

from __future__ import annotations

import os
import re
from typing import Any

from support import PROJECT
from support.cli.arguments import Arguments, Dataset
from support.cli.checks import refuse_conflicts
from support.cli.ds_config import choose_strategy, configured_strategy, merge, read_ds_config
from support.cli.flags import FLAGS, IGNORED, build_parser
from support.cli.run_file import read_run_file
from support.errors import UserError
from support.files.user_files import shown
from support.tables import EMBEDDED_MODEL, OPTIMIZERS, STRATEGIES

TRAINER_STEPS = 500  # Trainer's default of --save_steps and --eval_steps
CHECK_SECONDS = 60  # --check: the longest wait for another rank
SIMULATED_STEPS = 3  # the first creates Adam's states; the last is measured


def parse_arguments(argv: list[str]) -> Arguments:
    """Parse the command line and its files, and resolve all values that they determine.

    Raises:
        UserError: flags are unknown or contradict each other, or a file is not valid.
    """
    values, sources = _given(argv)
    flags = {name: value for name, value in values.items() if name in FLAGS}
    datasets, fsdp_words = parse_datasets(flags.pop("dataset", [])), flags.pop("fsdp", [])
    args = Arguments(
        **flags,
        dataset=" ".join(map(str, datasets)) or None,  # type: ignore[arg-type]  # set below
        mixture=datasets if len(datasets) > 1 else (),
        given=frozenset({*values, *sources}),
        sources=sources,
    )
    args = _set(args, "Trainer's flags", **_convert_trainer(args))
    refuse_conflicts(args)
    args = _with_defaults(args)
    if args.ds_config and "strategy" not in args.given:
        chosen = choose_strategy(read_ds_config(args.ds_config))
        args = _set(args, f"{args.ds_config}: zero_optimization", strategy=chosen)
    if STRATEGIES[args.strategy].uses_deepspeed:
        args = _with_deepspeed(args)
    elif "deepspeed" in args.given and not args.ds_config:
        raise UserError(
            f"--deepspeed does not fit --strategy {args.strategy}: give a configuration "
            "(--deepspeed FILE), or --strategy zero1, zero2, zero3, offload or infinity."
        )
    elif args.strategy == "fsdp":
        args = _with_fsdp(args, " ".join(fsdp_words))
    _check_strategy_supports(args)
    return args


def output_dir_of(argv: list[str]) -> str:
    """Return --output_dir of a command line and its run file; "" without one."""
    return _given(argv)[0].get("output_dir") or ""


def _given(argv: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values on the command line and in its run file, and where each is from."""
    parser = build_parser()

    def read(arguments: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
        values = vars(parser.parse_args(arguments))
        options = values.pop("spelled", {})
        _expand(values, options)
        return values, options

    flags, options = read(argv)
    if not (file := flags.get("config")):
        return flags, options
    arguments = read_run_file(file, parser)
    try:
        of_file, keys = read(arguments)
    except UserError as error:
        raise UserError(f"{shown(file)}: {error}") from error
    sources = {n: file if k == f"--{n}" else f"{file}: {k[2:]}" for n, k in keys.items()}
    return {**of_file, **flags}, {**sources, **options}


def _expand(values: dict[str, Any], spelled: dict[str, str]) -> None:
    """Set what --bf16, --fp16, --deepspeed and --fsdp set.

    Args:
        values: the flags of the command line or of the run file; changed in place.
        spelled: the option that set each flag; changed in place.
    """

    def put(flag: str, value: str, by: str) -> None:
        if values.setdefault(flag, value) != value:
            other = spelled[flag]
            raise UserError(f"{other} and {spelled[by]} both set --{flag}: leave one out.")
        spelled.setdefault(flag, spelled[by])

    halves = {half: values.pop(half) for half in ("bf16", "fp16") if half in values}
    for half in filter(halves.get, halves):
        put("precision", half, by=half)
    if halves and "precision" not in values:
        put("precision", "fp32", by=next(iter(halves)))
    deepspeed = values.pop("deepspeed", None)
    if isinstance(deepspeed, str):
        put("ds_config", deepspeed, by="deepspeed")
    elif deepspeed is False:
        for flag in ("deepspeed", "ds_config"):  # a run file may configure the library that is off
            spelled.pop(flag, None)
            values.pop(flag, None)
    if values.get("fsdp"):
        put("strategy", "fsdp", by="fsdp")


def _convert_trainer(args: Arguments) -> dict[str, Any]:
    """Return what --do_train, --do_eval, --eval_strategy and --save_strategy set."""
    changes: dict[str, Any] = {}
    if (saves := args.save_strategy) is not None:  # as in Trainer, steps count for "steps" only
        changes["save_every"] = (args.save_every or TRAINER_STEPS) if saves == "steps" else None
        changes["save_epochs"] = args.save_epochs or saves == "epoch"
    if args.eval_only or (args.do_eval and not args.do_train):
        return changes | {"eval_only": True}
    if args.eval_strategy is not None:
        in_steps = args.eval_strategy == "steps"
        changes["eval_every"] = (args.eval_every or TRAINER_STEPS) if in_steps else None
    if args.do_eval is False or (args.eval_strategy == "no" and not args.do_eval):
        changes["eval"] = False
    return changes


def parse_datasets(words: list[str]) -> tuple[Dataset, ...]:
    """Parse the values of --dataset: NAME, or several NAME or NAME:WEIGHT.

    Raises:
        UserError: the weights are incomplete or 0, or a dataset is named twice.
    """
    datasets = []
    for word in words:
        weighted = re.fullmatch(r"(.+):(\d+\.?\d*|\.\d+)", word)
        # A file may have a colon and a number at the end of its name.
        if weighted and not os.path.exists(word):
            datasets.append(Dataset(weighted[1], weighted[2]))
        else:
            datasets.append(Dataset(word))
    weights = [float(d.weight) for d in datasets if d.weight]
    if weights and (len(datasets) == 1 or len(weights) < len(datasets) or 0 in weights):
        raise UserError(
            f"--dataset {' '.join(words)}: of several datasets, all or none have a weight above 0."
        )
    if len({d.name for d in datasets}) < len(datasets):
        raise UserError(f"--dataset {' '.join(words)}: a dataset is named twice: name it once.")
    return tuple(datasets)


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


def _with_deepspeed(args: Arguments) -> Arguments:
    """Merge the flags with the DeepSpeed file: the user's, or the strategy's own."""
    file = args.ds_config or f"{PROJECT}/{STRATEGIES[args.strategy].config_file}"
    world_size = args.simulate_gpus or int(os.environ.get("WORLD_SIZE", 1))
    resolved = merge(args, read_ds_config(file), file, world_size)
    sources = {name: f"{file}: {key}" for name, key in resolved.keys.items()}
    return args.replace(
        **resolved.flags, sources={**args.sources, **sources}, ds_config_dict=resolved.config
    )


def _with_fsdp(args: Arguments, words: str) -> Arguments:
    """Apply --fsdp and the FSDP file; a contradicting --precision is an error."""
    from support.cli.fsdp_config import read_fsdp_config

    options = read_fsdp_config(args.fsdp_config, words)
    if (precision := options.precision) is not None:
        if "precision" in args.given and args.precision != precision:
            raise UserError(
                f"--precision {args.precision} contradicts fsdp_mixed_precision in "
                f"{args.fsdp_config} ({precision}): change one of them."
            )
        args = _set(args, f"{args.fsdp_config}: fsdp_mixed_precision", precision=precision)
    if options.no_shard:
        args = _set(args, "NO_SHARD of FSDP", strategy="dp")
    return args.replace(fsdp=options)


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
    """Return lines about what was given and has no effect in this run."""
    fsdp = args.fsdp
    uses = {
        "ds_config": ("the DeepSpeed strategies", args.ds_config_dict is not None),
        "nvme_path": ("infinity", configured_strategy(args).uses_nvme),
        "fsdp_config": ("fsdp", args.strategy == "fsdp" or fsdp.no_shard),
        "logging_dir": ("--report_to tensorboard", "tensorboard" in args.report_to),
    }
    lines = [
        f"--{flag} is used by {users} only: ignored"
        for flag, (users, is_used) in uses.items()
        if flag in args.given and getattr(args, flag) is not None and not is_used
    ]
    if fsdp.ignored:
        options = ", ".join(fsdp.ignored)
        lines.append(f"{args.fsdp_config}: ignored, as there is no such option: {options}")
    if fsdp.no_shard:
        lines.append("NO_SHARD: each rank holds the whole model, as with --strategy dp")
    if ignored := sorted(args.given & {*IGNORED}):
        lines.append(f"Ignored, because there is nothing to change here: --{', --'.join(ignored)}")
    return lines
