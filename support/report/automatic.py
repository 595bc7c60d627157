"""--strategy auto and --batch_size auto: the plain flags that fit the devices of all ranks."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

from support import console
from support.cli.parse import read_command_line
from support.cluster.compiler import configure_compiler
from support.cluster.context import DistContext
from support.errors import UserError
from support.files.json_types import JsonObject
from support.memory.find_architecture import find_architecture
from support.memory.fit import ADVISED_SHARE
from support.report.candidates import Candidate, candidates, earlier_choice
from support.report.run_plan import memory_limits
from support.report.run_workload import workload_of_run
from support.settings.data import choose_seq_length
from support.settings.settings import Settings
from support.units import GB
from support.workload.workload import Workload


class Choice(TypedDict):
    """What a run has chosen, as results.json records it."""

    strategy: str
    batch_size: int
    gradient_accumulation_steps: int
    planned_bytes: int  # of one rank
    limit_bytes: int  # of the rank with the least memory
    runner_up: str | None  # the next candidate that fits
    kept: bool  # it is the choice of the run that is resumed


def choose(argv: list[str], settings: Settings, ctx: DistContext) -> Settings:
    """Return the settings with plain values of the flags that are auto; every rank calls it.

    Args:
        argv: the command line.
    Returns:
        The settings as they are if no flag is auto. `parallelism.choice` is what was chosen.
    Raises:
        UserError: no candidate fits, or the model cannot be planned.
    """
    name, automatic = settings.model.model, settings.parallelism.automatic
    if not automatic:
        return settings
    try:
        model = find_architecture(name)
        length = choose_seq_length(settings.data.seq_length, name, model.limit)
        work = workload_of_run(settings, ctx, model, length)
    except UserError as error:
        raise UserError(f"{flags_of(automatic)} needs a memory plan: {error}") from error
    if "batch_size" in automatic:  # the provisional micro-batch has one sequence
        work = dataclasses.replace(work, batch_size=work.accumulation, accumulation=1)
    found = [*candidates(argv, settings.parallelism, work)]
    kept = ctx.broadcast_from_rank0(earlier_choice(settings.output, ctx.world_size))
    choice = first_that_fits(found, kept if kept in found else None, work, ctx)
    if choice is None:
        raise UserError(nothing_fits(automatic, found, work, ctx))
    plain = read_command_line(argv, chosen={**choice}).settings
    if plain.model.compile:  # which depends on the strategy
        configure_compiler(ctx.device, plain.parallelism.configured.hooks_between_layers)
    return dataclasses.replace(plain, hub=settings.hub)


def first_that_fits(
    found: list[Candidate], kept: Candidate | None, work: Workload, ctx: DistContext
) -> Choice | None:
    """Return the first candidate that fits 90 % of every rank's memory by its estimate, or None.

    Args:
        kept: what the run that is resumed had chosen; it is kept.
    """
    limits = memory_limits(ctx)
    on_ranks = ctx.all_gather([limits.hold(c.estimate(work), ADVISED_SHARE) for c in found])
    fitting = [each for each, *fits in zip(found, *on_ranks, strict=True) if all(fits)]
    if not (kept or fitting):
        return None
    chosen = kept or fitting[0]
    # Another strategy, if that was to be chosen, else a smaller micro-batch.
    others = [each for each in fitting if each != chosen]
    others = [each for each in others if each.strategy != chosen.strategy] or others
    return {
        "strategy": chosen.strategy,
        "batch_size": chosen.batch_size,
        "gradient_accumulation_steps": chosen.workload(work).accumulation,
        "planned_bytes": chosen.estimate(work).total,
        "limit_bytes": least_limit(ctx),
        "runner_up": str(others[0]) if others else None,
        "kept": kept is not None,
    }


def least_limit(ctx: DistContext) -> int:
    """Return the bytes of the rank with the least memory; every rank calls it."""
    return min(ctx.all_gather(memory_limits(ctx).gpu or 0))


def flags_of(automatic: tuple[str, ...]) -> str:
    """Return the flags that are auto, as a message names them."""
    return " and ".join(f"--{name} auto" for name in automatic)


def nothing_fits(
    automatic: tuple[str, ...], found: list[Candidate], work: Workload, ctx: DistContext
) -> str:
    """Return the message for a run of which no candidate fits; every rank calls it."""
    limit = least_limit(ctx) / GB
    needs = [each.estimate(work) for each in found]
    least = min(needs, key=lambda need: need.total, default=None)
    smallest = f"{least.strategy} needs {least.total / GB:.1f} GB, and " if least else ""
    return (
        f"{flags_of(automatic)}: nothing fits. {smallest}a rank may use "
        f"{ADVISED_SHARE * limit:.1f} of {limit:.1f} GB. Use --gradient_checkpointing, a shorter "
        "--seq_length, or more GPUs (scripts/plan_memory.py --solve gpus)."
    )


def say(automatic: tuple[str, ...], choice: JsonObject) -> None:
    """Print the choice and the runner-up."""
    steps = choice["gradient_accumulation_steps"]
    batch = f"{choice['batch_size']} sequences" + f" × {steps}" * (steps > 1)
    planned, limit = choice["planned_bytes"] / GB, choice["limit_bytes"] / GB
    kept = ", as in the run that is resumed" if choice["kept"] else ""
    second = f"; next: {choice['runner_up']}" if choice["runner_up"] else ""
    console.print0(
        f"🎯 {flags_of(automatic)}: {choice['strategy']}, {batch} per rank{kept}: {planned:.1f} of "
        f"{limit:.1f} GB by the memory plan{second}"
    )
