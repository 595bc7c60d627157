"""The command of a run with the planned workload."""

import shlex
from pathlib import Path

from distributed_training.cli.parser import Options
from distributed_training.files.weight_files import NAMES as WEIGHTS
from distributed_training.memory.fit import Devices
from distributed_training.strategies.strategy import FlagValues
from distributed_training.workload.architectures import name_on_hub
from distributed_training.workload.workload import Workload
from tools.plan.flags import PLANNED

# A run has them without flags.
RUN_DEFAULTS = {"gradient_accumulation_steps": 1, "optim": "adamw", "fused_gelu": True}


def launcher(gpus: int, devices: Devices) -> str:
    """Return the command that starts Python on each rank."""
    per_node = devices.ranks_per_node
    if gpus > per_node:
        return (
            f"srun --nodes={gpus // per_node} --ntasks-per-node={per_node} "
            f"--gpus-per-node={per_node} --kill-on-bad-exit=1 python"
        )
    return "python" if gpus == 1 else f"torchrun --nproc_per_node={gpus}"


def command_of(args: Options, work: Workload, strategy: str, devices: Devices) -> str:
    """Return the command that runs the workload: with --config, and what differs from its file."""
    flags, own = [], RUN_DEFAULTS
    if args.config:
        flags = ["--config", args.config]
        own = {**args.in_file, "model": name_on_hub(args.in_file["model"])}
    shares = devices.rank_counts(work, strategy) or ()
    differ = len({*shares}) > 1 or "rank_shares" in own
    of_ranks = {"rank_shares": ",".join(map(str, shares)) if differ else None}
    flags += as_flags({**run_values(args, work, strategy), **of_ranks}, own)
    return f"{launcher(args.gpus, devices)} real_model_example.py {shlex.join(flags)}"


def flags_of(args: Options, work: Workload, strategy: str) -> list[str]:
    """Return the flags of a run with the workload, without a run file."""
    return as_flags(run_values(args, work, strategy), RUN_DEFAULTS)


def run_values(args: Options, work: Workload, strategy: str) -> FlagValues:
    """Return the values of real_model_example.py's flags for the workload, by name."""
    path = Path(args.model)  # a model folder, a file in it, or a name
    folder = path.parent if path.is_file() else path if path.is_dir() else None
    values = {
        "model": folder or args.model,
        "strategy": strategy,
        "batch_size": work.batch_size,
        "seq_length": args.seq_length,
        "precision": args.precision,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_checkpointing": work.gradient_checkpointing,
        "from_scratch": folder is not None and not any((folder / f).exists() for f in WEIGHTS),
    }
    return values | {name: getattr(args, name) for name in PLANNED if name not in values}


def as_flags(values: FlagValues, own: FlagValues) -> list[str]:
    """Return the flags of a run that set these values, without those that it has already."""
    flags = []
    for name, value in values.items():
        if not value:
            flags += [f"--no_{name}"] if own.get(name) is True else []
        elif str(value) != str(own.get(name)):
            flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return flags
