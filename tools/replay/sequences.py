"""The sequences of a step: the loss of each token, and the norm of each sequence's gradient."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from distributed_training.data.batches import StepBatch
from distributed_training.data.sequences import MicroBatch
from distributed_training.loss_chunks import IGNORED
from distributed_training.ranks.context import DistContext


class Place(NamedTuple):
    """A row of a micro-batch in the step batch of a rank."""

    rank: int
    micro_batch: int
    row: int


class TokenLosses(NamedTuple):
    """The tokens of a sequence, without padding, and their losses."""

    ids: list[int]
    losses: list[float | None]  # of each token in nats; None: it has no loss

    @property
    def known(self) -> list[float]:
        """The losses of the tokens that have one."""
        return [loss for loss in self.losses if loss is not None]


def rows_of(micro_batch: MicroBatch, first: int, last: int) -> MicroBatch:
    """Return the rows [first, last) of a micro-batch."""
    inputs, labels, positions = micro_batch
    rows = slice(first, last)
    return inputs[rows], labels[rows], None if positions is None else positions[rows]


@torch.no_grad()
def token_losses(
    model: nn.Module, casting: AbstractContextManager, step_batch: StepBatch, ctx: DistContext
) -> dict[Place, TokenLosses]:
    """Compute the loss of each token of this rank's step batch, without dropout.

    One sequence at a time, because the logits of a micro-batch may not fit next to the rest of the
    step. All ranks run the same number of forward passes, in which shards are gathered.
    """
    model.eval()
    found = {}
    for number, micro_batch in enumerate(step_batch.micro_batches):
        own = len(micro_batch[0])
        for row in range(max(ctx.all_gather(own))):
            one = rows_of(micro_batch, min(row, own - 1), min(row, own - 1) + 1)
            losses = _losses_of(model, casting, one)
            inputs, labels = one[0][0].tolist(), one[1][0].tolist()
            targets = [n for n, label in enumerate(labels) if n and label != IGNORED]
            if row < own and targets:
                values = losses.tolist()
                known = {n: values[n - 1] for n in targets}  # of a token given those before it
                length = targets[-1] + 1  # what follows is padding, or is not trained on
                found[Place(ctx.rank, number, row)] = TokenLosses(
                    inputs[:length], [known.get(n) for n in range(length)]
                )
    return found


def _losses_of(model: nn.Module, casting: AbstractContextManager, one: MicroBatch) -> torch.Tensor:
    """Return the losses of the tokens of one sequence from the second on: fp32 [length - 1]."""
    inputs, labels, positions = one
    options = {} if positions is None else {"position_ids": positions}
    with torch.compiler.set_stance("force_eager"), casting:
        logits = model(input_ids=inputs, use_cache=False, **options).logits[0, :-1].float()
    return F.cross_entropy(logits, labels[0, 1:], ignore_index=IGNORED, reduction="none").cpu()


def alone(step_batch: StepBatch, place: Place, rank: int) -> StepBatch:
    """Return a step batch in which only one sequence has a loss, for this rank.

    The other ranks get a sequence without a loss, because all ranks take part in the collectives.
    """
    inputs, labels, positions = rows_of(step_batch.micro_batches[place.micro_batch], 0, 1)
    if rank == place.rank:
        micro_batch = rows_of(step_batch.micro_batches[place.micro_batch], place.row, place.row + 1)
    else:
        micro_batch = inputs, torch.full_like(labels, IGNORED), positions
    return StepBatch([micro_batch], tokens=0)
