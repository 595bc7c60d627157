"""From the command line to the arguments: defaults, overridden by the run file, by the flags."""

import os
import re
from typing import Any

from support.cli.arguments import Arguments, Dataset
from support.cli.checks import refuse_conflicts
from support.cli.flags import FLAGS, IGNORED, build_parser
from support.errors import UserError
from support.files.user_files import shown
from support.optimizers import OPTIMIZERS
from support.strategies.strategy import Flags, Resolved
from support.strategies.table import STRATEGIES
from support.tables import EMBEDDED_MODEL

# Flags of Trainer and accelerate that set others (see trainer_flags.py).
SHORTCUTS = {"bf16", "fp16", "use_cpu", "deepspeed", "fsdp"}
TRAINER_FLAGS = {"do_train", "do_eval", "eval_strategy", "save_strategy"}
# Flags that most runs do not use, and what uses them.
USERS = {
    "ds_config": "the DeepSpeed strategies",
    "nvme_path": "infinity",
    "fsdp_config": "fsdp",
    "logging_dir": "--report_to tensorboard",
}
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
        fsdp=" ".join(fsdp_words) or None,
        dataset=" ".join(map(str, datasets)) or None,  # type: ignore[arg-type]  # set below
        mixture=datasets if len(datasets) > 1 else (),
        given=frozenset({*values, *sources}),
        sources=sources,
    )
    if args.given & TRAINER_FLAGS:
        from support.cli.trainer_flags import convert

        args = args.set("Trainer's flags", **convert(args))
    refuse_conflicts(args)
    args = _with_strategy(_with_defaults(args))
    _check_strategy_supports(args)
    return args


def _with_strategy(args: Arguments) -> Arguments:
    """Resolve the strategy: merge the flags with its file, and note what has no effect."""
    if args.ds_config and "strategy" not in args.given:
        from support.strategies.deepspeed.options import choose_strategy, read_ds_config

        chosen = choose_strategy(read_ds_config(args.ds_config))
        args = args.set(f"{args.ds_config}: zero_optimization", strategy=chosen)
    world_size = args.simulate_gpus or int(os.environ.get("WORLD_SIZE", 1))
    resolved = STRATEGIES[args.strategy].resolve(
        Flags(vars(args), args.given, parse_value, world_size)
    )
    strategy = resolved.strategy
    if "strategy" in resolved.values:  # the options of one describe another
        strategy = STRATEGIES[resolved.values["strategy"]]
    args = args.replace(
        **resolved.values,
        sources={**args.sources, **resolved.sources},
        configured_strategy=strategy,
    )
    return args.replace(notices=_notices(args, resolved))


def parse_value(name: str, text: str) -> Any:
    """Return the value of a flag that has one, from its text.

    Raises:
        argparse.ArgumentTypeError: the text is no such value.
    """
    return FLAGS[name].metadata["kind"](text)


def output_dir_of(argv: list[str]) -> str:
    """Return --output_dir of a command line and its run file; "" without one."""
    return _given(argv)[0].get("output_dir") or ""


def _given(argv: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values on the command line and in its run file, and where each is from."""
    parser = build_parser()

    def read(arguments: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
        values = vars(parser.parse_args(arguments))
        options = values.pop("spelled", {})
        if values.keys() & SHORTCUTS:
            from support.cli.trainer_flags import expand

            expand(values, options)
        return values, options

    flags, options = read(argv)
    if not (file := flags.get("config")):
        return flags, options
    from support.cli.run_file import read_run_file

    arguments = read_run_file(file, parser)
    try:
        of_file, keys = read(arguments)
    except UserError as error:
        raise UserError(f"{shown(file)}: {error}") from error
    sources = {n: file if k == f"--{n}" else f"{file}: {k[2:]}" for n, k in keys.items()}
    return {**of_file, **flags}, {**sources, **options}


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


def _with_defaults(args: Arguments) -> Arguments:
    """Set the values that depend on other flags."""
    if args.check and args.ddp_timeout > CHECK_SECONDS:
        args = args.set("--check", ddp_timeout=CHECK_SECONDS)
    if args.simulate_gpus:
        steps = args.max_steps or SIMULATED_STEPS
        off = {"eval": False, "no_save": True, "no_export": True, "epochs": None}
        args = args.set("--simulate_gpus", max_steps=steps, **off)
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


def _check_strategy_supports(args: Arguments) -> None:
    """Check that the strategy supports --optim and --load_in_4bit."""
    strategy = args.configured_strategy
    if args.load_in_4bit and not strategy.whole_parameters:
        raise UserError(
            f"--load_in_4bit does not work under {args.strategy}, which would have to shard "
            "bitsandbytes' packed weights: use dp, zero1, zero2 or offload."
        )
    if reason := strategy.why_not(OPTIMIZERS[args.optim]):
        raise UserError(f"--optim {args.optim} does not work under {args.strategy}: {reason}.")


def _notices(args: Arguments, resolved: Resolved) -> tuple[str, ...]:
    """Return lines about what was given and has no effect in this run."""
    used = resolved.used | ({"logging_dir"} if "tensorboard" in args.report_to else set())
    lines = [
        f"--{flag} is used by {users} only: ignored"
        for flag, users in USERS.items()
        if flag in args.given and getattr(args, flag) is not None and flag not in used
    ]
    lines += resolved.notices
    if ignored := sorted(args.given & {*IGNORED}):
        lines.append(f"Ignored, because there is nothing to change here: --{', --'.join(ignored)}")
    return tuple(lines)
