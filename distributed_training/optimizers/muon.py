"""--optim muon: Muon for the matrices of the transformer blocks, AdamW for all other parameters.

One fp32 average of the gradients for the matrices, AdamW's two moments for the rest (Liu et al.,
arXiv 2502.16982). muon_and_adamw.py has the updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_training.errors import UserError
from distributed_training.optimizers import WHOLE
from distributed_training.optimizers.adamw import AdamW
from distributed_training.optimizers.optimizer import MOMENTUM, Hyperparameters, Trained, betas_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from distributed_training.model_parts import Piece

DECAY = 0.95  # of the momentum, an average of the gradients


class Muon(AdamW):
    """Muon and AdamW as one optimizer, with one --lr."""

    name = family = "muon"
    in_ds_config = False

    def why_not(self, layout: str, updates_on: str) -> str | None:
        """See the base class."""
        return "DeepSpeed reads Adam's moments from NVMe" if updates_on == "nvme" else None

    def why_not_unequal(self, layout: str) -> str | None:
        """See the base class; each element of a sharded weight is updated by one rank only."""
        if layout == WHOLE:
            return (
                "each computes whole updates, and GPUs that differ round them differently. Use "
                "fsdp, or leave --rank_shares out"
            )
        return None

    def create(
        self, groups: list[dict], model: nn.Module, options: Hyperparameters
    ) -> torch.optim.Optimizer:
        """See the base class."""
        from distributed_training.model_parts import transformer_blocks
        from distributed_training.optimizers import muon_and_adamw as updates

        groups = separate_matrices(groups, transformer_blocks(model))
        betas, epsilon = betas_of(options), options.adam_epsilon
        like = next(model.parameters())
        return updates.MuonAndAdamW(groups, options.lr, betas, epsilon, like)

    def summary(self, base: torch.optim.Optimizer) -> str:
        """See the base class."""
        matrices, rest = base.elements
        return f"Muon updates {matrices:,} parameters, AdamW {rest:,}"

    def place(
        self,
        base: torch.optim.Optimizer,
        master: torch.Tensor,
        parameters: dict[str, torch.Tensor],
        pieces: Iterable[list[Piece]],
    ) -> None:
        """See the base class."""
        from distributed_training.model_parts import full_shape

        if all(map(base.is_in_muon, parameters.values())):
            shapes = {name: full_shape(parameter) for name, parameter in parameters.items()}
            base.place(master, shapes, list(pieces))

    def state_bytes(self, sizes: list[int], work: Trained) -> int:
        """See the base class: of a shard the same part as of all parameters is in matrices."""
        return 8 * sum(sizes) - 4 * work.in_matrices * sum(sizes) // sum(work.trained)

    def groups_of_matrices(self, sizes: list[int], work: Trained) -> list[list[int]]:
        """See the base class; sizes that matrices of a block have, see `separate_matrices`."""
        in_blocks = {a * b for a, b in work.matrices_in_blocks}
        matrices = [size for size in sizes if size in in_blocks]
        return [matrices, [size for size in sizes if size not in in_blocks]]

    def temporary_bytes(self, elements: int, work: Trained) -> int:
        """See the base class.

        For a matrix of the blocks its momentum in fp32, which FSDP gathers, and then in the dtype
        of the iterations two matrices and two products of the smaller side; bf16 is converted to
        fp32.
        """
        item = 2 if work.has_bf16 else 4
        return max(
            4 * a * b + max(2 * item * (a * b + min(a, b) ** 2), (item + 4) * a * b)
            for a, b in work.matrices_in_blocks
        )

    def gathered_elements(self, work: Trained) -> int:
        """See the base class: the momentum of every matrix."""
        return work.in_matrices

    def is_class_of(self, base: object) -> bool:
        """See the base class."""
        return type(base).__name__ == "MuonAndAdamW"

    def moments_of(self, base: torch.optim.Optimizer, key: torch.Tensor) -> tuple[str, ...]:
        """See the base class."""
        return (MOMENTUM,) if base.is_in_muon(key) else super().moments_of(base, key)

    def set_step(self, base: torch.optim.Optimizer, key: torch.Tensor, step: int) -> None:
        """See the base class; Muon does not count its updates."""
        if not base.is_in_muon(key):
            super().set_step(base.adamw, key, step)

    def average_of(
        self, base: torch.optim.Optimizer, key: torch.Tensor
    ) -> tuple[str, float] | None:
        """See the base class."""
        return (MOMENTUM, DECAY) if base.is_in_muon(key) else super().average_of(base, key)


def separate_matrices(groups: list[dict], blocks: list[nn.Module]) -> list[dict]:
    """Return parameter groups for Muon, the first of which has the matrices that it updates.

    Args:
        groups: the matrices and embeddings, then the other groups.
        blocks: the transformer blocks. Embeddings and the output layer are outside of them.
    Raises:
        UserError: there is no such matrix, so that AdamW would update all parameters.
    """
    from distributed_training.model_parts import full_shape

    parameters = (parameter for block in blocks for parameter in block.parameters())
    in_blocks = {id(parameter) for parameter in parameters if len(full_shape(parameter)) == 2}
    first, *others = groups
    matrices = [p for p in first["params"] if id(p) in in_blocks]
    if not matrices:
        raise UserError(
            "--optim muon would update no parameter: it found no trained matrix in a transformer "
            "block of this model. Use --optim adamw."
        )
    rest = [p for p in first["params"] if id(p) not in in_blocks]
    muon, adamw = {**first, "params": matrices, "momentum": DECAY}, {**first, "params": rest}
    return [group for group in (muon, adamw, *others) if group["params"]]
