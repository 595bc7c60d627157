"""The tools that take part in a run, for real_model_example.py.

Each function imports its tool when it is called: most runs need one of them only, the memory plan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from distributed_training.hooks import Hooks, TrainingLoop

if TYPE_CHECKING:
    from torch import nn

    from distributed_training.files.json_types import JsonObject
    from distributed_training.ranks.context import DistContext
    from distributed_training.ranks.launch import Launch
    from distributed_training.run.balancing import Balancer
    from distributed_training.run.memory_plan import MemoryPlan
    from distributed_training.run.run import Run
    from distributed_training.settings.data import DataSettings
    from distributed_training.settings.settings import Settings
    from distributed_training.strategies.objects import TrainingObjects
    from distributed_training.train_state import TrainState

T = TypeVar("T")


def prove(settings: Settings) -> int:
    """--prove: make one step in several ways, and compare them."""
    from tools.prove import prove

    return prove.prove(settings)


def prefetch(settings: Settings, launch: Launch) -> int:
    """--prefetch: download and tokenize what a run needs."""
    from tools.check import prefetch

    return prefetch.prefetch(settings, launch)


def check(settings: Settings, ctx: DistContext) -> int:
    """--check: try what a run needs of this machine and its network."""
    from tools.check import check

    return check.check(settings, ctx)


def show_sample(settings: Settings, ctx: DistContext) -> int:
    """--show_sample: print the first training sequence."""
    from tools.check import show_sample

    return show_sample.show_sample(settings, ctx)


def choose(settings: Settings, ctx: DistContext) -> Settings:
    """--strategy auto, --batch_size auto: the first candidate that fits all ranks."""
    from tools.choose import choose

    return choose.choose(settings, ctx)


def plan_run(
    settings: Settings, ctx: DistContext, config: JsonObject, seq_length: int
) -> MemoryPlan:
    """Plan the memory of a run: for advice if it runs out, and for results.json."""
    from tools.plan import run_plan

    return run_plan.plan_run(settings, ctx, config, seq_length)


def create_balancer(
    objects: TrainingObjects,
    state: TrainState,
    ctx: DistContext,
    report: Callable[[JsonObject, str], None],
) -> Balancer:
    """--rank_shares auto: measure the ranks, and choose their shares."""
    from tools.balance import balancer

    return balancer.create(objects, state, ctx, report)


class Replay:
    """--replay: repeat the steps of a run, and show one."""

    def in_temporary_folder(
        self, settings: Settings, ctx: DistContext, step: int
    ) -> AbstractContextManager[Settings]:
        """See distributed_training.hooks.Replay."""
        from tools.replay import folder

        return folder.in_temporary_folder(settings, ctx, step)

    def show(
        self, run: Run, step: int, loop: TrainingLoop, data: DataSettings, ctx: DistContext
    ) -> nn.Module:
        """See distributed_training.hooks.Replay."""
        from tools.replay import command

        return command.replay(run, step, loop, data, ctx)


def if_present(tool: str, hook: T) -> T | None:
    """Return a hook whose tool has not been deleted; a run without it refuses its flags."""
    return hook if (Path(__file__).parent / tool).is_dir() else None


HOOKS = Hooks(
    prove=if_present("prove", prove),
    prefetch=if_present("check", prefetch),
    check=if_present("check", check),
    show_sample=if_present("check", show_sample),
    choose=if_present("choose", choose),
    plan_run=if_present("plan", plan_run),
    create_balancer=if_present("balance", create_balancer),
    replay=if_present("replay", Replay()),
)
