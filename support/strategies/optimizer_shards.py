"""Where each strategy keeps a parameter's fp32 weight and Adam's two moments on this rank.

One description serves all seven, because every optimizer updates flat fp32 tensors ("masters"): dp
the parameters themselves, FSDP its local shards, DeepSpeed one partition for each group (stages 1
and 2) or sub-group (stage 3, whose sub-groups infinity keeps on NVMe). A piece says which elements
of which parameter lie where in a master.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from support.errors import TrainingError

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one parameter.

    Attributes:
        name: of the parameter.
        start: its first element here, counted in the whole parameter as it lies flat.
        offset: where that is in the master.
        numel: how many.
    """

    name: str
    start: int
    offset: int
    numel: int


@dataclass
class Shard:
    """One master on this rank.

    Attributes:
        key: what the optimizer's state is filed under.
        names: parameters that this master's counterparts on all ranks hold together, in the same
            order everywhere.
        pieces: whose elements it holds itself; without DeepSpeed's padding.
        group: DeepSpeed's number of it.
    """

    key: torch.Tensor
    names: list[str]
    pieces: list[Piece]
    group: int


class ShardedState:
    """All masters of this rank, for reading and for writing.

    Args:
        model: the unwrapped module.
        optimizer: torch's optimizer, or DeepSpeed's wrapper around one.
        device: for what ranks exchange.
    """

    def __init__(self, model: nn.Module, optimizer, device: torch.device):
        self.device = device
        self.wrapper = optimizer if hasattr(optimizer, "optimizer") else None
        self.base = base_optimizer(optimizer)
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.shapes = {
            name: tuple(getattr(p, "ds_shape", p.shape))
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        self.stage3 = hasattr(self.wrapper, "fp32_partitioned_groups_flat")
        sharded = next((p for p in model.parameters() if _is_dtensor(p)), None)
        self.replicated = self.wrapper is None and sharded is None
        # Under HYBRID_SHARD every node holds all pieces, and those of the first one count.
        self.is_copy = (
            sharded is not None
            and sharded.device_mesh.ndim > 1
            and sharded.device_mesh.get_local_rank(0) > 0
        )
        if self.wrapper is None:
            self.shards = list(self._plain_shards(model))
        else:
            self.shards = list(self._stage3_shards() if self.stage3 else self._stage12_shards())

    @staticmethod
    def knows(optimizer) -> bool:
        """Whether this is an AdamW, PyTorch's or DeepSpeed's for the CPU; a DeepSpeed file may
        choose any other optimizer.
        """
        base = base_optimizer(optimizer)
        return isinstance(base, torch.optim.Adam | torch.optim.AdamW) or hasattr(
            base, "ds_opt_adam"
        )

    # ------------------------------------------------------------------------------ what lies where

    def _plain_shards(self, model: nn.Module) -> Iterator[Shard]:
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.requires_grad:
                start, numel = _local_range(parameter)
                yield Shard(
                    parameter, [name], [Piece(name, start, 0, numel)] if numel else [], number
                )

    def _stage12_shards(self) -> Iterator[Shard]:
        for group, parameters in enumerate(self.wrapper.bit16_groups):
            mapped = [
                (self.names[id(p)], p._hp_mapping) for p in parameters if p._hp_mapping is not None
            ]
            pieces = [
                Piece(
                    name,
                    m.lp_fragment_address.start,
                    m.hp_fragment_address.start,
                    m.lp_fragment_address.numel,
                )
                for name, m in mapped
            ]
            names = [self.names[id(p)] for p in parameters]
            yield Shard(self.wrapper.single_partition_of_fp32_groups[group], names, pieces, group)

    def _stage3_shards(self) -> Iterator[Shard]:
        rank = dist.get_rank()
        for group, master in enumerate(self.wrapper.fp32_partitioned_groups_flat):
            pieces = []
            for parameter in self.wrapper.fp16_groups[group]:
                _, offset, numel = self.wrapper.grad_position[self.wrapper.get_param_id(parameter)]
                start = rank * numel  # every rank has as many, the last ones filled up with padding
                if (real := min(numel, parameter.ds_numel - start)) > 0:
                    pieces.append(Piece(self.names[id(parameter)], start, offset, real))
            yield Shard(
                master, [self.names[id(p)] for p in self.wrapper.fp16_groups[group]], pieces, group
            )

    # -------------------------------------------------------------------------- reading and writing

    @contextmanager
    def open(self, shard: Shard, write: bool = False, moments: bool = True):
        """The flat tensors of one shard: {"weight", "exp_avg", "exp_avg_sq"}; without moments
        before the first update.

        What lies on NVMe is read for the time of the context. With `write` the moments are created
        where there are none, and what the caller puts into the tensors is kept; call
        `finish_writing` after the last one. Without `moments` only the weight is given, which every
        optimizer has.

        Raises:
            TrainingError: DeepSpeed keeps states that are not found.
        """
        swapped = self.stage3 and self.wrapper._swappable_optimizer_subgroup(shard.group)
        if swapped:
            self.wrapper._optimizer_states_and_gradient_swap_in(shard.group)
        state = (
            self.base.state[shard.key]
            if moments and (shard.key in self.base.state or write)
            else {}
        )
        # torch's AdamW has none for a parameter that never got a gradient. DeepSpeed's masters are
        # updated together.
        if moments and not write and not state and self.wrapper is not None and self.adam_step > 0:
            raise TrainingError(
                "A part of the optimizer's states lies where checkpoints do not find it: use --no_save."
            )
        if write:
            for moment in MOMENTS:
                if moment not in state or state[moment].numel() != shard.key.numel():
                    state[moment] = torch.zeros_like(shard.key.data)
        tensors = {
            "weight": shard.key.data,
            **{moment: state[moment] for moment in MOMENTS if moment in state},
        }
        yield {name: local_part(tensor).view(-1) for name, tensor in tensors.items()}
        if write and self.stage3:
            self.wrapper._reassign_or_swap_out_partitioned_parameters(
                shard.group
            )  # the working copy follows the master
        if swapped and write:
            self.wrapper._optimizer_states_and_gradient_swap_out(shard.group)
        elif swapped:
            self.wrapper._release_swap_buffers(shard.group)

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every fp32 weight in turn, put together from the ranks: (name, tensor on rank 0 and None
        on the others).

        All ranks call it together. There is one whole weight at a time.
        """
        is_main = dist.get_rank() == 0
        for shard in self.shards:
            with self.open(shard, moments=False) as held:
                for name in shard.names:
                    if self.replicated:
                        yield name, held["weight"].view(self.shapes[name]) if is_main else None
                        continue
                    flat = torch.zeros(math.prod(self.shapes[name]), device=self.device)
                    for piece in (
                        piece for piece in shard.pieces if piece.name == name and not self.is_copy
                    ):
                        part = held["weight"][piece.offset : piece.offset + piece.numel]
                        flat[piece.start : piece.start + piece.numel].copy_(part)
                    dist.reduce(flat, dst=0)  # every element is on one rank, and 0 on the others
                    yield name, flat.view(self.shapes[name]) if is_main else None

    @property
    def adam_step(self) -> int:
        """Updates that Adam has made; its bias correction depends on it."""
        return int(
            next((state["step"] for state in self.base.state.values() if "step" in state), 0)
        )

    def set_adam_step(self, step: int) -> None:
        """Set it for every master."""
        on_device = self.base.defaults.get("fused") or self.base.defaults.get("capturable")
        own = hasattr(self.base, "ds_opt_adam")  # DeepSpeed's for the CPU counts in a plain number
        for shard in self.shards:
            device = local_part(shard.key).device if on_device else "cpu"
            self.base.state[shard.key]["step"] = (
                step if own else torch.tensor(float(step), device=device)
            )
        if own:
            replay_bias_correction(self.base, step)

    def finish_writing(self) -> None:
        """Bring the working copies of DeepSpeed's parameters, which other ranks need, to the
        masters' values.
        """
        if self.wrapper is None:
            return
        if not self.stage3:
            self.wrapper.update_lp_params()
            self.wrapper._hp_optimizer_states_linked = False
        elif self.wrapper.persistent_parameters:
            self.wrapper.persistent_parameters[0].partition(self.wrapper.persistent_parameters)
            self.wrapper.persistent_parameters[0].all_gather(self.wrapper.persistent_parameters)


def replay_bias_correction(cpu_adam, step: int) -> None:
    """Bring the inside of DeepSpeed's CPU Adam to where `step` updates bring it.

    Its C++ part keeps β₁ᵗ and β₂ᵗ as running products in fp32. Started at t it would compute powers
    instead, which differ in the last bit: so the products are made again, with updates of a single
    number at learning rate
        0. Once they are too small
    to change 1 - βᵗ in fp32, powers do as well, and neither a long run nor a checkpoint that claims
    10¹² steps takes longer.
    """
    group, tensors = cpu_adam.param_groups[0], [torch.zeros(1) for _ in range(4)]
    slower = max(*group["betas"], 0.5)
    matter = min(step, math.ceil(math.log(2**-26) / math.log(slower)))
    for t in (*range(1, matter + 1), *([step] if step > matter else [])):
        cpu_adam.ds_opt_adam.adam_update(
            cpu_adam.opt_id,
            t,
            0.0,
            *group["betas"],
            group["eps"],
            0.0,
            group["bias_correction"],
            *tensors,
        )


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that FSDP shards; any other tensor itself."""
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def base_optimizer(optimizer) -> torch.optim.Optimizer:
    """The optimizer inside DeepSpeed's wrapper; one that is not wrapped itself."""
    return getattr(optimizer, "optimizer", optimizer)


def _local_range(parameter: torch.Tensor) -> tuple[int, int]:
    """First element and number of elements of this rank's part; FSDP cuts whole rows (dimension 0)."""
    if not _is_dtensor(parameter):
        return 0, parameter.numel()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    row = parameter.numel() // max(1, parameter.shape[0])
    return (offset[0] if offset else 0) * row, parameter.to_local().numel()
