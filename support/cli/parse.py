"""From the command line to the settings: defaults, overridden by the run file, by the flags."""

import os
import re
from dataclasses import dataclass

from support.cli import automatic, checks
from support.cli.flags import IGNORED
from support.cli.given import read_flags
from support.cli.parser import Options
from support.errors import UserError
from support.known_models import EMBEDDED_MODEL
from support.settings.data import Dataset, default_dataset
from support.settings.settings import DEFAULTS, FLAGS, Settings
from support.settings.training import default_learning_rate
from support.strategies.strategy import Flags, FlagValues, Resolved
from support.strategies.table import STRATEGIES

# Flags of Trainer that `trainer_flags.convert` replaces by ours; it needs the merged flags.
CONVERTED = {"do_train", "do_eval", "eval_strategy", "save_strategy"}
# Flags that most runs do not use, and what uses them.
USERS = {
    "ds_config": "the DeepSpeed strategies",
    "nvme_path": "infinity",
    "fsdp_config": "fsdp",
    "logging_dir": "--report_to tensorboard",
    **dict.fromkeys(("decay_ratio", "decay_type"), "--lr_scheduler wsd"),
    "min_lr_ratio": "schedules with a decay",
}
CHECK_SECONDS = 60  # --check: the longest wait for another rank
SIMULATED_STEPS = 3  # the first creates Adam's states; the last is measured


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


def read_command_line(argv: list[str], chosen: FlagValues | None = None) -> CommandLine:
    """Parse the command line and its files, and complete the settings.

    Args:
        chosen: values of flags that are auto, see `report.automatic`.
    Raises:
        UserError: flags are unknown or contradict each other, or a file is not valid.
    """
    values, sources = automatic.filled_in(*read_flags(argv), chosen)
    given = frozenset({*values, *sources})
    flags = Options(**{**DEFAULTS, **{name: values[name] for name in values if name in FLAGS}})
    flags.dataset = parse_datasets(flags.dataset or [])
    flags.fsdp = " ".join(flags.fsdp or []) or None

    def change(source: str, **changed: object) -> None:
        vars(flags).update(changed)
        sources.update(dict.fromkeys(changed, source))

    if given & CONVERTED:
        from support.cli.trainer_flags import convert

        change("Trainer's flags", **convert(flags))
    checks.refuse_conflicts(flags, given)
    to_choose = automatic.take_provisional(flags, given)
    for command, changed in _of_commands(flags).items():
        change(command, **changed)
    _set_defaults(flags)
    change("--global_batch_size", **automatic.accumulation(flags, given, _world_size(flags)))
    if flags.ds_config and "strategy" not in given:
        from support.strategies.deepspeed.options import choose_strategy, read_ds_config

        found = choose_strategy(read_ds_config(flags.ds_config))
        change(f"{flags.ds_config}: zero_optimization", strategy=found)
    resolved = _resolve_strategy(flags, given)
    vars(flags).update(resolved.values)
    sources.update(resolved.sources)
    # The options of one strategy may describe another (NO_SHARD of FSDP).
    other = "strategy" in resolved.values
    strategy = (_resolve_strategy(flags, given) if other else resolved).strategy
    checks.check_strategy_supports(flags, strategy)
    checks.check_prove(flags, resolved)
    percentage = flags.validation_split_percentage
    computed = {
        "configured": strategy,
        "held_out_share": percentage / 100 if percentage else flags.validation_split,
        "automatic": to_choose,
        "choice": chosen,
    }
    settings = Settings.of_flags(vars(flags), computed)
    return CommandLine(settings, given, sources, _notices(flags, given, resolved))


def _of_commands(flags: Options) -> dict[str, FlagValues]:
    """Return the flags that --check and --simulate_gpus set."""
    found: dict[str, FlagValues] = {}
    if flags.check and flags.ddp_timeout > CHECK_SECONDS:
        found["--check"] = {"ddp_timeout": CHECK_SECONDS}
    if flags.simulate_gpus:
        steps = flags.max_steps or SIMULATED_STEPS
        off = {"eval": False, "no_save": True, "no_export": True, "epochs": None}
        found["--simulate_gpus"] = {"max_steps": steps, **off}
    return found


def _set_defaults(flags: Options) -> None:
    """Set the flags whose defaults depend on other flags, in place."""
    is_embedded = flags.model == EMBEDDED_MODEL
    if not flags.dataset:
        # --eval_only uses no other text than --validation_file.
        only = flags.validation_file if flags.eval_only else None
        flags.dataset = (Dataset(only or default_dataset(flags.model)),)
    if flags.lr is None:
        random_weights = flags.from_scratch or is_embedded
        flags.lr = default_learning_rate(flags.optim, random_weights, bool(flags.lora_r))
    if flags.lora_r and flags.lora_alpha is None:
        flags.lora_alpha = 2.0 * flags.lora_r
    flags.hang_seconds = flags.hang_seconds or max(1, flags.ddp_timeout // 10)


def _world_size(flags: Options) -> int:
    return flags.simulate_gpus or int(os.environ.get("WORLD_SIZE", 1))


def _resolve_strategy(flags: Options, given: frozenset[str]) -> Resolved:
    """Merge the flags with the file of the strategy."""
    merged = Flags(vars(flags), given, parse_value, _world_size(flags))
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


def _notices(flags: Options, given: frozenset[str], resolved: Resolved) -> tuple[str, ...]:
    """Return lines about what was given and has no effect in this run."""
    used = resolved.used | ({"logging_dir"} if "tensorboard" in flags.report_to else set())
    used |= {"decay_ratio", "decay_type"} if flags.lr_scheduler == "wsd" else set()
    used |= {"min_lr_ratio"} if flags.lr_scheduler != "constant" else set()
    lines = [
        f"--{flag} is used by {users} only: ignored"
        for flag, users in USERS.items()
        if flag in given and getattr(flags, flag) is not None and flag not in used
    ]
    lines += resolved.notices
    if ignored := sorted(given & {*IGNORED}):
        lines.append(f"Ignored, because there is nothing to change here: --{', --'.join(ignored)}")
    return tuple(lines)
