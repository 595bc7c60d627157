"""FSDP by hand, for a list of blocks. Run it under torchrun on two ranks."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call


def flatten(block):
    """Return the parameters of a block as one vector, padded to a multiple of the ranks."""
    flat = torch.cat([parameter.detach().flatten() for parameter in block.parameters()])
    missing = -len(flat) % dist.get_world_size()
    return torch.cat([flat, flat.new_zeros(missing)])


def call(block, whole, x):
    """Compute a block with the parameters in a vector, as `flatten` returns it."""
    parameters, begin = {}, 0
    for name, parameter in block.named_parameters():
        end = begin + parameter.numel()
        parameters[name], begin = whole[begin:end].view(parameter.shape), end
    return functional_call(block, parameters, (x,))


# ------------------------------------------------------------------------- change what follows
def shard(block):
    """Return what this rank stores of the parameters of a block."""
    return nn.Parameter(flatten(block))


class Gather(torch.autograd.Function):
    """From the shard of each rank to the whole parameters; its backward is the way back."""

    @staticmethod
    def forward(ctx, own):
        return own.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def forward(blocks, shards, x):
    """Compute the blocks one after the other."""
    for block, own in zip(blocks, shards, strict=True):
        x = call(block, Gather.apply(own), x)
    return x


# ------------------------------------------------------------------------- nothing to change here
def main():
    """Train on random data: the loss falls."""
    torch.manual_seed(0)
    sizes = pairwise((16, 24, 16, 24, 16))
    blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in sizes]
    shards = [shard(block) for block in blocks]
    optimizer = torch.optim.Adam(shards, lr=1e-2)
    torch.manual_seed(dist.get_rank())  # each rank has its own data
    x, y = torch.randn(32, 16), torch.rand(32, 16)
    for step in range(20):
        loss = (forward(blocks, shards, x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f} on this rank")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
