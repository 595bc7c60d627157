"""Task 2, on each of two ranks: call the student's train_step, and write down what it did.

    torchrun --nproc_per_node=2 harness.py LOOP.PY OUT

Rank R writes OUT/R.json: for each case the gradient that the step applied (of SGD with a learning
rate of 1 it is the difference of the weights), the loss that it returned, and what one process
knows: the gradient of the sum of the losses of each micro-batch, and its number of tokens. From
those `check.py` computes the right gradient, and what common mistakes give.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from tools.lab import harness

PADDING, TOKENS = -100, 11
# Tokens in each row of the three micro-batches of rank 0, and of those of rank 1. Not as many
# micro-batches as ranks: mistakes by the one number and by the other must differ.
CASES = {
    "equal lengths": [[[6, 6]] * 3] * 2,
    "unequal lengths": [[[2, 1], [5, 4], [3, 3]], [[7, 1], [9, 2], [4, 1]]],
    "a micro-batch of padding": [[[3, 6], [0, 0], [4, 4]], [[4, 2], [5, 1], [2, 6]]],
    # A rank that skips its padding has no gradients, and other collectives than the other rank.
    "a rank of padding": [[[3, 6], [2, 1], [4, 4]], [[0, 0]] * 3],
}


def micro_batch(lengths: list[int], numbers: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of rows with these numbers of targets."""
    longest = max(3, *lengths)
    inputs = torch.randint(TOKENS, (len(lengths), longest), generator=numbers)
    targets = torch.randint(TOKENS, (len(lengths), longest), generator=numbers)
    for row, length in enumerate(lengths):
        targets[row, length:] = PADDING
    return inputs, targets


def new_model() -> nn.Module:
    """Return the same model on each rank, in fp64: rounding hides nothing."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(TOKENS, 4), nn.Linear(4, TOKENS)).double()


def flat(tensors) -> torch.Tensor:
    """Return tensors as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def of_one_process(inputs: torch.Tensor, targets: torch.Tensor) -> dict:
    """Return the sum of the losses of a micro-batch, its gradient, and the numbers of tokens."""
    model = new_model()
    logits = model(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")
    loss.backward()
    return {
        "loss": loss.item(),
        "gradient": flat(parameter.grad for parameter in model.parameters()).tolist(),
        "tokens": int((targets != PADDING).sum()),
        "with_padding": targets.numel(),
    }


def run_case(train_step, case: list, rank: int) -> dict:
    """Make one step of the student's, and describe its data as one process sees them."""
    numbers = torch.Generator().manual_seed(2)
    batches = [[micro_batch(lengths, numbers) for lengths in own] for own in case]
    model = new_model()
    before = flat(model.parameters())
    loss = train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), batches[rank])
    return {
        "gradient": (before - flat(model.parameters())).tolist(),
        "loss": None if loss is None else float(loss),
        "parts": [[of_one_process(*batch) for batch in own] for own in batches],
    }


def run(loop, rank: int) -> dict:
    """Return what was seen in each case, up to an error."""
    found: dict[str, object] = {}
    for name, case in CASES.items():
        try:
            found[name] = run_case(loop.train_step, case, rank)
        except Exception as error:
            text = harness.describe(error, Path(loop.__file__))
            return found | {"error": f"{text} (with {name})"}
    return found


if __name__ == "__main__":
    harness.main(run)
