"""The gradient norm and the update ratio of each layer in a step, for every strategy.

Both are computed from the fp32 weights and the optimizer states before and after the step, which
each strategy offers in the same form, also for states in host memory or on NVMe. The gradient g
follows from a moving average m' = b m + (1 - b) g of the optimizer: AdamW's first moment with
b = beta1, Muon's momentum with its b.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import nn

from distributed_training.checkpoints.loading import PieceReader
from distributed_training.model_parts import Piece, transformer_blocks
from distributed_training.strategies.optimizer_shards import Shard, ShardedState
from distributed_training.strategies.wrapped import unwrapped


class Layer(TypedDict):
    """A transformer block, or another module with parameters of its own, in a step."""

    name: str
    gradient_norm: float | None  # before clipping; None: not known, or no update was made
    weight_norm: float  # before the update
    update_ratio: float  # norm of the update / norm of the weights


def layer_names(model: nn.Module, parameters: Iterable[str]) -> dict[str, str]:
    """Return the layer of each parameter: its block, or else the module that has it."""
    blocks = {id(block) for block in transformer_blocks(model)}
    named = [name for name, module in unwrapped(model).named_modules() if id(module) in blocks]
    found = {}
    for parameter in parameters:
        own = parameter.rpartition(".")[0]
        found[parameter] = next((name for name in named if parameter.startswith(f"{name}.")), own)
    return found


def changes_of_layers(
    state: ShardedState, before: PieceReader, layers: dict[str, str], grad_norm: float | None
) -> list[Layer]:
    """Compare the states after a step with those before it; every rank calls it.

    Args:
        state: this rank's masters and moments after the step.
        before: the checkpoint before the step.
        layers: the layer of each parameter, see `layer_names`.
        grad_norm: of the step, before clipping. The norms of the layers are scaled to it, because
            the moments contain the clipped gradient.
    """
    rows = {layer: row for row, layer in enumerate(dict.fromkeys(layers.values()))}
    # The sums of squares of the weights, of their changes, and of the gradients.
    sums = torch.zeros(len(rows), 3, dtype=torch.float64)
    for shard in state.shards:
        decay = _decay(state, shard)
        with state.open(shard) as tensors:
            # If every rank has all elements, or another one has the same, one of them counts.
            counts = not state.is_copy and (not state.replicated or dist.get_rank() == 0)
            for piece in shard.pieces if counts else ():
                sums[rows[layers[piece.name]]] += _squares(piece, tensors, before, decay)
    before.close()
    sums = sums.to(state.device)
    dist.all_reduce(sums)
    weights, changes, gradients = sums.sqrt().T.tolist()
    whole = math.hypot(*gradients)
    usable = grad_norm is not None and math.isfinite(grad_norm) and 0 < whole < math.inf
    scale = grad_norm / whole if usable and grad_norm else None
    return [
        Layer(
            name=name,
            gradient_norm=None if scale is None else gradients[row] * scale,
            weight_norm=weights[row],
            update_ratio=changes[row] / weights[row] if weights[row] else math.nan,
        )
        for name, row in rows.items()
    ]


def _decay(state: ShardedState, shard: Shard) -> tuple[str, float] | None:
    """Return the moving average of the gradients of a master and its decay; None: it has none."""
    return state.optimizer.average_of(state.base, shard.key)


def _squares(
    piece: Piece,
    tensors: dict[str, torch.Tensor],
    before: PieceReader,
    decay: tuple[str, float] | None,
) -> torch.Tensor:
    """Return the sums of squares of a piece: weights before, their change, gradient; fp64 [3]."""

    def pair(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements before and after the step."""
        after = tensors[kind][piece.offset : piece.offset + piece.numel].float().cpu()
        earlier = torch.empty_like(after)
        before.read_into(earlier, piece.name, kind, piece.start)
        return earlier, after

    def square(values: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2

    old, new = pair("weight")
    gradient = 0.0
    if decay and decay[0] in tensors:
        average, later = pair(decay[0])
        gradient = square(later - decay[1] * average) / (1 - decay[1]) ** 2
    return torch.tensor([square(old), square(new - old), gradient], dtype=torch.float64)
