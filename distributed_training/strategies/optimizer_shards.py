"""Locations of each parameter's fp32 weight and optimizer states on this rank, for every strategy.

Every optimizer updates flat fp32 tensors ("masters"). A piece maps a range of elements of a
parameter to its offset in a master. Each engine has a class for each layout of its masters:

    ddp/states.py        WholeState   the parameters themselves
    fsdp/states.py       RowsState    this rank's rows of each parameter
    deepspeed/states.py  Zero12State  stages 1 and 2: a partition per parameter group
                         Zero3State   stage 3: a partition per sub-group, maybe on NVMe

The optimizers (optimizers/) know their states: which have an element for each of the master's, and
how they are read, created and written in fp32.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distributed_training.model_parts import Piece, full_shape, local_part
from distributed_training.optimizers import optimizer_of
from distributed_training.strategies.wrapped import base_optimizer


class Shard(NamedTuple):
    """One master on this rank."""

    key: torch.Tensor  # the tensor that is the key of the optimizer's state
    # The parameters that all ranks' masters of this group hold, in the same order on every rank.
    names: list[str]
    pieces: list[Piece]  # the elements in this rank's master, without DeepSpeed's padding
    group: int = 0  # DeepSpeed's index of the group or sub-group


class ShardedState:
    """All masters of this rank, for reading and writing.

    Attributes:
        shapes: {name: shape} of the trained parameters.
        base: PyTorch's optimizer.
        optimizer: which one of --optim it is.
        shards: the masters of this rank.
        replicated: whether every rank holds all elements.
        is_copy: whether another rank holds the same elements and saves them.
    """

    replicated = is_copy = False

    def __init__(self, model: nn.Module, optimizer, device: torch.device):
        self.device, self.wrapper = device, optimizer
        self.base: Any = base_optimizer(optimizer)
        self.optimizer = optimizer_of(self.base)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shapes = {name: full_shape(parameter) for name, parameter in self.trained.items()}
        self._name_of = {id(parameter): name for name, parameter in self.trained.items()}
        self.shards = list(self._find_shards())

    def _find_shards(self) -> Iterator[Shard]:
        raise NotImplementedError

    @property
    def on_disk(self) -> bool:
        """Whether masters are on NVMe, and in memory only while they are open."""
        return False

    @contextmanager
    def open(
        self, shard: Shard, write: bool = False, moments: bool = True
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the flat tensors of one shard: {"weight", *names of moments}.

        The moments are missing before the first update. A shard on NVMe is in memory only inside.

        Args:
            write: create missing moments, and keep what the caller writes to the tensors. Call
                `finish_writing` after the last shard.
            moments: False yields only the weight, which every optimizer has.
        """
        tensors = {"weight": shard.key.data}
        if moments:
            tensors |= self._moments(shard.key, create=write)
        yield {name: local_part(tensor).view(-1) for name, tensor in tensors.items()}
        if write and moments:
            self.optimizer.store(self.base, shard.key, tensors)

    def _moments(self, key: torch.Tensor, create: bool) -> dict[str, torch.Tensor]:
        """Return the states of a master that have an element for each of its own, in fp32."""
        return self.optimizer.load(self.base, key, create)

    def place_masters(self) -> None:
        """Tell an optimizer of whole matrices which elements the flat masters of all ranks have."""

    def finish_writing(self) -> None:
        """Update the working copies of the parameters from the masters; all ranks call it."""

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield (name, weight) of every trained parameter, assembled from the ranks in fp32.

        All ranks iterate together; the weight is a tensor on rank 0 and None on the other ranks.
        """
        is_main = dist.get_rank() == 0
        for shard in self.shards:
            with self.open(shard, moments=False) as tensors:
                for name in shard.names:
                    if self.replicated:
                        yield name, tensors["weight"].view(self.shapes[name]) if is_main else None
                        continue
                    flat = torch.zeros(math.prod(self.shapes[name]), device=self.device)
                    for piece in [] if self.is_copy else shard.pieces:
                        if piece.name == name:
                            part = tensors["weight"][piece.offset : piece.offset + piece.numel]
                            flat[piece.start : piece.start + piece.numel].copy_(part)
                    dist.reduce(flat, dst=0)  # one rank has each element; the others add 0
                    yield name, flat.view(self.shapes[name]) if is_main else None

    @property
    def adam_step(self) -> int:
        """Number of updates that the optimizer has made; 0 for one that does not count them."""
        steps = (state["step"] for state in self.base.state.values() if "step" in state)
        return int(next(steps, 0))

    def set_adam_step(self, step: int) -> None:
        """Set the number of updates for every master whose optimizer counts them."""
        for shard in self.shards:
            self.optimizer.set_step(self.base, shard.key, step)

    def whole_states(self) -> dict[str, torch.Tensor]:
        """Return the states of whole parameters, by "<parameter>/<kind>"; equal on all ranks."""
        return self.optimizer.whole_states(self.base, self._keys)

    def set_whole_states(self, saved: dict[str, torch.Tensor]) -> None:
        """Set what `whole_states` returned."""
        self.optimizer.set_whole_states(self.base, self._keys, saved)

    @property
    def _keys(self) -> dict[str, torch.Tensor]:
        """The parameters whose states are whole, by name."""
        return {shard.names[0]: shard.key for shard in self.shards}
