"""Optimizer: what a run, a plan and a checkpoint ask an optimizer of --optim.

A subclass is one optimizer, in its own file. Before the first update nothing of it imports PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from distributed_training.model_parts import Piece

Tensors = dict[str, "torch.Tensor"]
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam
MOMENTUM = "momentum_buffer"  # of Muon


class Hyperparameters(Protocol):
    """The settings of an optimizer; the weight decay is that of each parameter group."""

    @property
    def lr(self) -> float:
        """The learning rate."""

    @property
    def adam_beta1(self) -> float:
        """Decay of AdamW's first moment."""

    @property
    def adam_beta2(self) -> float:
        """Decay of AdamW's second moment."""

    @property
    def adam_epsilon(self) -> float:
        """AdamW's epsilon."""


def betas_of(options: Hyperparameters) -> tuple[float, float]:
    """Return the decays of AdamW's moments."""
    return options.adam_beta1, options.adam_beta2


class Trained(Protocol):
    """What the memory of the states depends on; a Workload has it."""

    @property
    def trained(self) -> list[int]:
        """Elements of each trained parameter."""

    @property
    def matrices_in_blocks(self) -> list[tuple[int, int]]:
        """Rows and columns of each trained matrix of a transformer block."""

    @property
    def in_matrices(self) -> int:
        """Elements of these matrices in all blocks."""

    @property
    def rows_and_columns(self) -> int:
        """Rows and columns of all trained matrices, and elements of the other parameters."""

    @property
    def on_cpu(self) -> bool:
        """Whether the device is a CPU."""

    @property
    def has_bf16(self) -> bool:
        """Whether the device has instructions for bf16."""


class Optimizer:
    """An optimizer, whose states are in addition to the fp32 weight.

    Tensors of a checkpoint are flat and in fp32. A `key` is the tensor with the states in `base`,
    the optimizer of PyTorch: a parameter, a shard of it, or DeepSpeed's partition of several.
    """

    name: ClassVar[str] = ""  # of --optim
    # Optimizers of one family can resume each other's checkpoints. None: not one of --optim, such
    # as one of a user's DeepSpeed file; a run with it cannot save.
    family: ClassVar[str | None] = None
    package: ClassVar[str | None] = None  # the package that it needs, besides the required ones
    lr: ClassVar[float | None] = None  # default learning rate; None: the default of --lr
    has_moments: ClassVar[bool] = False  # whether `moments_of` has names
    # Whether DeepSpeed creates it from its configuration. Else the script does, for every strategy.
    in_ds_config: ClassVar[bool] = False

    def why_not(self, layout: str, updates_on: str) -> str | None:
        """Return why it does not work under a strategy; None if it does.

        Args:
            layout: WHOLE, ROWS or FLAT.
            updates_on: where the strategy keeps the states: "device", "host" or "nvme".
        """
        return None

    def why_not_unequal(self, layout: str) -> str | None:
        """Return why it does not work on GPUs that differ (--rank_shares); None if it does."""
        return None

    def create(
        self, groups: list[dict], model: nn.Module, options: Hyperparameters
    ) -> torch.optim.Optimizer:
        """Create it.

        Args:
            groups: parameter groups with their weight decay: the matrices and embeddings first.
            model: that has these parameters.
        """
        raise NotImplementedError

    def summary(self, base: torch.optim.Optimizer) -> str | None:
        """Return a line about which parameters it updates, for the output of a run."""
        return None

    def place(
        self,
        base: torch.optim.Optimizer,
        master: torch.Tensor,
        parameters: dict[str, torch.Tensor],
        pieces: Iterable[list[Piece]],
    ) -> None:
        """Tell the optimizer which elements of the parameters are in a flat master (FLAT).

        Args:
            parameters: those of the master's group, by name.
            pieces: for each rank the elements in its master.
        """

    # ------------------------------------------------------------------------------ memory estimate

    def state_bytes(self, sizes: list[int], work: Trained) -> int:
        """Return the bytes of its states, without the fp32 weights.

        Args:
            sizes: elements of each tensor that it updates: parameters, or shards.
        """
        return 0

    def saved_bytes(self, sizes: list[int], work: Trained) -> int:
        """Return the bytes of the weights and states in a checkpoint, in fp32; see `state_bytes`.

        Without the few `whole_states`.
        """
        return 4 * sum(sizes) + (self.state_bytes(sizes, work) if self.has_moments else 0)

    def groups_of_matrices(self, sizes: list[int], work: Trained) -> list[list[int]]:
        """Return the elements of the matrices in each parameter group that `create` has for them.

        Args:
            sizes: elements of each matrix and embedding.
        """
        return [sizes]

    def temporary_bytes(self, elements: int, work: Trained) -> int:
        """Return the temporary bytes while it updates its largest tensor, of `elements`."""
        return 0

    def gathered_elements(self, work: Trained) -> int:
        """Return the fp32 elements that the ranks of a strategy with shards gather in an update.

        FSDP gathers them on every rank, ZeRO-3 each of them on one rank.
        """
        return 0

    # ------------------------------------------------------------------------ states in checkpoints

    def is_class_of(self, base: object) -> bool:
        """Return whether `base` is such an optimizer."""
        return False

    def moments_of(self, base: torch.optim.Optimizer, key: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the states that have an element for each of the key's."""
        return ()

    def load(self, base: torch.optim.Optimizer, key: torch.Tensor, create: bool) -> Tensors:
        """Return the states of `moments_of` in fp32; without `create` only those that exist.

        Args:
            create: create missing states of 0, as the first update does.
        """
        names = self.moments_of(base, key)
        if names and create:
            import torch

            state = base.state[key]
            for moment in names:
                if moment not in state or state[moment].numel() != key.numel():
                    state[moment] = torch.zeros_like(key.data)
        # A plain get: `state` is a defaultdict, and an empty entry would look like a state.
        state = base.state.get(key, {})
        return {moment: state[moment] for moment in names if moment in state}

    def store(self, base: torch.optim.Optimizer, key: torch.Tensor, tensors: Tensors) -> None:
        """Keep what has been written to the tensors of `load`; here they are the states."""

    def set_step(self, base: torch.optim.Optimizer, key: torch.Tensor, step: int) -> None:
        """Set the number of updates of a key, if the optimizer counts them."""

    def whole_states(self, base: torch.optim.Optimizer, keys: Tensors) -> Tensors:
        """Return the states of whole parameters that have another shape, by "<parameter>/<kind>".

        Args:
            keys: each parameter by its name.
        """
        return {}

    def set_whole_states(self, base: torch.optim.Optimizer, keys: Tensors, saved: Tensors) -> None:
        """Set the states that `whole_states` returned; a parameter without them gets new ones."""

    def average_of(
        self, base: torch.optim.Optimizer, key: torch.Tensor
    ) -> tuple[str, float] | None:
        """Return which state is the moving average of the gradients, and its decay, for --replay.

        Returns:
            None if it has no such state, or not the exact one.
        """
        return None
