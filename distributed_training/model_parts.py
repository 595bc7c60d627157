"""Parts of a model: its transformer blocks, and the parts of a parameter on the ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn


class Piece(NamedTuple):
    """Consecutive elements of one parameter in a flat tensor, such as an optimizer's master."""

    name: str
    start: int  # index of the first element in the flattened parameter
    offset: int  # index of that element in the flat tensor
    numel: int


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a whole parameter; one that ZeRO-3 has partitioned is [0]."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is distributed over the ranks (FSDP2)."""
    return hasattr(tensor, "to_local")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `_no_split_modules`, or else those of the largest ModuleList.

    The model may be wrapped or sharded: FSDP2 replaces a module's class by a subclass with another
    name, and ZeRO-3 empties parameters.
    """
    model = getattr(model, "module", model)  # inside DDP or DeepSpeed's engine
    names = set(getattr(model, "_no_split_modules", None) or ())

    def is_block(module: nn.Module) -> bool:
        return any(cls.__name__ in names for cls in type(module).__mro__)

    def size(layers: nn.ModuleList) -> int:
        return sum(math.prod(full_shape(parameter)) for parameter in layers.parameters())

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [module for module in model.modules() if is_block(module)]
    return blocks or list(max(lists, key=size, default=[]))
