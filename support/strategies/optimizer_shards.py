"""Locations of each parameter's fp32 weight and optimizer states on this rank, for every strategy.

Every optimizer updates flat fp32 tensors ("masters"). A piece maps a range of elements of a
parameter to its offset in a master. There is one class for each layout of the masters:

    PlainState    dp: the parameters themselves; fsdp: this rank's shard of each parameter
    Zero12State   DeepSpeed's stages 1 and 2: one partition per parameter group
    Zero3State    DeepSpeed's stage 3: one partition per sub-group; infinity keeps them on NVMe

AdamW's moments have an element for each of the master's; 8-bit moments are converted to fp32 and
back. Adafactor's states are rows and columns of whole parameters; only dp has them, on every rank.
SGD without momentum has no states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from support.errors import TrainingError
from support.train_state import (
    base_optimizer,
    full_shape,
    is_dtensor,
    is_fsdp_module,
    local_part,
    unwrapped,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


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
    """Return the family of an optimizer (support/optimizers.py); None: not supported."""
    base = base_optimizer(optimizer)
    if isinstance(base, torch.optim.Adam | torch.optim.AdamW) or hasattr(base, "ds_opt_adam"):
        return "adamw"
    if isinstance(base, torch.optim.SGD):
        return None if any(group["momentum"] for group in base.param_groups) else "sgd"
    return {"AdamW8bit": "adamw", "Adafactor": "adafactor"}.get(type(base).__name__)


def sharded_state(model: nn.Module, optimizer, device: torch.device) -> ShardedState:
    """Return the state of the layout that a strategy uses.

    Args:
        model: without the wrapper of DDP or DeepSpeed.
        optimizer: as the strategy created it; for DeepSpeed its wrapper.
        device: of the tensors that ranks exchange.
    """
    if not hasattr(optimizer, "optimizer"):
        return PlainState(model, optimizer, device)
    is_stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    return (Zero3State if is_stage3 else Zero12State)(model, optimizer, device)


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
        """Yield the flat tensors of one shard: {"weight", "exp_avg", "exp_avg_sq"}.

        The moments are missing before the first update. A shard on NVMe is in memory only inside.

        Args:
            write: create missing moments, and keep what the caller writes to the tensors. Call
                `finish_writing` after the last shard.
            moments: False yields only the weight, which every optimizer has.
        """
        tensors = {"weight": shard.key.data}
        if moments and self.family == "adamw":
            tensors |= self._moments(shard, create=write)
        yield {name: local_part(tensor).view(-1) for name, tensor in tensors.items()}
        if write and self.is_8bit and moments:
            quantize(tensors, self.base.state[shard.key])

    def _moments(self, shard: Shard, create: bool) -> dict[str, torch.Tensor]:
        """Return Adam's moments of a shard, as fp32 copies if they have 8 bits."""
        # A plain get: `state` is a defaultdict, and an empty entry would look like a state.
        state = self.base.state.get(shard.key, {})
        if create and self.is_8bit and not state:
            create_8bit_state(self.base, shard.key)
        for moment in MOMENTS if create and not self.is_8bit else ():
            if moment not in state or state[moment].numel() != shard.key.numel():
                self.base.state[shard.key][moment] = torch.zeros_like(shard.key.data)
        state = self.base.state.get(shard.key, {})
        # DeepSpeed updates all masters together, so a missing state is an error. PyTorch's AdamW
        # has no state for a parameter that never got a gradient.
        if not state and self.wrapper is not self.base and self.adam_step > 0:
            raise TrainingError(
                "Some of DeepSpeed's optimizer states were not found, so no checkpoint can be "
                "saved: use --no_save."
            )
        if self.is_8bit:
            return dequantize(state) if state else {}
        return {moment: state[moment] for moment in MOMENTS if moment in state}

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
        on_device = self.base.defaults.get("fused") or self.base.defaults.get("capturable")
        is_cpu_adam = hasattr(self.base, "ds_opt_adam")
        # DeepSpeed's CPU Adam, bitsandbytes and Adafactor store an int.
        as_int = is_cpu_adam or self.is_8bit or self.family == "adafactor"
        for shard in self.shards:
            if self.family == "adafactor" and not self.base.state.get(shard.key):
                continue  # it creates all states together
            device = local_part(shard.key).device if on_device else "cpu"
            self.base.state[shard.key]["step"] = (
                step if as_int else torch.tensor(float(step), device=device)
            )
        if is_cpu_adam:
            replay_bias_correction(self.base, step)


class PlainState(ShardedState):
    """dp and fsdp: a master is a parameter, or this rank's rows of it."""

    def _find_shards(self) -> Iterator[Shard]:
        mesh = getattr(next(iter(self.trained.values())), "device_mesh", None)  # FSDP's
        self.replicated = mesh is None
        # Under HYBRID_SHARD every node holds all pieces; those of the first node are used.
        self.is_copy = mesh is not None and mesh.ndim > 1 and mesh.get_local_rank(0) > 0
        for name, parameter in self.trained.items():
            start, numel = _local_range(parameter)
            yield Shard(parameter, [name], [Piece(name, start, 0, numel)] if numel else [])

    def adafactor_states(self) -> dict[str, torch.Tensor]:
        """Return Adafactor's states by "<parameter>/<state>"; {} for other optimizers."""
        return {
            f"{shard.names[0]}/{kind}": value
            for shard in (self.shards if self.family == "adafactor" else ())
            for kind, value in self.base.state.get(shard.key, {}).items()
            if kind.startswith("exp_avg_sq")
        }

    def load_adafactor_states(self, saved: dict[str, torch.Tensor]) -> None:
        """Set the states of Adafactor; a parameter without saved states gets new ones."""
        keys = {shard.names[0]: shard.key for shard in self.shards}
        for name, value in saved.items():
            parameter, _, kind = name.rpartition("/")
            state = self.base.state[keys[parameter]]
            state[kind] = value.float().to(keys[parameter].device)
            state.setdefault("RMS", 0)


class Zero12State(ShardedState):
    """Stages 1 and 2: a master is this rank's partition of a parameter group."""

    def _find_shards(self) -> Iterator[Shard]:
        for group, parameters in enumerate(self.wrapper.bit16_groups):
            names, pieces = [self._name_of[id(p)] for p in parameters], []
            for name, parameter in zip(names, parameters, strict=True):
                if (mapping := parameter._hp_mapping) is not None:
                    part, place = mapping.lp_fragment_address, mapping.hp_fragment_address
                    pieces.append(Piece(name, part.start, place.start, part.numel))
            yield Shard(self.wrapper.single_partition_of_fp32_groups[group], names, pieces, group)

    def finish_writing(self) -> None:
        """See the base class."""
        self.wrapper.update_lp_params()
        self.wrapper._hp_optimizer_states_linked = False


class Zero3State(ShardedState):
    """Stage 3: a master is this rank's partition of a sub-group."""

    def _find_shards(self) -> Iterator[Shard]:
        rank = dist.get_rank()
        for group, master in enumerate(self.wrapper.fp32_partitioned_groups_flat):
            parameters = self.wrapper.fp16_groups[group]
            names, pieces = [self._name_of[id(p)] for p in parameters], []
            for name, parameter in zip(names, parameters, strict=True):
                _, offset, numel = self.wrapper.grad_position[self.wrapper.get_param_id(parameter)]
                start = rank * numel  # the same numel on every rank; the last ranks have padding
                if (real := min(numel, parameter.ds_numel - start)) > 0:
                    pieces.append(Piece(name, start, offset, real))
            yield Shard(master, names, pieces, group)

    @contextmanager
    def open(
        self, shard: Shard, write: bool = False, moments: bool = True
    ) -> Iterator[dict[str, torch.Tensor]]:
        """See the base class."""
        on_nvme, written = self.wrapper._swappable_optimizer_subgroup(shard.group), False
        if on_nvme:
            self.wrapper._optimizer_states_and_gradient_swap_in(shard.group)
        try:
            with super().open(shard, write, moments) as tensors:
                yield tensors
            if write:  # update the working copy
                self.wrapper._reassign_or_swap_out_partitioned_parameters(shard.group)
            written = write
        finally:
            if on_nvme and written:
                self.wrapper._optimizer_states_and_gradient_swap_out(shard.group)
            elif on_nvme:
                self.wrapper._release_swap_buffers(shard.group)

    def finish_writing(self) -> None:
        """See the base class."""
        if persistent := self.wrapper.persistent_parameters:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


# bitsandbytes' names of Adam's moments in 8 bits: the codes, their values, and the scale of each
# block of BLOCK_8BIT elements. Small parameters have fp32 moments under the name of the codes.
NAMES_8BIT = {
    "exp_avg": ("state1", "qmap1", "absmax1"),
    "exp_avg_sq": ("state2", "qmap2", "absmax2"),
}
BLOCK_8BIT = 256
PART_8BIT = 2**16 * BLOCK_8BIT  # elements that are converted at a time


def create_8bit_state(optimizer: Any, key: torch.Tensor) -> None:
    """Create the state of a master with moments of 0, as the first update of bitsandbytes does."""
    group = optimizer.param_groups[0]
    params, group["params"] = group["params"], [key]  # stage 3's groups are empty between steps
    try:
        optimizer.init_state(group, key, 0, 0)
    finally:
        group["params"] = params


def _parts_8bit(numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive parts of a tensor, each as its elements and its blocks of 8-bit codes."""
    for start in range(0, numel, PART_8BIT):
        stop = min(start + PART_8BIT, numel)
        yield slice(start, stop), slice(start // BLOCK_8BIT, -(-stop // BLOCK_8BIT))


def dequantize(state: dict) -> dict[str, torch.Tensor]:
    """Return the moments in fp32, in host memory if they are copies."""
    from bitsandbytes.functional import dequantize_blockwise

    moments = {}
    for moment, (codes, values, scale) in NAMES_8BIT.items():
        flat = moments[moment] = state[codes]
        if flat.dtype != torch.uint8:
            continue
        moments[moment] = torch.empty(flat.numel())
        for part, blocks in _parts_8bit(flat.numel()):
            moments[moment][part] = dequantize_blockwise(
                flat.view(-1)[part], absmax=state[scale][blocks], code=state[values], blocksize=256
            )
    return moments


def quantize(moments: dict[str, torch.Tensor], state: dict) -> None:
    """Write moments in fp32 to the state of a master; `dequantize` is its inverse.

    bitsandbytes' own function takes the largest magnitude as the scale. Its signed codes go from
    -0.993 to 1, so a block with a negative extreme would shrink in each conversion.
    """
    for moment, (codes, values, scale) in NAMES_8BIT.items():
        if state[codes].dtype != torch.uint8:
            continue
        whole, table = moments[moment].flatten(), state[values]
        for part, blocks in _parts_8bit(len(whole)):
            flat = whole[part].to(table.device)
            rows = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK_8BIT)).view(-1, BLOCK_8BIT)
            scales = rows.amax(1) / table[-1]
            if table[0] < 0:
                scales = torch.maximum(scales, rows.amin(1) / table[0])
            scaled = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
            found = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True)
            state[codes].view(-1)[part] = found.view(-1)[: len(flat)].to(torch.uint8)
            state[scale][blocks] = scales


def replay_bias_correction(cpu_adam, step: int) -> None:
    """Set the internal state of DeepSpeed's CPU Adam to its value after `step` updates.

    Its C++ code keeps β₁ᵗ and β₂ᵗ as running products in fp32, which differ from powers in the last
    bit. They are computed again, with updates of a single element at learning rate 0. Once βᵗ is
    too small to change 1 - βᵗ in fp32, powers give the same result.
    """
    group, tensors = cpu_adam.param_groups[0], [torch.zeros(1) for _ in range(4)]
    slower = max(*group["betas"], 0.5)
    replayed = min(step, math.ceil(math.log(2**-26) / math.log(slower)))
    for t in (*range(1, replayed + 1), *([step] if step > replayed else [])):
        betas, eps, correct = group["betas"], group["eps"], group["bias_correction"]
        # update(id, step, learning rate, betas, eps, weight decay, bias correction, four tensors)
        cpu_adam.ds_opt_adam.adam_update(
            cpu_adam.opt_id, t, 0.0, *betas, eps, 0.0, correct, *tensors
        )


def free_gathered_weights(model: nn.Module) -> None:
    """Free the full weights that FSDP and ZeRO-3 keep after an evaluation."""
    for module in unwrapped(model).modules():
        if is_fsdp_module(module):
            module.reshard()
    if hasattr(model, "empty_partition_cache"):  # DeepSpeed's engine
        model.empty_partition_cache()


def _local_range(parameter: torch.Tensor) -> tuple[int, int]:
    """Return index of the first element and number of elements of this rank's shard."""
    if not is_dtensor(parameter):
        return 0, parameter.numel()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    row = parameter.numel() // max(1, parameter.shape[0])
    return (offset[0] if offset else 0) * row, local_part(parameter).numel()
