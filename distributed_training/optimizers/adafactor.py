"""--optim adafactor: the mean squares of the rows and columns of each matrix.

Shazeer and Stern, arXiv 1804.04235. Its states belong to whole parameters, so only dp has them, and
every rank has all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_training.optimizers import FLAT, ROWS
from distributed_training.optimizers.optimizer import Hyperparameters, Optimizer, Tensors, Trained

if TYPE_CHECKING:
    import torch
    from torch import nn


class Adafactor(Optimizer):
    """transformers' Adafactor, as Trainer configures it."""

    name = family = "adafactor"

    def why_not(self, layout: str, updates_on: str) -> str | None:
        """See the base class."""
        if layout == FLAT:
            return "DeepSpeed flattens the weights, and Adafactor needs rows and columns"
        if layout == ROWS:
            return "FSDP shards the rows, and Adafactor needs whole columns"
        return None

    def create(
        self, groups: list[dict], model: nn.Module, options: Hyperparameters
    ) -> torch.optim.Optimizer:
        """See the base class; --lr is the step size, as with the other optimizers."""
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=options.lr, scale_parameter=False, relative_step=False)

    def state_bytes(self, sizes: list[int], work: Trained) -> int:
        """See the base class."""
        return 4 * work.rows_and_columns

    def temporary_bytes(self, elements: int, work: Trained) -> int:
        """See the base class: two fp32 tensors."""
        return 8 * elements

    def is_class_of(self, base: object) -> bool:
        """See the base class."""
        return type(base).__name__ == "Adafactor"

    def set_step(self, base: torch.optim.Optimizer, key: torch.Tensor, step: int) -> None:
        """See the base class; a key without states gets all of them in its first update."""
        if base.state.get(key):
            base.state[key]["step"] = step

    def whole_states(self, base: torch.optim.Optimizer, keys: Tensors) -> Tensors:
        """See the base class."""
        return {
            f"{name}/{kind}": value
            for name, key in keys.items()
            for kind, value in base.state.get(key, {}).items()
            if kind.startswith("exp_avg_sq")
        }

    def set_whole_states(self, base: torch.optim.Optimizer, keys: Tensors, saved: Tensors) -> None:
        """See the base class."""
        for name, value in saved.items():
            parameter, _, kind = name.rpartition("/")
            states = base.state[keys[parameter]]
            states[kind] = value.float().to(keys[parameter].device)
            states.setdefault("RMS", 0)
