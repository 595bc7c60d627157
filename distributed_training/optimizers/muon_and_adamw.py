"""The updates of --optim muon: Muon for some matrices, AdamW for all other parameters.

Muon (Liu et al., arXiv 2502.16982) replaces the momentum of a matrix by the nearest matrix whose
singular values are all equal, so that the weight moves equally far in each direction. Five
Newton-Schulz iterations compute it, with the coefficients of torch.optim.Muon and also in bf16, or
in fp32 if a rank's device only emulates bf16, which is very slow on a CPU. They need the whole
matrix: under FSDP each rank gathers the momentum, computes the whole update, and applies its
own rows.

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
from distributed_training.model_parts import is_dtensor, local_part
from distributed_training.optimizers.optimizer import MOMENTUM

# Keller Jordan's iteration (https://kellerjordan.github.io/posts/muon), as in torch.optim.Muon:
# x ← a·x + b·(x xᵀ) x + c·(x xᵀ)² x.
COEFFICIENTS, ITERATIONS, SMALLEST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer.

    Attributes:
        dtype: of Muon's iterations.
        adamw: AdamW for the groups without "momentum"; None if there are none. It has the same
            groups and states as this optimizer.
    """

    def __init__(
        self,
        groups: list[dict],
        lr: float,
        betas: tuple[float, float],
        epsilon: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, {"lr": lr})
        self.dtype = dtype
        others = [group for group in self.param_groups if "momentum" not in group]
        self.adamw = (
            torch.optim.AdamW(others, betas=betas, eps=epsilon, fused=True) if others else None
        )
        if self.adamw:
            self.adamw.state = self.state
        self._in_muon = {
            id(p) for group in self.param_groups if "momentum" in group for p in group["params"]
        }

    def is_in_muon(self, parameter: torch.Tensor) -> bool:
        """Return whether Muon updates a parameter."""
        return id(parameter) in self._in_muon

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters that have a gradient; `closure` must be None."""
        for group in self.param_groups:
            for parameter in group["params"] if "momentum" in group else ():
                if parameter.grad is not None:
                    self._update(parameter, group)
        if self.adamw:
            self.adamw.step()

    def _update(self, matrix: torch.Tensor, group: dict) -> None:
        states = self.state[matrix]
        if not states:
            states[MOMENTUM] = torch.zeros_like(matrix)
        # Under dp the whole matrix, under FSDP the rows of this rank.
        rows, gradient, average = map(local_part, (matrix, matrix.grad, states[MOMENTUM]))
        average.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"])  # Nesterov's momentum
        update = own_rows(update_of(whole(ahead, matrix), group["lr"], self.dtype), matrix)
        # With CPU offload the rows are in host memory, and the update is on the GPU.
        rows.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(rows.device))


def common_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the iterations, the same on all ranks: they compute the same updates.

    Args:
        parameter: one of the model, on the device that computes, or a DTensor.
    """
    device = parameter.device
    if is_dtensor(parameter):  # with CPU offload the shards are in host memory
        device = torch.device(parameter.device_mesh.device_type)
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
