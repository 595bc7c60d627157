"""The memory plan of a run in progress, which a tool makes: `Hooks.plan_run`."""

from __future__ import annotations

from collections.abc import Callable

from distributed_training.files.json_types import JsonObject
from distributed_training.ranks.context import DistContext
from distributed_training.settings.settings import Settings
from distributed_training.train_state import TrainState


class MemoryPlan:
    """The memory plan of a run. This one knows nothing: the tool's is a subclass."""

    def predicted_bytes(self) -> JsonObject | None:
        """Return the estimated bytes of one rank for results.json; None: not known."""
        return None

    def rank_limits(self, ctx: DistContext) -> list[int] | None:
        """Return the sequences in a micro-batch that fit the memory of each rank with a margin.

        Every rank must call it. None: not known, or without --rank_shares auto.
        """
        return None

    def leaves_half(self, ctx: DistContext) -> bool:
        """Return whether the run needs less than half of the memory.

        Then a run on a CPU whose states are not sharded keeps the memory of large tensors that it
        frees. Strategies that shard use tensors of many sizes: keeping large ones takes 27 to 38 %
        more memory, for steps from 6 % shorter to 20 % longer (tools/benchmarks/RESULTS.md).
        """
        return False

    def at_step(self, state: TrainState, ctx: DistContext) -> MemoryPlan:
        """Return the plan with the sequences that this rank has in the next step."""
        return self

    def ways_to_fit(self, ctx: DistContext) -> list[str]:
        """Return lines of advice with estimated memory, for a run that ran out of memory.

        Raises:
            UserError: the estimate does not support the architecture or the configuration.
        """
        return []


# From the settings, the content of the model's config.json, and the tokens of a sequence.
PlanRun = Callable[[Settings, DistContext, JsonObject, int], MemoryPlan]
