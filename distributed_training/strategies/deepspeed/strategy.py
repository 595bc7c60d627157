"""zero1, zero2, zero3, offload and infinity: ZeRO by DeepSpeed, whose engine trains."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distributed_training.files.json_types import lookup
from distributed_training.optimizers import FLAT
from distributed_training.strategies.strategy import Flags, Resolved, Strategy
from distributed_training.units import MB

if TYPE_CHECKING:
    import torch
    from torch import nn

    from distributed_training.strategies.live_states import LiveStates
    from distributed_training.strategies.optimizer_shards import ShardedState
    from distributed_training.workload.activations import Term
    from distributed_training.workload.workload import Workload


OF_SMALL_PARAMETERS = "zero_optimization.stage3_param_persistence_threshold"


@dataclass(frozen=True)
class DeepSpeed(Strategy):
    """A ZeRO stage of DeepSpeed, and where its states are kept.

    A user's own file may keep them in other places than the table: `resolve` reads it.
    """

    engine = "deepspeed"
    packages = ("deepspeed",)
    layout = FLAT
    autocast_precisions = frozenset()  # DeepSpeed's engine converts the weights
    library_bytes = 70 * MB  # measured with 0.19, see tools/benchmarks/RESULTS.md

    stage: int = 0  # of ZeRO: 1, 2 or 3
    config_file: str = ""  # this project's configuration, in its folder
    # Where these states are kept: "device", "host" or "nvme".
    optimizer_on: str = "device"
    parameters_on: str = "device"
    # The file merged with the flags, in which some values are "auto" until `complete_config`; None
    # for a row of the table.
    config: dict[str, Any] | None = field(default=None, hash=False)
    own_file: str | None = None  # --ds_config
    nvme_path: str | None = None  # --nvme_path

    @property
    def offloads(self) -> bool:
        """See the base class."""
        return self.optimizer_on != "device"

    @property
    def needs_nvme(self) -> bool:
        """See the base class."""
        return "nvme" in (self.optimizer_on, self.parameters_on)

    @property
    def is_standard(self) -> bool:
        """See the base class."""
        return self.own_file is None

    @property
    def gathers_blocks(self) -> bool:
        """Whether stage 3 gathers the parameters of a whole transformer block at once.

        From NVMe it reads one layer after the other. A user's own file asks for blocks as this
        project's file does: norms and biases, which come with their block, do not stay whole on
        each rank.
        """
        if self.stage != 3 or self.parameters_on != "device":
            return False
        return self.own_file is None or lookup(self.config, OF_SMALL_PARAMETERS) == 0

    @property
    def gathers_single_layers(self) -> bool:
        """See the base class."""
        return self.stage == 3 and not self.gathers_blocks

    @property
    def replaces_linear(self) -> bool:
        """See the base class."""
        return self.stage == 3

    @property
    def nvme_folder(self) -> str | None:
        """See the base class; of a complete configuration."""
        from distributed_training.strategies.deepspeed import options

        return options.nvme_folder(self.config)

    @property
    def updates_on(self) -> str:
        """See the base class."""
        return self.optimizer_on

    def on_ranks(self, world_size: int) -> DeepSpeed:
        """See the base class: stage 2 has no hooks, and on one rank it needs less memory."""
        if world_size > 1 or not self.gathers_blocks:
            return self
        config = dict(self.config or {})
        # overlap_comm, which stage 3 needs on one rank, would synchronize the device under stage 2.
        changed = {"stage": 2, "overlap_comm": "auto"}
        config["zero_optimization"] = {**config.get("zero_optimization", {}), **changed}
        return replace(self, stage=2, sharded=self.sharded - {"parameters"}, config=config)

    def resolve(self, flags: Flags) -> Resolved:
        """See the base class."""
        from distributed_training.strategies.deepspeed import options

        merged = options.read_and_merge(flags, self.config_file)
        optimizer_on, parameters_on = merged.places()
        strategy = replace(
            self,
            optimizer_on=optimizer_on,
            parameters_on=parameters_on,
            config=merged.config,
            own_file=flags.values["ds_config"],
            nvme_path=merged.value("nvme_path"),
            reduce_dtype=merged.value("reduce_dtype") or self.reduce_dtype,
        )
        used = frozenset(["ds_config", *(["nvme_path"] if strategy.needs_nvme else [])])
        return Resolved(strategy, merged.values, merged.sources(), used=used)

    def with_micro_batches(self, batch_size: int, accumulation: int) -> DeepSpeed:
        """See the base class."""
        sizes = {"train_micro_batch_size_per_gpu": batch_size}
        sizes["gradient_accumulation_steps"] = accumulation
        return replace(self, config={**(self.config or {}), **sizes})

    def check_options(self, verbose: bool) -> None:
        """See the base class."""
        from distributed_training.strategies.deepspeed import options

        if self.own_file and self.config:
            options.check_with_deepspeed(self.own_file, self.config, verbose)

    def check_requirements(self, accumulation: int) -> None:
        """See the base class."""
        from distributed_training.strategies.deepspeed import requirements

        requirements.check_requirements(self.stage, self.offloads, self.needed_ops(), accumulation)

    def needed_ops(self) -> list[str]:
        """See the base class."""
        from distributed_training.strategies.deepspeed import ops

        return ops.needed_ops(self.offloads, self.needs_nvme)

    def missing_ops(self) -> list[str]:
        """See the base class."""
        from distributed_training.strategies.deepspeed import ops

        return [op for op in self.needed_ops() if not ops.is_compiled(op)]

    def group_options(self, backend: str, device: torch.device, world_size: int) -> dict[str, Any]:
        """See the base class."""
        from distributed_training.strategies.deepspeed import requirements

        # DeepSpeed clones the group of all ranks. NCCL then splits its communicator instead of
        # creating another one, if the group is bound to a device.
        if backend == "nccl" and world_size > 1 and requirements.torch_binds_groups():
            return {"backend": "nccl", "device_id": device}
        return super().group_options(backend, device, world_size)

    def memory_terms(self, work: Workload) -> tuple[list[Term], int]:
        """See the base class."""
        from distributed_training.strategies.deepspeed import memory

        if self.stage == 3:
            return memory.terms_of_stage3(work, self.needs_nvme)
        return memory.terms_of_stages12(work, self.stage, self.offloads)

    def states_of(self, model: nn.Module, optimizer: object, device: torch.device) -> ShardedState:
        """See the base class."""
        from distributed_training.strategies.deepspeed.states import Zero3State, Zero12State

        return (Zero3State if self.stage == 3 else Zero12State)(model, optimizer, device)

    def live_states(self, model: nn.Module, optimizer: object) -> LiveStates:
        """See the base class."""
        from distributed_training.strategies.deepspeed import live_states

        return live_states.zero_states(model, optimizer)

    def gathered_bytes(self, model: nn.Module) -> int:
        """See the base class."""
        from distributed_training.strategies.deepspeed import live_states

        return live_states.gathered_bytes(model)

    def gathers(self, module: nn.Module) -> bool:
        """See the base class: stage 3 gathers the parameters of a block or layer in its hook."""
        if self.stage != 3:
            return False
        from deepspeed.utils import z3_leaf_module

        own = module.parameters(recurse=False)
        return z3_leaf_module(module) or any(
            not hasattr(parameter, "ds_z3_leaf_module") for parameter in own
        )

    def mark_blocks(self, model: nn.Module) -> None:
        """Let stage 3 gather the parameters of a block at once, see `gathers_blocks`.

        Args:
            model: before DeepSpeed partitions it.
        """
        from distributed_training.strategies.deepspeed.blocks import gather_whole_blocks

        if self.gathers_blocks:
            gather_whole_blocks(model)

    def free_gathered(self, model: nn.Module) -> None:
        """See the base class.

        Args:
            model: DeepSpeed's engine.
        """
        model.empty_partition_cache()
