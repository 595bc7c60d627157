"""--strategy auto, --batch_size auto, --global_batch_size: what is known before the ranks meet."""

from distributed_training.cli.parser import Options
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.rank_shares import AUTO
from distributed_training.strategies.strategy import FlagValues
from distributed_training.units import GB

FOLLOWS = "from --global_batch_size"  # the source of what follows from it on any number of ranks
# Flags that may be auto, and their values until the run has chosen (tools/choose).
PROVISIONAL: FlagValues = {"strategy": "dp", "batch_size": 1}


def filled_in(
    values: FlagValues, sources: dict[str, str], choice: FlagValues | None
) -> tuple[FlagValues, dict[str, str]]:
    """Return the flags and their sources, with the values that the run has chosen for auto."""
    names = [name for name in PROVISIONAL if choice and values.get(name) == AUTO]
    own = {name: f"--{name} auto" for name in names}
    return {**values, **{name: (choice or {})[name] for name in names}}, {**sources, **own}


def take_provisional(flags: Options, given: frozenset[str]) -> tuple[str, ...]:
    """Set the provisional values of the flags that are auto, in place; return their names.

    Raises:
        UserError: they need another flag, or exclude one.
    """
    names = tuple(name for name in PROVISIONAL if getattr(flags, name) == AUTO)
    flag = f"--{names[0]} auto" if names else ""
    problems = {
        f"{flag} uses the memory plan, which does not support own configurations: leave "
        "--ds_config and --fsdp_config out": flags.ds_config or flags.fsdp_config,
        f"{flag} plans a training, and --eval_only does not train: leave auto out": flags.eval_only,
        f"--prove makes steps under all strategies: leave {flag} out": flags.prove is not None,
        f"{flag} uses the memory of real GPUs: leave --simulate_gpus or auto out": (
            flags.simulate_gpus
        ),
    }
    if "batch_size" in names:
        problems |= {
            "--batch_size auto needs --global_batch_size, so that the training does not depend on "
            "the memory": flags.global_batch_size is None,
            "--batch_size auto determines the accumulation: leave --gradient_accumulation_steps "
            "out": "gradient_accumulation_steps" in given,
            "--batch_size auto chooses for equal shares: leave --rank_shares or auto out": (
                isinstance(flags.rank_shares, tuple)
            ),
        }
    for problem, holds in problems.items() if names else ():
        if holds:
            raise UserError(f"{problem}.")
    vars(flags).update({name: PROVISIONAL[name] for name in names})
    return names


def accumulation(
    flags: Options, given: frozenset[str], to_choose: tuple[str, ...], world_size: int
) -> FlagValues:
    """Return --gradient_accumulation_steps for --global_batch_size; without it no value.

    Args:
        to_choose: flags that have provisional values.

    Raises:
        UserError: it is not a multiple, or contradicts --gradient_accumulation_steps.
    """
    if flags.global_batch_size is None:
        return {}
    if flags.ds_config:
        raise UserError(
            "--global_batch_size is train_batch_size in the file of --ds_config: set it there, or "
            "leave one of them out."
        )
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    micro_batch = flags.batch_size * world_size
    steps, rest = divmod(flags.global_batch_size, micro_batch)
    if rest:
        size = "" if "batch_size" in to_choose else f"--batch_size {flags.batch_size} × "
        total = f"{size}{ranks}" + (f" = {micro_batch}" if size else "")
        raise UserError(
            f"--global_batch_size {flags.global_batch_size} is not a multiple of {total}: change "
            "one of them."
        )
    if "gradient_accumulation_steps" in given and flags.gradient_accumulation_steps != steps:
        raise UserError(
            f"--global_batch_size {flags.global_batch_size} with --batch_size {flags.batch_size} "
            f"and {ranks} makes {steps} micro-batches, not --gradient_accumulation_steps "
            f"{flags.gradient_accumulation_steps}: leave one of the flags out."
        )
    return {} if "gradient_accumulation_steps" in given else {"gradient_accumulation_steps": steps}


def named(to_choose: tuple[str, ...]) -> str:
    """Return the flags that are auto as a message names them; "" if there are none."""
    return " and ".join(f"--{name} auto" for name in to_choose)


def described(to_choose: tuple[str, ...], choice: JsonObject) -> str:
    """Return a line about what a run has chosen, and the runner-up.

    Args:
        to_choose: the flags that were auto.
        choice: as results.json has it.
    """
    steps = choice["gradient_accumulation_steps"]
    batch = f"{choice['batch_size']} sequences" + f" × {steps}" * (steps > 1)
    planned, limit = choice["planned_bytes"] / GB, choice["limit_bytes"] / GB
    kept = ", as in the run that is resumed" if choice["kept"] else ""
    second = f"; next: {choice['runner_up']}" if choice["runner_up"] else ""
    return (
        f"🎯 {named(to_choose)}: {choice['strategy']}, {batch} per rank{kept}: {planned:.1f} of "
        f"{limit:.1f} GB by the memory plan{second}"
    )
