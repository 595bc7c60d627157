"""Hooks: the one place where a tool takes part in a run.

The package never imports a tool. The program that starts a run passes the hooks that it has: those
of this project are in tools/hooks.py. A run without a hook works, except for the flags that need
it, which are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from distributed_training.data.batches import StepBatches
    from distributed_training.ranks.context import DistContext
    from distributed_training.ranks.launch import Launch
    from distributed_training.run.balancing import CreateBalancer
    from distributed_training.run.memory_plan import PlanRun
    from distributed_training.run.run import Run
    from distributed_training.settings.data import DataSettings
    from distributed_training.settings.settings import Settings
    from distributed_training.settings.training import TrainingSettings


@dataclass(frozen=True)
class TrainingLoop:
    """The training loop of the script, for a tool that repeats steps."""

    training: TrainingSettings
    train_epoch: Callable[[Run, StepBatches, TrainingSettings, DistContext], None]
    remaining: Callable[[], StepBatches]  # the step batches of the epoch from the next step on
    autocast: torch.autocast  # for forward passes


class Replay(Protocol):
    """--replay: repeats the steps of a run up to one, and shows that step."""

    def in_temporary_folder(
        self, settings: Settings, ctx: DistContext, step: int
    ) -> AbstractContextManager[Settings]:
        """Yield the settings of a run that repeats the steps in a temporary folder.

        Raises:
            UserError: the run in --output_dir is not the run of these settings.
        """

    def show(
        self, run: Run, step: int, loop: TrainingLoop, data: DataSettings, ctx: DistContext
    ) -> nn.Module:
        """Repeat the steps up to `step` and show that one; return the wrapped model.

        Raises:
            UserError: the run has no such step, or the file cannot be written.
        """


@dataclass(frozen=True)
class Hooks:
    """What tools add to a run. All ranks call the functions that take a DistContext."""

    # --prove and --prefetch: in one process, instead of a run. They return the exit code.
    prove: Callable[[Settings], int] | None = None
    prefetch: Callable[[Settings, Launch], int] | None = None
    # --check and --show_sample: on all ranks, instead of training. They return the exit code.
    check: Callable[[Settings, DistContext], int] | None = None
    show_sample: Callable[[Settings, DistContext], int] | None = None
    # --strategy auto and --batch_size auto: returns the settings with plain values.
    choose: Callable[[Settings, DistContext], Settings] | None = None
    plan_run: PlanRun | None = None  # the memory plan of a run
    create_balancer: CreateBalancer | None = None  # --rank_shares auto
    replay: Replay | None = None
