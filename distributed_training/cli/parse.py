"""From the command line to the settings: defaults, overridden by the run file, by the flags."""

import os
import re
from dataclasses import dataclass, replace

from distributed_training.cli import checks, defaults
from distributed_training.cli import choice as cli_choice
from distributed_training.cli.flags import IGNORED
from distributed_training.cli.given import read_flags
from distributed_training.cli.parser import Options
from distributed_training.errors import UserError
from distributed_training.settings.data import Dataset
from distributed_training.settings.settings import DEFAULTS, FACTS, FLAGS, AsGiven, Settings
from distributed_training.strategies.strategy import Flags, FlagValues, Resolved
from distributed_training.strategies.table import STRATEGIES

# Flags of Trainer that `trainer_flags.convert` replaces by ours; it needs the merged flags.
CONVERTED = {"do_train", "do_eval", "eval_strategy", "save_strategy"}


@dataclass(frozen=True)
class CommandLine:
    """The settings that a command line and its files determine."""

    settings: Settings
    given: frozenset[str]  # names of flags on the command line or in the run file
    sources: dict[str, str]  # of the flags that do not have their defaults, by name
    notices: tuple[str, ...]  # lines about what was given and has no effect


def parse_arguments(argv: list[str]) -> Settings:
    """Return the settings of a command line; see `read_command_line`."""
    return read_command_line(argv).settings


def read_command_line(argv: list[str], world_size: int | None = None) -> CommandLine:
    """Parse the command line and its files, and complete the settings.

    Args:
        world_size: number of ranks; None: as the launcher has set it.
    Raises:
        UserError: flags are unknown or contradict each other, or a file is not valid.
    """
    return complete(AsGiven(*read_flags(argv)), None, world_size)


def complete(
    as_given: AsGiven, choice: FlagValues | None, world_size: int | None = None
) -> CommandLine:
    """Complete the settings from the flags that were given.

    Flags that are auto get the values of `choice` (tools/choose), or provisional ones.

    Raises:
        UserError: flags contradict each other, or a file of the strategy is not valid.
    """
    values, sources = cli_choice.filled_in(*as_given, choice)
    given = frozenset({*values, *sources})
    flags = Options(**{**DEFAULTS, **{name: values[name] for name in values if name in FLAGS}})
    flags.dataset = parse_datasets(flags.dataset or [])
    flags.fsdp = " ".join(flags.fsdp or []) or None
    world_size = world_size or flags.simulate_gpus or int(os.environ.get("WORLD_SIZE", 1))

    def change(source: str, **changed: object) -> None:
        vars(flags).update(changed)
        sources.update(dict.fromkeys(changed, source))

    if given & CONVERTED:
        from distributed_training.cli.trainer_flags import convert  # of another trainer

        change("Trainer's flags", **convert(flags))
    checks.refuse_conflicts(flags, given)
    to_choose = cli_choice.take_provisional(flags, given)
    for command, changed in defaults.of_commands(flags).items():
        change(command, **changed)
    defaults.set_defaults(flags)
    change(cli_choice.FOLLOWS, **cli_choice.accumulation(flags, given, to_choose, world_size))
    if flags.ds_config and "strategy" not in given:
        change(f"{flags.ds_config}: zero_optimization", strategy=_strategy_of(flags.ds_config))
    resolved = _resolve_strategy(flags, given, world_size)
    vars(flags).update(resolved.values)
    sources.update(resolved.sources)
    strategy = resolved.strategy
    if "strategy" in resolved.values:  # its options describe another one (NO_SHARD of FSDP)
        strategy = _resolve_strategy(flags, given, world_size).strategy
    checks.check_strategy_supports(flags, strategy)
    checks.check_prove(flags, resolved)
    computed = {
        "strategy_with_options": strategy,
        "held_out_share": defaults.held_out_share(flags),
        "to_choose": to_choose,
        "choice": choice,
    }
    settings = replace(Settings.of_flags(vars(flags), computed), as_given=as_given)
    return CommandLine(settings, given, sources, _notices(flags, given, resolved, to_choose))


def _strategy_of(ds_config: str) -> str:
    """Return the strategy that a DeepSpeed file describes."""
    from distributed_training.strategies.deepspeed import options  # only with --ds_config

    return options.choose_strategy(options.read_ds_config(ds_config))


def _resolve_strategy(flags: Options, given: frozenset[str], world_size: int) -> Resolved:
    """Merge the flags with the file of the strategy."""
    merged = Flags(vars(flags), given, parse_value, world_size)
    return STRATEGIES[flags.strategy].resolve(merged)


def parse_value(name: str, text: str) -> object:
    """Return the value of a flag that has one, from its text.

    Raises:
        argparse.ArgumentTypeError: the text is no such value.
    """
    return FLAGS[name].metadata["type"](text)


def output_dir_of(argv: list[str]) -> str:
    """Return --output_dir of a command line and its run file, for job scripts; "" without one."""
    return read_flags(argv)[0].get("output_dir") or ""


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


def _notices(
    flags: Options, given: frozenset[str], resolved: Resolved, to_choose: tuple[str, ...]
) -> tuple[str, ...]:
    """Return lines about what was given and has no effect in this run."""
    used = resolved.used | ({"logging_dir"} if "tensorboard" in flags.report_to else set())
    used |= {"nvme_path"} if "strategy" in to_choose else set()  # infinity may be chosen
    used |= {"decay_ratio", "decay_type"} if flags.lr_scheduler == "wsd" else set()
    used |= {"min_lr_ratio"} if flags.lr_scheduler != "constant" else set()
    lines = [
        f"--{flag} is used by {facts.used_by} only: ignored"
        for flag, facts in FACTS.items()
        if facts.used_by and flag in given and flag not in used and getattr(flags, flag) is not None
    ]
    lines += resolved.notices
    if ignored := sorted(given & {*IGNORED}):
        lines.append(f"Ignored, because there is nothing to change here: --{', --'.join(ignored)}")
    return tuple(lines)
