"""One of two ranks whose gradients lie in host memory, as under FSDP with CPU offload:

    RANK=0 python tests/helpers/host_gradients.py BACKEND STORE

Unscales, measures and clips them as train_epoch_ddp does, and prints what it found as JSON.
"""

import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from support.strategies import gradients

SCALE = 8.0


class Sharded(FSDPModule, nn.Module):
    """What `gradients.norm` asks of a model that fully_shard has split."""

    def __new__(cls, *args):
        return object.__new__(cls)  # FSDPModule's own makes an instance of the class after it

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(self.sharded([0.0, 0.0]))

    def sharded(self, values: list[float]) -> DTensor:
        """A vector of four elements, two on each rank."""
        return DTensor.from_local(torch.tensor(values), self.mesh, [Shard(0)])


def main(rank: int) -> dict:
    model = Sharded(init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", SCALE)
    scaler.scale(torch.zeros(()))  # sets the scale

    mine = [[3.0, 4.0], [0.0, 12.0]][rank]
    model.weight.grad = model.sharded([SCALE * value for value in mine])
    scaler.unscale_(optimizer)
    found_inf = [sum(flag.item() for flag in scaler._found_inf_per_device(optimizer).values())]
    norm = gradients.norm(model)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    clipped = gradients.norm(model)
    scaler.step(optimizer)
    scaler.update()

    model.weight.grad = model.sharded([1.0, math.inf if rank == 1 else 1.0])
    scaler.unscale_(optimizer)
    found_inf += [sum(flag.item() for flag in scaler._found_inf_per_device(optimizer).values())]
    return {"norm": norm.item(), "clipped": round(clipped.item(), 5), "found_inf": found_inf}


if __name__ == "__main__":
    backend, file = sys.argv[1:]
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, store=dist.FileStore(file, 2), rank=rank, world_size=2)
    print(json.dumps(main(rank)))
