"""The tools that take part in a run, for real_model_example.py.

Each function imports its tool when it is called, because most runs need none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from distributed_training.hooks import Hooks, TrainingLoop

if TYPE_CHECKING:
    from torch import nn

    from distributed_training.files.json_types import JsonObject
    from distributed_training.ranks.context import DistContext
    from distributed_training.ranks.launch import Launch
    from distributed_training.run.balancing import Balancer
    from distributed_training.run.run import Run
    from distributed_training.settings.data import DataSettings
    from distributed_training.settings.settings import Settings
    from distributed_training.strategies.objects import TrainingObjects
    from distributed_training.train_state import TrainState


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

    def redirected(
        self, settings: Settings, ctx: DistContext, step: int
    ) -> AbstractContextManager[Settings]:
        """See distributed_training.hooks.Replay."""
        from tools.replay import folder

        return folder.redirected(settings, ctx, step)

    def show(
        self, run: Run, step: int, loop: TrainingLoop, data: DataSettings, ctx: DistContext
    ) -> nn.Module:
        """See distributed_training.hooks.Replay."""
        from tools.replay import command

        return command.replay(run, step, loop, data, ctx)


HOOKS = Hooks(
    prove=prove,
    prefetch=prefetch,
    check=check,
    show_sample=show_sample,
    choose=choose,
    create_balancer=create_balancer,
    replay=Replay(),
)
