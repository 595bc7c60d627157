"""The updates of --optim muon: Muon for some matrices, AdamW for all other parameters.

Muon (Liu et al., arXiv 2502.16982) replaces the momentum of a matrix by the nearest matrix whose
singular values are all equal, so that the weight moves equally far in each direction. Five
Newton-Schulz iterations compute it, with the coefficients of torch.optim.Muon and also in bf16, or
in fp32 if a rank's device only emulates bf16, which is very slow on a CPU. They need the whole
matrix: under FSDP each rank gathers the momentum, computes the whole update, and applies its
own rows. Under ZeRO one rank computes the update of a matrix for all (flat_matrices.py).

The update of a matrix of A × B is scaled by 0.2 · √max(A, B): the root mean square of its elements
becomes 0.2, which is usual for AdamW, so that one --lr serves both optimizers. Neither this factor
nor the iterations change if a matrix is transposed, as in GPT-2's layers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.hardware import computes_bf16
from distributed_training.model_parts import Piece, full_shape, is_dtensor, local_part
from distributed_training.optimizers.flat_matrices import FlatMatrices
from distributed_training.optimizers.optimizer import MOMENTUM

# Keller Jordan's iteration (https://kellerjordan.github.io/posts/muon), as in torch.optim.Muon:
# x ← a·x + b·(x xᵀ) x + c·(x xᵀ)² x.
COEFFICIENTS, ITERATIONS, SMALLEST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer.

    Attributes:
        device, dtype: of Muon's iterations.
        elements: number of elements that Muon updates, and that AdamW updates, on all ranks.
        adamw: AdamW for the groups without "momentum"; None if there are none. It has the same
            groups and states as this optimizer.
    """

    def __init__(
        self,
        groups: list[dict],
        lr: float,
        betas: tuple[float, float],
        epsilon: float,
        like: torch.Tensor,
    ) -> None:
        """Create it.

        Args:
            like: a parameter of the model, on the device that computes, or a DTensor.
        """
        super().__init__(groups, {"lr": lr})
        self.device, self.dtype = computing_device(like), common_dtype(like)
        others = [group for group in self.param_groups if "momentum" not in group]
        self.adamw = (
            torch.optim.AdamW(others, betas=betas, eps=epsilon, fused=True) if others else None
        )
        if self.adamw:
            self.adamw.state = self.state
        self._in_muon = {
            id(p) for group in self.param_groups if "momentum" in group for p in group["params"]
        }
        counts = [0, 0]
        for group in self.param_groups:
            sizes = (math.prod(full_shape(parameter)) for parameter in group["params"])
            counts["momentum" not in group] += sum(sizes)
        self.elements = (counts[0], counts[1])
        self._flat: dict[torch.Tensor, FlatMatrices] = {}  # of each master that ZeRO has flattened

    def is_in_muon(self, parameter: torch.Tensor) -> bool:
        """Return whether Muon updates a parameter."""
        return id(parameter) in self._in_muon

    def place(
        self, master: torch.Tensor, shapes: dict[str, tuple[int, ...]], pieces: list[list[Piece]]
    ) -> None:
        """Update the matrices in a flat master by Muon; see `FlatMatrices` for the arguments."""
        self._in_muon.add(id(master))
        self._flat[master] = FlatMatrices(shapes, pieces, dist.get_rank())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters that have a gradient; `closure` must be None."""
        for group in self.param_groups:
            for parameter in group["params"] if "momentum" in group else ():
                if parameter.grad is not None:
                    self._update(parameter, group)
        if self.adamw:
            # DeepSpeed lets an update see one group only, because it has not prepared the others.
            self.adamw.param_groups = [g for g in self.param_groups if "momentum" not in g]
            self.adamw.step()

    def _update(self, matrix: torch.Tensor, group: dict) -> None:
        states = self.state[matrix]
        if not states:
            states[MOMENTUM] = torch.zeros_like(matrix)
        if matrix in self._flat:
            return self._update_flat(matrix, group)
        # Under dp the whole matrix, under FSDP the rows of this rank.
        rows, gradient, average = map(local_part, (matrix, matrix.grad, states[MOMENTUM]))
        average.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"])  # Nesterov's momentum
        update = own_rows(update_of(whole(ahead, matrix), group["lr"], self.dtype), matrix)
        # With CPU offload the rows are in host memory, and the update is on the GPU.
        rows.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(rows.device))

    def _update_flat(self, master: torch.Tensor, group: dict) -> None:
        """Update a flat master of ZeRO. Its gradient is a copy, which becomes the update."""
        gradient, average = master.grad, self.state[master][MOMENTUM]
        assert gradient is not None
        average.lerp_(gradient, 1 - group["momentum"])
        gradient.lerp_(average, group["momentum"])

        def update(momentum: torch.Tensor) -> torch.Tensor:
            return update_of(momentum, group["lr"], self.dtype)

        self._flat[master].update(gradient, update, self.device)
        master.mul_(1 - group["lr"] * group["weight_decay"]).add_(gradient)


def computing_device(parameter: torch.Tensor) -> torch.device:
    """Return the device that computes: with CPU offload FSDP's shards are in host memory."""
    if is_dtensor(parameter):
        return torch.device(parameter.device_mesh.device_type)
    return parameter.device


def common_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the iterations, the same on all ranks: they compute the same updates.

    Args:
        parameter: one of the model, on the device that computes, or a DTensor.
    """
    device = computing_device(parameter)
    has_bf16 = torch.tensor(int(computes_bf16(device)), device=device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(has_bf16, op=dist.ReduceOp.MIN)
    return torch.bfloat16 if has_bf16.item() else torch.float32


def update_of(momentum: torch.Tensor, lr: float, dtype: torch.dtype) -> torch.Tensor:
    """Return what Muon adds to a matrix, without weight decay, in fp32.

    It is that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw".

    Args:
        momentum: of the whole matrix, shape (A, B).
        dtype: of the iterations.
    """
    scale = 0.2 * math.sqrt(max(momentum.shape))
    return orthogonal(momentum, dtype).to(momentum.dtype).mul_(-lr * scale)


def orthogonal(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix with singular values near 1, by Newton-Schulz iterations in a dtype.

    The products are computed on the smaller side: of (A, B) with A > B the transposed matrix.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype, copy=True)
    x.div_(x.norm().clamp(min=SMALLEST_NORM))  # the largest singular value is at most 1
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def whole(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that is sharded as `like`, of which this rank has `rows`."""
    if not is_dtensor(like):
        return rows
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(rows, like.device_mesh, like.placements, **layout).full_tensor()


def own_rows(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a whole tensor, without communication; see `whole`."""
    if not is_dtensor(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    replicated = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim)
    return replicated.redistribute(placements=like.placements).to_local()
