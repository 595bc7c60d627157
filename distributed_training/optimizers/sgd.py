"""--optim sgd: no momentum, so no states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_training.optimizers.optimizer import Hyperparameters, Optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn


class SGD(Optimizer):
    """torch.optim.SGD without momentum."""

    name = family = "sgd"
    lr = 0.1

    def why_not(self, layout: str, updates_on: str) -> str | None:
        """See the base class."""
        return "DeepSpeed reads Adam's moments from NVMe" if updates_on == "nvme" else None

    def create(
        self, groups: list[dict], model: nn.Module, options: Hyperparameters
    ) -> torch.optim.Optimizer:
        """See the base class."""
        import torch

        from distributed_training.model_parts import is_dtensor

        # The fused kernel does not support FSDP2's sharded tensors.
        is_sharded = any(is_dtensor(p) for group in groups for p in group["params"])
        return torch.optim.SGD(groups, lr=options.lr, fused=not is_sharded)

    def is_class_of(self, base: object) -> bool:
        """See the base class."""
        import torch

        return isinstance(base, torch.optim.SGD) and not any(
            group["momentum"] for group in base.param_groups
        )
