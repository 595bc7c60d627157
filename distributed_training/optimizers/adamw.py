"""--optim adamw: two fp32 moments (Loshchilov and Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_training.optimizers.optimizer import (
    MOMENTS,
    Hyperparameters,
    Optimizer,
    Trained,
    betas_of,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


class AdamW(Optimizer):
    """torch.optim.AdamW with its fused kernel, or DeepSpeed's own for offload and infinity."""

    name = family = "adamw"
    has_moments = in_ds_config = True

    def create(
        self, groups: list[dict], model: nn.Module, options: Hyperparameters
    ) -> torch.optim.Optimizer:
        """See the base class."""
        import torch

        return torch.optim.AdamW(
            groups, lr=options.lr, betas=betas_of(options), eps=options.adam_epsilon, fused=True
        )

    def state_bytes(self, sizes: list[int], work: Trained) -> int:
        """See the base class."""
        return 8 * sum(sizes)

    def is_class_of(self, base: object) -> bool:
        """See the base class."""
        import torch

        # DeepSpeed's AdamW on a CPU has another base class.
        is_torch = isinstance(base, torch.optim.Adam | torch.optim.AdamW)
        return is_torch or type(base).__name__ == "DeepSpeedCPUAdam"

    def moments_of(self, base: torch.optim.Optimizer, key: torch.Tensor) -> tuple[str, ...]:
        """See the base class."""
        return MOMENTS

    def set_step(self, base: torch.optim.Optimizer, key: torch.Tensor, step: int) -> None:
        """See the base class; the fused kernel reads it on the device."""
        import torch

        from distributed_training.model_parts import local_part

        on_device = base.defaults.get("fused") or base.defaults.get("capturable")
        device = local_part(key).device if on_device else "cpu"
        base.state[key]["step"] = torch.tensor(float(step), device=device)

    def average_of(
        self, base: torch.optim.Optimizer, key: torch.Tensor
    ) -> tuple[str, float] | None:
        """See the base class."""
        return MOMENTS[0], base.param_groups[-1]["betas"][0]  # the same for all parameters
