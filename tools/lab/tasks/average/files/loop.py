"""Data parallelism by hand. Run it as one process, and under torchrun on several."""

import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

PADDING, TOKENS = -100, 32


def train_step(model, optimizer, micro_batches):
    """Make one optimizer step of all ranks together; return the loss of the step.

    micro_batches: those of this rank, each a pair of int64 tensors [rows, length]: the inputs, and
    the targets, which are PADDING behind the end of a row.
    """
    optimizer.zero_grad()
    step_loss = 0.0
    for inputs, targets in micro_batches:
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)
        loss = loss / len(micro_batches)
        loss.backward()
        step_loss += loss.item()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    return step_loss


def rows(count):
    """Return rows of tokens with different lengths, the same on each rank."""
    numbers = random.Random(0)
    return [
        [start % TOKENS for start in range(first, first + numbers.randint(2, 20))]
        for first in (numbers.randrange(TOKENS) for _ in range(count))
    ]


def as_batch(some):
    """Return inputs and targets of some rows: the target of a token is the next one."""
    longest = max(map(len, some))
    inputs = [row[:-1] + [0] * (longest - len(row)) for row in some]
    targets = [row[1:] + [PADDING] * (longest - len(row)) for row in some]
    return torch.tensor(inputs), torch.tensor(targets)


def main():
    """Train on 10 global batches of 8 rows, two in each micro-batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    data = rows(80)
    for step in range(10):
        pairs = [data[8 * step + i : 8 * step + i + 2] for i in range(0, 8, 2)]
        loss = train_step(model, optimizer, [as_batch(pair) for pair in pairs[rank::ranks]])
        if rank == 0:
            print(f"step {step + 1}: loss {loss:.6f}")


if __name__ == "__main__":
    if "RANK" not in os.environ:  # one process, without torchrun
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
