"""The memory estimate of a run in progress: for advice, for results.json, for --check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from distributed_training import console
from distributed_training.errors import UserError
from distributed_training.files.json_types import JsonObject
from distributed_training.memory.estimate import MemoryEstimate, predict
from distributed_training.memory.fit import ADVISED_SHARE, Limits, describe_remedies, most_sequences
from distributed_training.memory.system import memory_limit
from distributed_training.rank_shares import AUTO
from distributed_training.ranks.context import DistContext
from distributed_training.run.run_workload import workload_of_run
from distributed_training.settings.settings import Settings
from distributed_training.train_state import TrainState
from distributed_training.workload.architectures import read_architecture
from distributed_training.workload.workload import Workload


@dataclass(frozen=True)
class RunPlan:
    """The memory estimate of a run in progress."""

    strategy: str
    optimizer: str  # --optim
    chooses_shares: bool  # --rank_shares auto
    work: Workload | UserError  # an error says why the estimate does not support the run

    @classmethod
    def of(
        cls, settings: Settings, ctx: DistContext, config: JsonObject, seq_length: int
    ) -> RunPlan:
        """Plan a run.

        Args:
            config: the content of the model's config.json.
        """
        training, strategy = settings.training, settings.parallelism.strategy
        own = strategy, training.optim, training.rank_shares == AUTO
        try:
            model = read_architecture(config, settings.model.model)
            return cls(*own, workload_of_run(settings, ctx, model, seq_length))
        except UserError as error:
            return cls(*own, error)

    def estimate(self) -> MemoryEstimate | None:
        """Return the memory of one rank, or None if the estimate does not support the run."""
        return None if isinstance(self.work, UserError) else predict(self.work, self.strategy)

    def rank_limits(self, ctx: DistContext) -> list[int] | None:
        """Return the sequences in a micro-batch that fit the memory of each rank with a margin.

        Every rank must call it. None without --rank_shares auto; or, with a notice, if the estimate
        does not support the run.
        """
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
        """Return the plan with the sequences that this rank has in the next step."""
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
        """Return whether the run needs less than half of the memory by the estimate.

        Then a run on a CPU whose states are not sharded keeps the memory of large tensors that it
        frees. Strategies that shard use tensors of many sizes: keeping large ones takes 27 to 38 %
        more memory, for steps from 6 % shorter to 20 % longer (tools/benchmarks/RESULTS.md).
        """
        estimate = self.estimate()
        return estimate is not None and memory_limits(ctx).hold(estimate, 0.5)

    def ways_to_fit(self, ctx: DistContext) -> list[str]:
        """Return lines of advice with estimated memory, for a run that ran out of memory.

        Raises:
            UserError: the estimate does not support the architecture or the configuration.
        """
        if isinstance(self.work, UserError):
            raise self.work
        return describe_remedies(self.work, self.strategy, memory_limits(ctx))


def memory_limits(ctx: DistContext) -> Limits:
    """Return the memory limits of this rank's device and of its node, in bytes."""
    ranks = ctx.ranks_per_node
    if ctx.device.type == "cuda":
        return Limits(memory_limit(ctx.device), memory_limit(torch.device("cpu")), None, ranks)
    return Limits(memory_limit(ctx.device) // ranks)  # the ranks share the host's memory
