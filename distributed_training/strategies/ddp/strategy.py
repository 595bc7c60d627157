"""dp: every rank holds all model states; the ranks average the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distributed_training.strategies.strategy import Flags, Resolved, Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from distributed_training.strategies.ddp.micro_batch_graph import Compute, MicroBatchGraphs
    from distributed_training.strategies.optimizer_shards import ShardedState
    from distributed_training.workload.activations import Term
    from distributed_training.workload.workload import Workload


@dataclass(frozen=True)
class DDP(Strategy):
    """A strategy of DistributedDataParallel, which replicates all model states."""

    engine = "ddp"
    supports_cuda_graph = True

    def resolve(self, flags: Flags) -> Resolved:
        """See the base class."""
        return replace(super().resolve(flags), used=frozenset(["bf16_blocks"]))

    def memory_terms(self, work: Workload) -> tuple[list[Term], int]:
        """See the base class."""
        from distributed_training.strategies.ddp.memory import terms_of_ddp

        return terms_of_ddp(work)

    def communication_hook(self, simulated: bool) -> Callable[..., Any] | None:
        """Return the hook that replaces DDP's all-reduce of a bucket; None: DDP's own, in fp32.

        Args:
            simulated: with --simulate_gpus.
        """
        from distributed_training.strategies.ddp import hooks

        return hooks.communication_hook(self.reduce_dtype, simulated)

    def record_micro_batches(self, compute: Compute, model: nn.Module) -> MicroBatchGraphs:
        """Return what computes micro-batches with CUDA graphs, for --cuda_graph."""
        from distributed_training.strategies.ddp.micro_batch_graph import MicroBatchGraphs

        return MicroBatchGraphs.on_gpu(compute, model)

    def compute_blocks_in_bf16(self, model: nn.Module) -> None:
        """Let the transformer blocks compute in bf16, for --bf16_blocks."""
        from distributed_training.strategies.ddp.bf16_blocks import compute_in_bf16

        compute_in_bf16(model)

    def states_of(self, model: nn.Module, optimizer: object, device: torch.device) -> ShardedState:
        """See the base class."""
        from distributed_training.strategies.ddp.states import WholeState

        return WholeState(model, optimizer, device)
