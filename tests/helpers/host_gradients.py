"""One of two ranks whose gradients lie in host memory, as under FSDP with CPU offload:

    RANK=0 python -m tests.helpers.host_gradients BACKEND STORE

Unscales, measures and clips them as train_epoch_ddp does, and prints the results as JSON.
"""

import json
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from distributed_training.strategies import gradients

SCALE = 8.0


def main(rank: int) -> dict:
    model = fully_shard(nn.Linear(1, 4, bias=False), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", SCALE)
    scaler.scale(torch.zeros(()))  # sets the scale

    def unscale(shard: list[float]) -> float:
        """Set this rank's two of the four elements of the gradient; return what torch counts."""
        local, mesh = torch.tensor(shard).unsqueeze(1), model.weight.device_mesh
        model.weight.grad = DTensor.from_local(local, mesh, [Shard(0)])
        scaler.unscale_(optimizer)
        return sum(flag.item() for flag in scaler._found_inf_per_device(optimizer).values())

    found_inf = [unscale([SCALE * value for value in [[3.0, 4.0], [0.0, 12.0]][rank]])]
    norm = gradients.gradient_norm(model)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    clipped = gradients.gradient_norm(model)
    scaler.step(optimizer)
    scaler.update()

    found_inf += [unscale([1.0, math.inf if rank == 1 else 1.0])]
    return {"norm": norm.item(), "clipped": round(clipped.item(), 5), "found_inf": found_inf}


if __name__ == "__main__":
    backend, file = sys.argv[1:]
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, store=dist.FileStore(file, 2), rank=rank, world_size=2)
    print(json.dumps(main(rank)))
