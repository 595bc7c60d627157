"""--strategy auto, --batch_size auto, --global_batch_size: what is known before the ranks meet."""

from support.cli.parser import Options
from support.errors import UserError
from support.rank_shares import AUTO
from support.strategies.strategy import FlagValues

# Flags that may be auto, and their values until the run has chosen: `report.automatic`.
PROVISIONAL: FlagValues = {"strategy": "dp", "batch_size": 1}


def filled_in(
    values: FlagValues, sources: dict[str, str], chosen: FlagValues | None
) -> tuple[FlagValues, dict[str, str]]:
    """Return the flags and their sources, with the values that the run has chosen for auto."""
    names = [name for name in PROVISIONAL if chosen and values.get(name) == AUTO]
    own = {name: f"--{name} auto" for name in names}
    return {**values, **{name: (chosen or {})[name] for name in names}}, {**sources, **own}


def take_provisional(flags: Options, given: frozenset[str]) -> tuple[str, ...]:
    """Set the provisional values of the flags that are auto, in place; return their names.

    Raises:
        UserError: they need another flag, or exclude one.
    """
    names = tuple(name for name in PROVISIONAL if getattr(flags, name) == AUTO)
    by_plan = f"--{names[0]} auto" if names else ""
    problems = {
        f"{by_plan} uses this project's memory plan, which knows no own configurations: leave "
        "--ds_config and --fsdp_config out": flags.ds_config or flags.fsdp_config,
        f"{by_plan} plans training, and --eval_only does not train: leave auto out": (
            flags.eval_only
        ),
        f"--prove makes steps under all strategies: leave {by_plan} out": flags.prove is not None,
        f"{by_plan} needs the GPUs that are there, which --simulate_gpus does not have: leave it "
        "out": flags.simulate_gpus,
    }
    if "batch_size" in names:
        problems |= {
            "--batch_size auto needs --global_batch_size, so that the training does not depend on "
            "the memory": flags.global_batch_size is None,
            "--batch_size auto determines the accumulation: leave --gradient_accumulation_steps "
            "out": "gradient_accumulation_steps" in given,
            "--batch_size auto needs equal shares, or --rank_shares auto": isinstance(
                flags.rank_shares, tuple
            ),
        }
    for problem, holds in problems.items() if names else ():
        if holds:
            raise UserError(f"{problem}.")
    vars(flags).update({name: PROVISIONAL[name] for name in names})
    return names


def accumulation(flags: Options, given: frozenset[str], world_size: int) -> FlagValues:
    """Return --gradient_accumulation_steps for --global_batch_size; without it no value.

    Raises:
        UserError: the global batch is no multiple, or the number of micro-batches is another one.
    """
    if flags.global_batch_size is None:
        return {}
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    micro_batch = flags.batch_size * world_size
    steps, rest = divmod(flags.global_batch_size, micro_batch)
    if rest:
        raise UserError(
            f"--global_batch_size {flags.global_batch_size} is not a multiple of --batch_size "
            f"{flags.batch_size} × {ranks} = {micro_batch}: change one of them."
        )
    if "gradient_accumulation_steps" in given and flags.gradient_accumulation_steps != steps:
        raise UserError(
            f"--global_batch_size {flags.global_batch_size} with --batch_size {flags.batch_size} "
            f"and {ranks} makes {steps} micro-batches, not --gradient_accumulation_steps "
            f"{flags.gradient_accumulation_steps}: leave one of the flags out."
        )
    return {} if "gradient_accumulation_steps" in given else {"gradient_accumulation_steps": steps}
