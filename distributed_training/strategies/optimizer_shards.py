"""Locations of each parameter's fp32 weight and optimizer states on this rank, for every strategy.

Every optimizer updates flat fp32 tensors ("masters"). A piece maps a range of elements of a
parameter to its offset in a master. Each engine has a class for each layout of its masters:

    ddp/states.py        WholeState   the parameters themselves
    fsdp/states.py       RowsState    this rank's rows of each parameter
    deepspeed/states.py  Zero12State  stages 1 and 2: a partition per parameter group
                         Zero3State   stage 3: a partition per sub-group, maybe on NVMe

AdamW's moments have an element for each of the master's; 8-bit moments are converted to fp32 and
back (moments_8bit). Muon's average of the gradients has an element for each of the master's, too.
Adafactor's states are rows and columns of whole parameters; only dp has them, on every rank
(adafactor_states). SGD without momentum has no states.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distributed_training.strategies.wrapped import base_optimizer, full_shape, local_part

MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam
MOMENTUM = "momentum_buffer"  # of Muon


class Piece(NamedTuple):
    """Consecutive elements of one parameter in a master."""

    name: str
    start: int  # index of the first element in the flattened parameter
    offset: int  # index of that element in the master
    numel: int


class Shard(NamedTuple):
    """One master on this rank."""

    key: torch.Tensor  # the tensor that is the key of the optimizer's state
    # The parameters that all ranks' masters of this group hold, in the same order on every rank.
    names: list[str]
    pieces: list[Piece]  # the elements in this rank's master, without DeepSpeed's padding
    group: int = 0  # DeepSpeed's index of the group or sub-group


def optimizer_family(optimizer) -> str | None:
    """Return the family of an optimizer (optimizers.py); None: not supported."""
    base = base_optimizer(optimizer)
    if isinstance(base, torch.optim.Adam | torch.optim.AdamW) or hasattr(base, "ds_opt_adam"):
        return "adamw"
    if isinstance(base, torch.optim.SGD):
        return None if any(group["momentum"] for group in base.param_groups) else "sgd"
    names = {"AdamW8bit": "adamw", "Adafactor": "adafactor", "MuonAndAdamW": "muon"}
    return names.get(type(base).__name__)


class ShardedState:
    """All masters of this rank, for reading and writing.

    Attributes:
        shapes: {name: shape} of the trained parameters.
        base: PyTorch's optimizer.
        shards: the masters of this rank.
        replicated: whether every rank holds all elements.
        is_copy: whether another rank holds the same elements and saves them.
    """

    replicated = is_copy = False

    def __init__(self, model: nn.Module, optimizer, device: torch.device):
        self.device, self.wrapper = device, optimizer
        self.base: Any = base_optimizer(optimizer)
        self.family = optimizer_family(optimizer)
        self.is_8bit = type(self.base).__name__ == "AdamW8bit"
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shapes = {name: full_shape(parameter) for name, parameter in self.trained.items()}
        self._name_of = {id(parameter): name for name, parameter in self.trained.items()}
        self.shards = list(self._find_shards())

    def _find_shards(self) -> Iterator[Shard]:
        raise NotImplementedError

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
        if not moments or self.family not in ("adamw", "muon"):
            pass
        elif self.is_8bit:
            from distributed_training.strategies import moments_8bit

            tensors |= moments_8bit.load(self.base, shard.key, create=write)
        else:
            tensors |= self._moments(shard.key, create=write)
        yield {name: local_part(tensor).view(-1) for name, tensor in tensors.items()}
        if write and self.is_8bit and moments:
            moments_8bit.store(tensors, self.base.state[shard.key])

    def _moments(self, key: torch.Tensor, create: bool) -> dict[str, torch.Tensor]:
        """Return the moments of a master: Adam's, or for a matrix of Muon its average."""
        names = self._moments_of(key)
        if create:
            state = self.base.state[key]
            for moment in names:
                if moment not in state or state[moment].numel() != key.numel():
                    state[moment] = torch.zeros_like(key.data)
        # A plain get: `state` is a defaultdict, and an empty entry would look like a state.
        state = self.base.state.get(key, {})
        return {moment: state[moment] for moment in names if moment in state}

    def _moments_of(self, key: torch.Tensor) -> tuple[str, ...]:
        return self.base.moments_of(key) if self.family == "muon" else MOMENTS

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
        if self.family == "sgd":
            return
        defaults = self.base.defaults
        # The AdamW that Muon uses is fused.
        on_device = defaults.get("fused") or defaults.get("capturable") or self.family == "muon"
        # DeepSpeed's CPU Adam, bitsandbytes and Adafactor store an int.
        as_int = hasattr(self.base, "ds_opt_adam") or self.is_8bit or self.family == "adafactor"
        for shard in self.shards:
            if self.family == "adafactor" and not self.base.state.get(shard.key):
                continue  # it creates all states together
            if self.family == "muon" and self._moments_of(shard.key) != MOMENTS:
                continue  # Muon does not count
            device = local_part(shard.key).device if on_device else "cpu"
            self.base.state[shard.key]["step"] = (
                step if as_int else torch.tensor(float(step), device=device)
            )
