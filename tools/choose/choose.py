"""The first candidate whose memory estimate fits every rank becomes plain flags."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

from distributed_training.about import command_of
from distributed_training.cli.choice import named
from distributed_training.cli.parse import complete
from distributed_training.errors import UserError
from distributed_training.memory.estimate import MemoryEstimate
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.memory.fit import ADVISED_SHARE, Limits
from distributed_training.ranks.compiler import configure_compiler
from distributed_training.ranks.context import DistContext
from distributed_training.run.run_workload import memory_limits, workload_of_run
from distributed_training.settings.data import choose_seq_length
from distributed_training.settings.settings import Settings
from distributed_training.units import GB
from tools.choose.candidates import Candidate, candidates, earlier_choice


class Choice(TypedDict):
    """What a run has chosen, as results.json records it."""

    strategy: str
    batch_size: int
    gradient_accumulation_steps: int
    planned_bytes: int  # of the rank that is closest to its limit
    limit_bytes: int  # the memory of this rank
    runner_up: str | None  # the next candidate that fits
    kept: bool  # it is the choice of the run that is resumed


def choose(settings: Settings, ctx: DistContext) -> Settings:
    """Return the settings with plain values of the flags that are auto; every rank calls it.

    Returns:
        The settings as they are if no flag is auto. `parallelism.choice` is what was chosen.
    Raises:
        UserError: no candidate fits, or the model cannot be planned.
    """
    name, flags = settings.model.model, named(settings.parallelism.to_choose)
    if not flags:
        return settings
    try:
        model = find_architecture(name)
        length = choose_seq_length(settings.data.seq_length, name, model.limit)
        work = workload_of_run(settings, ctx, model, length)
    except UserError as error:
        raise UserError(f"{flags} needs a memory plan: {error}") from error
    if "batch_size" in settings.parallelism.to_choose:  # it has a provisional value of 1
        work = dataclasses.replace(work, batch_size=work.accumulation, accumulation=1)
    found = [*candidates(settings.parallelism, settings.as_given, work)]
    kept = ctx.broadcast_from_rank0(earlier_choice(settings.output, ctx.world_size))
    choice = first_that_fits(found, kept, ctx)
    if choice is None:
        raise UserError(f"{flags}: nothing fits. {nothing_fits(found, memory_limits(ctx))}")
    plain = complete(settings.as_given, {**choice}).settings
    if plain.model.compile:  # which depends on the strategy
        configure_compiler(ctx.device, plain.strategy.gathers_single_layers)
    return dataclasses.replace(plain, hub=settings.hub)


def first_that_fits(
    found: list[Candidate], kept: dict[str, object] | None, ctx: DistContext
) -> Choice | None:
    """Return the first candidate that fits 90 % of every rank's memory by its estimate, or None.

    Args:
        kept: flags of the run that is resumed, which come first if they still fit.
    """
    limits, needs = memory_limits(ctx), [each.estimate() for each in found]
    on_ranks = ctx.all_gather([limits.hold(need, ADVISED_SHARE) for need in needs])
    fitting = [each for each, *fits in zip(found, *on_ranks, strict=True) if all(fits)]
    if not fitting:
        return None
    chosen = next((each for each in fitting if each.flags == kept), fitting[0])
    # Another strategy, if that was to be chosen, else a smaller micro-batch.
    others = [each for each in fitting if each != chosen]
    others = [each for each in others if each.strategy != chosen.strategy] or others
    own = needs[found.index(chosen)].total, limits.gpu or 1
    planned, limit = max(ctx.all_gather(own), key=lambda rank: rank[0] / rank[1])
    return {
        "strategy": chosen.strategy,
        "batch_size": chosen.work.batch_size,
        "gradient_accumulation_steps": chosen.work.accumulation,
        "planned_bytes": planned,
        "limit_bytes": limit,
        "runner_up": str(others[0]) if others else None,
        "kept": chosen.flags == kept,
    }


def nothing_fits(found: list[Candidate], limits: Limits) -> str:
    """Return why no candidate fits, and what may help; the numbers are those of this rank."""
    advice = (
        "Use --gradient_checkpointing, a shorter --seq_length, or more GPUs "
        f"({command_of('scripts/plan_memory.py')} --solve gpus)."
    )
    least: MemoryEstimate = min((each.estimate() for each in found), key=lambda need: need.total)
    limit = limits.gpu or 0
    if least.total > ADVISED_SHARE * limit:
        return (
            f"{least.strategy} needs {least.total / GB:.1f} GB, and a rank may use "
            f"{ADVISED_SHARE * limit / GB:.1f} of {limit / GB:.1f} GB. {advice}"
        )
    host = least.host * limits.ranks_per_node / GB
    return (
        f"{least.strategy} needs {host:.1f} GB of host memory on a node that has "
        f"{(limits.host or 0) / GB:.1f} GB, or another rank has less memory. {advice}"
    )
