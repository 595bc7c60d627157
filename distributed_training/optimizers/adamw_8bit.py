"""--optim adamw_8bit: AdamW's moments in 8 bits, by bitsandbytes.

An fp32 scale for each block of 256 elements (Dettmers et al., arXiv 2110.02861).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_training.optimizers import ROWS
from distributed_training.optimizers.optimizer import (
    MOMENTS,
    Hyperparameters,
    Optimizer,
    Tensors,
    Trained,
    betas_of,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


class AdamW8bit(Optimizer):
    """bitsandbytes.optim.AdamW8bit, whose moments are saved in fp32."""

    name, family = "adamw_8bit", "adamw"
    package = "bitsandbytes"
    has_moments = True

    def why_not(self, layout: str, updates_on: str) -> str | None:
        """See the base class."""
        if layout == ROWS:
            return "bitsandbytes does not support FSDP2's sharded tensors"
        if updates_on != "device":
            return "the states are updated on the CPU, where DeepSpeed has its own AdamW"
        return None

    def create(
        self, groups: list[dict], model: nn.Module, options: Hyperparameters
    ) -> torch.optim.Optimizer:
        """See the base class."""
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, lr=options.lr, betas=betas_of(options), eps=options.adam_epsilon)

    def state_bytes(self, sizes: list[int], work: Trained) -> int:
        """See the base class: fp32 below 4,096 elements."""
        return sum(8 * n if n < 4096 else 2 * n + 2 * 4 * -(-n // 256) for n in sizes)

    def saved_bytes(self, sizes: list[int], work: Trained) -> int:
        """See the base class."""
        return 12 * sum(sizes)

    def temporary_bytes(self, elements: int, work: Trained) -> int:
        """See the base class: on a CPU five fp32 tensors, on CUDA none."""
        return 20 * elements if work.on_cpu else 0

    def is_class_of(self, base: object) -> bool:
        """See the base class."""
        return type(base).__name__ == "AdamW8bit"

    def moments_of(self, base: torch.optim.Optimizer, key: torch.Tensor) -> tuple[str, ...]:
        """See the base class."""
        return MOMENTS

    def load(self, base: torch.optim.Optimizer, key: torch.Tensor, create: bool) -> Tensors:
        """See the base class."""
        from distributed_training.optimizers import moments_8bit

        return moments_8bit.load(base, key, create)

    def store(self, base: torch.optim.Optimizer, key: torch.Tensor, tensors: Tensors) -> None:
        """See the base class."""
        from distributed_training.optimizers import moments_8bit

        moments_8bit.store(tensors, base.state[key])

    def set_step(self, base: torch.optim.Optimizer, key: torch.Tensor, step: int) -> None:
        """See the base class."""
        base.state[key]["step"] = step
