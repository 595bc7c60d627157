"""Task 7, on each of three ranks: make one step with the student's functions, and watch the memory.

    torchrun --nproc_per_node=3 harness.py FSDP.PY OUT

Rank R writes OUT/R.json: its shards, their memory and their gradients, the gradient of its own data
and of all ranks' as one process computes them, and which whole parameters were alive when. Those
are the vectors that the student's functions pass to `call`; a weak reference to a tensor's storage
tells when its memory is freed. Three ranks: with two, a program that divides by 2 looks right.
"""

import itertools
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tools.lab import harness

SIZES = (6, 5, 6, 5, 6)  # of the layers; blocks have 35 or 36 parameters: some need padding


def new_blocks() -> list[nn.Module]:
    """Return the same blocks on each rank, in fp64: rounding hides nothing."""
    torch.manual_seed(3)
    pairs = itertools.pairwise(SIZES)
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in pairs]


def data_of(rank: int) -> torch.Tensor:
    """Return the input of a rank; autograd saves the first block, too, if it needs a gradient."""
    numbers = torch.Generator().manual_seed(rank)
    return torch.randn(7, SIZES[0], generator=numbers).double().requires_grad_()


def of_one_process(ranks: list[int]) -> list[list[float]]:
    """Return the gradient of each block, of the mean of the losses of these ranks' data."""
    blocks = new_blocks()
    losses = [nn.Sequential(*blocks)(data_of(rank)).square().mean() for rank in ranks]
    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
    return [
        torch.cat([parameter.grad.flatten() for parameter in block.parameters()]).tolist()
        for block in blocks
    ]


def flat(block: nn.Module) -> torch.Tensor:
    """Return the parameters of a block as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in block.parameters()])


class Watch:
    """Takes the place of `call`: sees the blocks and the whole parameters of each call.

    Attributes:
        blocks: of the calls.
        most: whole vectors that were alive at the same time.
        right: of each call, whether the vector was that of its block.
    """

    def __init__(self, call) -> None:
        self.call, self.seen = call, {}
        self.blocks: list[nn.Module] = []
        self.right: list[bool] = []
        self.most = 0

    def __call__(self, block, whole, x):
        """Compute a block, and note what is alive."""
        storage, expected = whole.untyped_storage(), flat(block)
        self.seen[storage.data_ptr(), len(self.blocks)] = StorageWeakRef(storage)
        self.blocks.append(block)
        self.right.append(torch.equal(whole.detach().double()[: len(expected)], expected))
        self.most = max(self.most, self.alive(expected=2))
        return self.call(block, whole, x)

    def uses_last_values(self, forward: int) -> bool:
        """Return whether the backward pass used the last block or the last shard for others.

        Args:
            forward: the calls of the forward pass.
        """
        blocks, last = self.blocks[forward:], self.blocks[forward - 1]
        one_block = len(blocks) > 1 and all(block is last for block in blocks)
        return one_block or (all(self.right[:forward]) and not all(self.right[forward:]))

    def alive(self, expected: int) -> int:
        """Return the number of vectors that have been passed to `call`, and not been freed.

        A thread of gloo releases a tensor shortly after its collective: if there are more than
        `expected`, this waits for a moment.
        """
        for _ in range(20):
            alive = [key[0] for key, storage in self.seen.items() if not storage.expired()]
            if len({*alive}) <= expected:
                break
            time.sleep(0.01)
        return len({*alive})


def numbers_in_memory(tensors: list[torch.Tensor | None]) -> int:
    """Return how many fp64 numbers the storages of tensors have: of a view those of its base."""
    storages = [one.untyped_storage() for one in tensors if one is not None]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values()) // 8


def run(fsdp, rank: int) -> dict:
    """Make one forward and backward pass; return what was seen."""
    blocks = new_blocks()
    fsdp.call = watch = Watch(fsdp.call)
    shards = [fsdp.shard(block) for block in blocks]
    loss = fsdp.forward(blocks, shards, data_of(rank)).square().mean()
    alive, calls = watch.alive(expected=0), len(watch.blocks)
    try:
        loss.backward()
    except RuntimeError:
        if not watch.uses_last_values(calls):
            raise
    if watch.uses_last_values(calls):
        return {"late_binding": True}
    gradients = [own.grad for own in shards]
    return {
        "shards": [own.numel() for own in shards],
        "parts": [own.detach().flatten().tolist() for own in shards],
        "shards_in_memory": numbers_in_memory([own.detach() for own in shards]),
        "gathered_right": all(watch.right),
        "alive_after_forward": alive,
        "calls_of_forward": calls,
        "calls": len(watch.blocks),
        "most_alive": watch.most,
        "gradients": [None if one is None else one.flatten().tolist() for one in gradients],
        "gradients_in_memory": numbers_in_memory(gradients),
        "whole": [flat(block).tolist() for block in blocks],
        "right": of_one_process([*range(dist.get_world_size())]),
        "own": of_one_process([rank]),
    }


if __name__ == "__main__":
    harness.main(run)
