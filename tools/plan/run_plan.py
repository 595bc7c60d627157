"""The memory plan of a run in progress: for advice if memory runs out, and for results.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from distributed_training import console
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.memory.estimate import MemoryEstimate, predict
from distributed_training.memory.fit import ADVISED_SHARE, describe_remedies, most_sequences
from distributed_training.rank_shares import AUTO
from distributed_training.ranks.context import DistContext
from distributed_training.run.memory_plan import MemoryPlan
from distributed_training.run.run_workload import memory_limits, workload_of_run
from distributed_training.settings.settings import Settings
from distributed_training.train_state import TrainState
from distributed_training.workload.architectures import read_architecture
from distributed_training.workload.workload import Workload


def plan_run(
    settings: Settings, ctx: DistContext, config: JsonObject, seq_length: int
) -> MemoryPlan:
    """Plan a run; see distributed_training.hooks.Hooks.plan_run.

    Everything that the plan needs is imported here, before the training: a changed installation
    must not fail the end of the run.
    """
    strategy, chooses_shares = settings.parallelism.strategy, settings.training.rank_shares == AUTO
    try:
        model = read_architecture(config, settings.model.model)
        work = workload_of_run(settings, ctx, model, seq_length)
    except UserError as error:
        return RunPlan(strategy, chooses_shares, error, None)
    return RunPlan(strategy, chooses_shares, work, predict(work, strategy))


@dataclass(frozen=True)
class RunPlan(MemoryPlan):
    """The memory plan of a run in progress."""

    strategy: str
    chooses_shares: bool  # --rank_shares auto
    work: Workload | UserError  # an error says why the estimate does not support the run
    estimate: MemoryEstimate | None  # of one rank; None if it does not support the run

    def predicted_bytes(self) -> JsonObject | None:
        """See MemoryPlan."""
        return None if self.estimate is None else self.estimate.sizes()

    def rank_limits(self, ctx: DistContext) -> list[int] | None:
        """See MemoryPlan; None also, with a notice, if the estimate does not support the run."""
        if not self.chooses_shares or ctx.world_size == 1:
            return None
        limits = ctx.all_gather(self._most_sequences(ctx))
        if None in limits:
            console.warn(
                "--rank_shares auto: the memory estimate does not support this run, so a fast rank "
                "may get more sequences than fit its memory. If so, give shares such as 2,1."
            )
            return None
        return [max(1, limit or 1) for limit in limits]

    def at_step(self, state: TrainState, ctx: DistContext) -> RunPlan:
        """See MemoryPlan."""
        if isinstance(self.work, UserError):
            return self
        sequences = state.ranks.at(state.step + 1)[ctx.rank]
        return replace(self, work=self.work.with_share(sequences / self.work.batch_size))

    def _most_sequences(self, ctx: DistContext) -> int | None:
        if isinstance(self.work, UserError):
            return None
        holds = partial(memory_limits(ctx).hold, share=ADVISED_SHARE)
        return most_sequences(self.work.with_share(1.0), self.strategy, holds)

    def leaves_half(self, ctx: DistContext) -> bool:
        """See MemoryPlan."""
        return self.estimate is not None and memory_limits(ctx).hold(self.estimate, 0.5)

    def ways_to_fit(self, ctx: DistContext) -> list[str]:
        """See MemoryPlan."""
        if isinstance(self.work, UserError):
            raise self.work
        return describe_remedies(self.work, self.strategy, memory_limits(ctx))
