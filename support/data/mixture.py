"""Several datasets in one order of sequences, in the shares of their weights.

A weight is a share of the training sequences. An epoch has as many sequences as the dataset that is
the smallest for its weight allows without a repetition. The larger datasets contribute a part of
their sequences to each epoch, the next part to the next one, and repeat none before all were used.
Without weights, every dataset is used completely in each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from support.files.atomic import digest_of_json
from support.labels import IGNORED

if TYPE_CHECKING:
    from support.data.batches import MicroBatch

EMPTY_WIDTH = 8  # length of a micro-batch without sequences


def shares_of(weights: list[Fraction], sizes: list[int], most: int | None = None) -> list[int]:
    """Return how many sequences each dataset contributes to an epoch.

    Args:
        weights: a number for each dataset, 0 for none of it; only their ratios count.
        most: maximum number of all sequences; None: as many as fit without a repetition.
    Returns:
        Whole numbers in the ratios of the weights, rounded by the largest remainders.
    """
    shares = [weight / sum(weights) for weight in weights]
    total = min(int(size / share) for size, share in zip(sizes, shares, strict=True) if share)
    total = total if most is None else min(total, most)
    exact = [share * total for share in shares]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts


@dataclass(frozen=True)
class Mixture:
    """Sequences of several datasets; they are numbered dataset after dataset."""

    parts: tuple
    counts: tuple[int, ...]  # how many sequences of each are in an epoch

    @classmethod
    def of(cls, parts: list, weights: list[Fraction] | None = None) -> Mixture:
        """Return a mixture in the shares of the weights (None: of all sequences)."""
        sizes = [part.num_sequences for part in parts]
        return cls(tuple(parts), tuple(shares_of(weights, sizes) if weights else sizes))

    @property
    def num_sequences(self) -> int:
        """The number of sequences in an epoch."""
        return sum(self.counts)

    @property
    def _begins(self) -> np.ndarray:
        """The number of the first sequence of each dataset, and of all sequences."""
        return np.cumsum([0, *(part.num_sequences for part in self.parts)])

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the numbers of an epoch's sequences in their order, the same on every rank."""
        chosen = []
        for number, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            first, size = (epoch - 1) * count, part.num_sequences
            if not count:
                continue
            # The dataset's own order is one permutation after the other.
            passes = range(first // size, (first + count - 1) // size + 1)
            order = [np.random.default_rng([seed, number, n]).permutation(size) for n in passes]
            begin = first - passes[0] * size
            chosen.append(np.concatenate(order)[begin : begin + count] + self._begins[number])
        mixed = np.concatenate(chosen)
        return np.random.default_rng([seed, epoch]).permutation(mixed)

    def _of_parts(self, indices: np.ndarray):
        """Yield for each dataset: it, the places of its sequences in `indices`, their numbers."""
        begins = self._begins
        owners = np.searchsorted(begins, indices, side="right") - 1
        for number in np.unique(owners):
            places = np.flatnonzero(owners == number)
            yield self.parts[number], places, np.asarray(indices)[places] - begins[number]

    def read(self, indices: np.ndarray) -> MicroBatch:
        """Return the sequences `indices`, padded to the longest."""
        read = [(places, part.read(own)) for part, places, own in self._of_parts(indices)]
        width = max((micro[0].shape[1] for _, micro in read), default=EMPTY_WIDTH)
        inputs = torch.zeros(len(indices), width, dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORED)
        # Of sequences that are one document, and next to those with positions.
        positions = torch.arange(width).repeat(len(indices), 1)
        for places, micro in read:
            padding = (0, width - micro[0].shape[1])
            inputs[places] = F.pad(micro[0], padding)
            labels[places] = F.pad(micro[1], padding, value=IGNORED)
            if micro[2] is not None:
                positions[places] = F.pad(micro[2], padding)
        isolated = any(micro[2] is not None for _, micro in read)
        return inputs, labels, positions if isolated else None

    def tokens(self, indices: np.ndarray) -> int:
        """Return the number of tokens in these sequences, without padding."""
        return sum(part.tokens(own) for part, _, own in self._of_parts(indices))

    def take(self, count: int) -> Mixture:
        """Return the first sequences of each dataset, `count` in all, in the same shares."""
        weights = [Fraction(share) for share in self.counts]
        if not self.num_sequences or count >= self.num_sequences:
            return self
        counts = shares_of(weights, list(self.counts), count)
        parts = [part.take(share) for part, share in zip(self.parts, counts, strict=True)]
        return Mixture(tuple(parts), tuple(counts))


def mixture_facts(name: str, entries: list[dict], train: Mixture, validation) -> dict:
    """Return the entry of several datasets in results.json.

    Args:
        entries: the entry of each dataset, with "weight" and "blocks_per_epoch".
    """
    kinds = {entry["kind"] for entry in entries}
    parts = [[entry["sha256"], entry["weight"]] for entry in entries]
    validations = [entry["validation"].get("sha256") for entry in entries]
    return {
        "name": name,
        "kind": kinds.pop() if len(kinds) == 1 else "mixed",
        "formats": list(dict.fromkeys(one for entry in entries for one in entry["formats"])),
        **{key: sum(e[key] for e in entries) for key in ("rows", "tokens", "truncated", "skipped")},
        "sha256": digest_of_json(parts),
        "blocks": train.num_sequences,
        "validation": {
            "blocks": validation.num_sequences,
            "sha256": digest_of_json(validations) if any(validations) else None,
        },
        "bad_rows": [row for entry in entries for row in entry["bad_rows"]],
        "datasets": [{key: e[key] for key in e if key != "bad_rows"} for e in entries],
    }
