"""Where the model states are under FSDP2: this rank's rows of each parameter, a DTensor."""

from collections.abc import Iterator

import torch
from torch import nn

from distributed_training.model_parts import Piece, is_dtensor, local_part
from distributed_training.strategies.optimizer_shards import Shard, ShardedState
from distributed_training.strategies.wrapped import is_fsdp_module


class RowsState(ShardedState):
    """Every master is this rank's rows of a parameter."""

    def _find_shards(self) -> Iterator[Shard]:
        mesh = next(iter(self.trained.values())).device_mesh
        # Under HYBRID_SHARD every node holds all pieces; those of the first node are used.
        self.is_copy = mesh.ndim > 1 and mesh.get_local_rank(0) > 0
        for name, parameter in self.trained.items():
            start, numel = _local_range(parameter)
            yield Shard(parameter, [name], [Piece(name, start, 0, numel)] if numel else [])


def _local_range(parameter: torch.Tensor) -> tuple[int, int]:
    """Return index of the first element and number of elements of this rank's shard."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    row = parameter.numel() // max(1, parameter.shape[0])
    return (offset[0] if offset else 0) * row, local_part(parameter).numel()


def gathered_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that are gathered at present on this rank."""
    return sum(p.nbytes for p in model.parameters() if not is_dtensor(p))


def free_gathered(model: nn.Module) -> None:
    """Free the whole weights that FSDP keeps after an evaluation."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()
