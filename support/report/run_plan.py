"""The memory estimate of a run in progress: for advice, for results.json, for --check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from support import console
from support.cluster.context import DistContext
from support.data.batches import initial_sequences
from support.errors import UserError
from support.files.json_types import JsonObject
from support.memory.estimate import MemoryEstimate, predict
from support.memory.fit import (
    ADVISED_SHARE,
    Limits,
    check_is_planned,
    describe_remedies,
    most_sequences,
)
from support.memory.system import memory_limit
from support.settings.settings import Settings
from support.train_state import TrainState
from support.workload.architectures import Architecture, read_architecture
from support.workload.workload import Device, Kernels, Workload, adapters


def planned_work(
    settings: Settings, ctx: DistContext, model: Architecture, seq_length: int
) -> Workload:
    """Describe a run for the memory estimate.

    Raises:
        UserError: the estimate does not support the run (see `check_is_planned`).
    """
    chosen, training = settings.model, settings.training
    check_is_planned(settings.parallelism.configured, training.eval_only)
    return Workload(
        model,
        ctx.world_size,
        training.batch_size,
        seq_length,
        ctx.precision,
        chosen.gradient_checkpointing,
        training.gradient_accumulation_steps,
        device=Device(ctx.device.type, ctx.capability),
        rank=0 if ctx.simulated else None,
        lora=adapters(model, chosen.lora_r, chosen.lora_targets, chosen.load_in_4bit),
        kernels=Kernels(chosen.fused_gelu, settings.data.isolates_documents, chosen.compile),
        optimizer=training.optim,
        share=initial_sequences(training, ctx)[ctx.rank] / training.batch_size,
        reduce_dtype=settings.parallelism.configured.reduce_dtype,
    )


@dataclass(frozen=True)
class RunPlan:
    """The memory estimate of a run in progress."""

    strategy: str
    optimizer: str  # --optim
    work: Workload | UserError  # an error says why the estimate does not support the run

    @classmethod
    def of(
        cls, settings: Settings, ctx: DistContext, config: JsonObject, seq_length: int
    ) -> RunPlan:
        """Plan a run.

        Args:
            config: the content of the model's config.json.
        """
        names = settings.parallelism.strategy, settings.training.optim
        try:
            model = read_architecture(config, settings.model.model)
            return cls(*names, planned_work(settings, ctx, model, seq_length))
        except UserError as error:
            return cls(*names, error)

    def estimate(self) -> MemoryEstimate | None:
        """Return the memory of one rank, or None if the estimate does not support the run."""
        return None if isinstance(self.work, UserError) else predict(self.work, self.strategy)

    def most_of_ranks(self, ctx: DistContext, is_auto: bool) -> list[int] | None:
        """Return the sequences in a micro-batch that fit the memory of each rank with a margin.

        Every rank must call it. None if the estimate does not support the run, with a notice.

        Args:
            is_auto: with --rank_shares auto; otherwise None, as nothing is chosen.
        """
        if not is_auto or ctx.world_size == 1:
            return None
        most = ctx.all_gather(self._most_sequences(ctx))
        if None in most:
            console.warn(
                "--rank_shares auto: the memory estimate does not support this run, so a fast rank "
                "may get more sequences than fit its memory. If so, give shares such as 2,1."
            )
            return None
        return [max(1, size or 1) for size in most]

    def at_step(self, state: TrainState, ctx: DistContext) -> RunPlan:
        """Return the plan with the sequences that this rank has in the next step."""
        if isinstance(self.work, UserError):
            return self
        sequences = state.sequences_of_ranks(state.step + 1)[ctx.rank]
        return replace(self, work=replace(self.work, share=sequences / self.work.batch_size))

    def _most_sequences(self, ctx: DistContext) -> int | None:
        if isinstance(self.work, UserError):
            return None
        holds = partial(memory_limits(ctx).hold, share=ADVISED_SHARE)
        return most_sequences(replace(self.work, share=1.0), self.strategy, holds)

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


def keeps_large_tensors(plan: RunPlan, ctx: DistContext, sharded: bool) -> bool:
    """Return whether a run on a CPU keeps the memory of large tensors that it frees.

    It does if nothing is sharded and it needs less than half of the memory by the estimate.
    Strategies that shard use tensors of many sizes: keeping large ones takes 27 to 38 % more
    memory, for steps from 6 % shorter to 20 % longer (benchmarks/RESULTS.md).
    """
    estimate = None if sharded else plan.estimate()
    return estimate is not None and memory_limits(ctx).hold(estimate, 0.5)
