"""Update matrices whose gradients have a low rank with --optim muon, whole and as shards of FSDP2:

    torchrun --nproc_per_node=2 -m tests.helpers.low_rank_muon

Prints as JSON for each rank of a gradient, with iterations in fp32 and bf16, the largest difference
between the two, relative to the largest update.
"""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from distributed_training.optimizers.muon_and_adamw import MuonAndAdamW
from distributed_training.process import exit_now

SHAPE, STEPS = (33, 64), 3  # the ranks have 17 and 16 rows


def gradients(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(SHAPE[0], rank) @ torch.randn(rank, SHAPE[1]) for _ in range(STEPS)]


def updated(weight: nn.Parameter, found: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    groups = [{"params": [weight], "weight_decay": 0.1, "momentum": 0.95}]
    optimizer = MuonAndAdamW(groups, 1e-2, (0.9, 0.99), 1e-8, weight)
    optimizer.dtype = dtype
    for gradient in found:
        weight.grad = gradient
        optimizer.step()
    return weight.detach()


def difference(rank: int, dtype: torch.dtype) -> float:
    start, found = torch.ones(SHAPE), gradients(rank)
    whole = updated(nn.Parameter(start.clone()), found, dtype)
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    layer.weight.data = start.clone()
    fully_shard(layer)
    mesh, placements = layer.weight.device_mesh, layer.weight.placements
    shards = [distribute_tensor(gradient, mesh, placements) for gradient in found]
    sharded = updated(layer.weight, shards, dtype).full_tensor()
    return float((sharded - whole).abs().max() / (whole - start).abs().max())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    dtypes = (torch.float32, torch.bfloat16)
    differences = [difference(rank, dtype) for rank in (1, 4, 33) for dtype in dtypes]
    if dist.get_rank() == 0:
        print(json.dumps(differences))
    dist.barrier()
    exit_now(0)  # as a run: gloo's threads may abort the process while the interpreter shuts down
