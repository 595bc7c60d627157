"""The layouts of DeepSpeed's masters, see `ShardedState`: stages 1 and 2, and stage 3."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

from distributed_training.errors import TrainingError
from distributed_training.model_parts import Piece
from distributed_training.strategies.optimizer_shards import Shard, ShardedState


class ZeroState(ShardedState):
    """What is the same in all stages."""

    def pieces_of(self, shard: Shard, rank: int) -> list[Piece]:
        """Return the elements in a rank's master of the same group, without DeepSpeed's padding."""
        raise NotImplementedError

    def place_masters(self) -> None:
        """See the base class."""
        for shard in self.shards:
            parameters = {name: self.trained[name] for name in shard.names}
            # Computed only if the optimizer reads them.
            pieces = map(partial(self.pieces_of, shard), range(dist.get_world_size()))
            self.optimizer.place(self.base, shard.key, parameters, pieces)

    def _moments(self, key: torch.Tensor, create: bool) -> dict[str, torch.Tensor]:
        moments = super()._moments(key, create)
        if not moments and self.adam_step > 0:  # DeepSpeed updates all masters together
            raise TrainingError("DeepSpeed's optimizer states were not found: use --no_save.")
        return moments

    def set_adam_step(self, step: int) -> None:
        """See the base class."""
        super().set_adam_step(step)
        if hasattr(self.base, "ds_opt_adam"):
            for shard in self.shards:
                self.base.state[shard.key]["step"] = step  # an int in DeepSpeed's AdamW for CPUs
            replay_bias_correction(self.base, step)


class Zero12State(ZeroState):
    """Stages 1 and 2: a master is this rank's partition of a parameter group."""

    def _find_shards(self) -> Iterator[Shard]:
        # In the order of the flat tensor. DeepSpeed's own mapping of its elements, `_hp_mapping`,
        # is of another order if the user's file has round_robin_gradients (release 0.19.8).
        for group, parameters in enumerate(self.wrapper.round_robin_bit16_groups):
            names = [self._name_of[id(parameter)] for parameter in parameters]
            master = self.wrapper.single_partition_of_fp32_groups[group]
            shard = Shard(master, names, [], group)
            yield shard._replace(pieces=self.pieces_of(shard, dist.get_rank()))

    def pieces_of(self, shard: Shard, rank: int) -> list[Piece]:
        """See the base class; all ranks' masters have the same size."""
        size, pieces = shard.key.numel(), []
        sizes = [math.prod(self.shapes[name]) for name in shard.names]
        starts = [end - numel for end, numel in zip(accumulate(sizes), sizes, strict=True)]
        if offsets := getattr(self.wrapper, "round_robin_bit16_offsets", None):
            starts = offsets[shard.group]  # recent releases may align the parameters
        for name, start, numel in zip(shard.names, starts, sizes, strict=True):
            first, last = max(start, rank * size), min(start + numel, (rank + 1) * size)
            if first < last:
                pieces.append(Piece(name, first - start, first - rank * size, last - first))
        return pieces

    def finish_writing(self) -> None:
        """See the base class."""
        self.wrapper.update_lp_params()
        self.wrapper._hp_optimizer_states_linked = False


class Zero3State(ZeroState):
    """Stage 3: a master is this rank's partition of a sub-group."""

    def _find_shards(self) -> Iterator[Shard]:
        for group, master in enumerate(self.wrapper.fp32_partitioned_groups_flat):
            names = [self._name_of[id(p)] for p in self.wrapper.fp16_groups[group]]
            shard = Shard(master, names, [], group)
            yield shard._replace(pieces=self.pieces_of(shard, dist.get_rank()))

    def pieces_of(self, shard: Shard, rank: int) -> list[Piece]:
        """See the base class."""
        pieces = []
        for name in shard.names:
            parameter = self.trained[name]
            _, offset, numel = self.wrapper.grad_position[self.wrapper.get_param_id(parameter)]
            start = rank * numel  # the same numel on every rank; the last ranks have padding
            if (real := min(numel, parameter.ds_numel - start)) > 0:
                pieces.append(Piece(name, start, offset, real))
        return pieces

    @property
    def on_disk(self) -> bool:
        """See the base class."""
        return any(map(self._is_on_disk, self.shards))

    def _is_on_disk(self, shard: Shard) -> bool:
        return self.wrapper._swappable_optimizer_subgroup(shard.group)

    @contextmanager
    def open(
        self, shard: Shard, write: bool = False, moments: bool = True
    ) -> Iterator[dict[str, torch.Tensor]]:
        """See the base class."""
        on_nvme, written = self._is_on_disk(shard), False
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


def replay_bias_correction(cpu_adam, step: int) -> None:
    """Set the internal state of DeepSpeed's CPU Adam to its value after `step` updates.

    Its C++ code keeps β₁ᵗ and β₂ᵗ as running products in fp32, which differ from powers in the last
    bit. They are computed again, with updates of a single element at learning rate 0. Once βᵗ is
    too small to change 1 - βᵗ in fp32, powers give the same result.
    """
    group, tensors = cpu_adam.param_groups[0], [torch.zeros(1) for _ in range(4)]
    betas, eps, correct = group["betas"], group["eps"], group["bias_correction"]
    replayed = min(step, math.ceil(math.log(2**-26) / math.log(max(*betas, 0.5))))
    for t in (*range(1, replayed + 1), *([step] if step > replayed else [])):
        # update(id, step, learning rate, betas, eps, weight decay, bias correction, four tensors)
        cpu_adam.ds_opt_adam.adam_update(
            cpu_adam.opt_id, t, 0.0, *betas, eps, 0.0, correct, *tensors
        )
