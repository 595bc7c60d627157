"""fsdp: every rank holds a shard of each parameter, of its gradient and of its states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distributed_training.optimizers import ROWS
from distributed_training.strategies.fsdp.options import FsdpOptions
from distributed_training.strategies.strategy import Flags, Resolved, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from distributed_training.strategies.optimizer_shards import ShardedState
    from distributed_training.workload.activations import Term
    from distributed_training.workload.workload import Workload


@dataclass(frozen=True)
class FSDP(Strategy):
    """A strategy of FSDP2."""

    engine = "fsdp"
    layout = ROWS
    autocast_precisions = frozenset(["fp16"])

    options: FsdpOptions = field(default_factory=FsdpOptions)  # --fsdp, --fsdp_config

    @property
    def updates_on(self) -> str:
        """See the base class."""
        return "host" if self.options.offload else "device"

    @property
    def supports_4bit(self) -> bool:
        """See the base class; FSDP shards the packed tensors."""
        return True

    @property
    def is_standard(self) -> bool:
        """See the base class."""
        # Flags of all strategies set these two as well.
        return replace(self.options, precision=None, reduce_dtype=None) == FsdpOptions()

    def resolve(self, flags: Flags) -> Resolved:
        """See the base class; NO_SHARD is --strategy dp."""
        from distributed_training.strategies.fsdp.read_options import notices, read_options

        super().resolve(flags)
        options, values, sources = read_options(flags)
        reduce_dtype = options.reduce_dtype or self.chosen_reduce_dtype(flags)
        strategy = replace(self, options=options, reduce_dtype=reduce_dtype)
        used = frozenset(["fsdp_config"])
        lines = notices(options, flags.values["fsdp_config"])
        return Resolved(strategy, values, sources, lines, used)

    def check_requirements(self, accumulation: int) -> None:
        """See the base class."""
        from distributed_training.strategies.fsdp.requirements import check_cpu_support

        check_cpu_support()

    def check_4bit(self) -> None:
        """See the base class."""
        from distributed_training.strategies.fsdp.requirements import check_integer_shards

        check_integer_shards()

    @property
    def torch_reduce_dtype(self) -> torch.dtype:
        """The dtype in which the ranks reduce gradients: --reduce_dtype, or fp32 without it."""
        import torch

        in_16_bits = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return in_16_bits.get(self.reduce_dtype or "fp32", torch.float32)

    def group_options(self, backend: str, device: torch.device, world_size: int) -> dict[str, Any]:
        """See the base class."""
        # With CPU offload FSDP reduces GradScaler's found_inf flag in host memory, which NCCL
        # cannot do. Gloo only then: it needs a network interface that all hosts reach by name.
        if backend == "nccl" and self.options.offload:
            return {"backend": "cpu:gloo,cuda:nccl"}
        return super().group_options(backend, device, world_size)

    def mixes_dtypes(self) -> bool:
        """See the base class; earlier versions of torch require one dtype in a module."""
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        return "trainable_params" in FSDPParamGroup._init_mp_dtypes.__code__.co_varnames

    def check_model(self, build: Callable[[], nn.Module]) -> None:
        """See the base class; --fsdp_config may name layers."""
        if self.options.layers:
            from distributed_training.strategies.fsdp.shards import check_layers

            check_layers(build(), self.options)

    def memory_terms(self, work: Workload) -> tuple[list[Term], int]:
        """See the base class."""
        from distributed_training.strategies.fsdp.memory import terms_of_fsdp

        return terms_of_fsdp(work)

    def states_of(self, model: nn.Module, optimizer: object, device: torch.device) -> ShardedState:
        """See the base class."""
        from distributed_training.strategies.fsdp.states import RowsState

        return RowsState(model, optimizer, device)

    def gathered_bytes(self, model: nn.Module) -> int:
        """See the base class."""
        from distributed_training.strategies.fsdp.states import gathered_bytes

        return gathered_bytes(model)

    def gathers(self, module: nn.Module) -> bool:
        """See the base class."""
        from torch.distributed.fsdp import FSDPModule

        return isinstance(module, FSDPModule)

    def free_gathered(self, model: nn.Module) -> None:
        """See the base class."""
        from distributed_training.strategies.fsdp.states import free_gathered

        free_gathered(model)
