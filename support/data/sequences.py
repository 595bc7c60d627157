"""Sequences of a tokenized corpus: which tokens each has, and the tensors of a micro-batch.

The tokens of a corpus are one flat array on disk. A sequence is one or several ranges [start, end)
of it: a slice of `seq_length` tokens of a text; an example (a conversation, or a prompt and its
completion), truncated to `seq_length`; or with --packing several examples. Labels, positions and
padding are made when a sequence is read. A token t without a loss is stored as ~t, a negative
number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch

from support.cli.arguments import Arguments
from support.units import IGNORED

# Inputs, labels, and the positions of the tokens in their documents (None: not isolated), each
# int64 of shape [sequences, length].
MicroBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
# Stored token ids of a part of a sequence, and the id of the token that ends a document in it, if
# its documents are isolated from each other.
Part = tuple[np.ndarray, int | None]


@dataclass(frozen=True)
class Padding:
    """The length of a micro-batch."""

    seq_length: int
    # Of the length. It suits matrix units, and on a GPU there are few lengths, because cuDNN
    # prepares attention for each anew.
    multiple: int

    @classmethod
    def of(cls, args: Arguments, device_type: str) -> Padding:
        """Return the padding of a run on a type of device ("cpu" or "cuda")."""
        # --compile compiles each length anew; --simulate_gpus must show the largest memory use.
        if args.compile or args.simulate_gpus:
            return cls(args.seq_length, args.seq_length)
        return cls(args.seq_length, 64 if device_type == "cuda" else 8)

    def length(self, longest: np.ndarray | int) -> np.ndarray:
        """Return the length of micro-batches whose longest sequences have `longest` tokens."""
        multiples = -(-np.maximum(longest, 1) // self.multiple)
        return np.minimum(self.seq_length, multiples * self.multiple)


def micro_batch(sequences: list[list[Part]], padding: Padding, packed: bool = False) -> MicroBatch:
    """Return the tensors of sequences, which are padded with tokens that have no loss.

    The first token of a document has no loss, because no token of its document precedes it. No
    attention mask is needed for the padding: in a causal model no token attends to a later one.

    Args:
        sequences: the parts of each sequence. With `packed`, or if the documents of a part are
            isolated, positions are returned; they restart at 0 where a document begins. Each token
            of the padding is at 0, a document of its own.
    """
    isolated = packed or any(end is not None for parts in sequences for _, end in parts)
    lengths = [sum(len(ids) for ids, _ in parts) for parts in sequences]
    width = int(padding.length(max(lengths, default=1)))
    inputs = torch.zeros(len(sequences), width, dtype=torch.int64)
    labels, positions = torch.full_like(inputs, IGNORED), torch.zeros_like(inputs)
    for row, (parts, length) in enumerate(zip(sequences, lengths, strict=True)):
        stored = np.concatenate([ids for ids, _ in parts]).astype(np.int64)
        ids = np.where(stored < 0, ~stored, stored)
        place = np.concatenate([_positions_of(part, end) for part, end in parts])
        learned = (stored >= 0) & (place > 0)
        inputs[row, :length] = torch.from_numpy(ids)
        labels[row, :length] = torch.from_numpy(np.where(learned, ids, IGNORED))
        positions[row, :length] = torch.from_numpy(place)
    return inputs, labels, positions if isolated else None


def _positions_of(ids: np.ndarray, end_of_text: int | None) -> np.ndarray:
    """Return the position of each token in its document, which its end-of-text token ends."""
    place = np.arange(len(ids))
    if end_of_text is None:
        return place
    after_end = np.append(False, ids[:-1] == end_of_text) * place
    return place - np.maximum.accumulate(after_end)


@dataclass(frozen=True)
class Sequences:
    """The sequences of a split of one corpus, which are read from disk when they are needed."""

    path: str  # of the flat array of token ids
    dtype: str  # its type; negative numbers are only in those of examples
    ranges: np.ndarray  # int64 [ranges, 2]: start and end of each range
    ends: np.ndarray  # int64 [sequences]: where each sequence ends in `ranges`
    padding: Padding
    end_of_text: int | None = None  # see `Part`
    packed: bool = False

    @classmethod
    def of(cls, path: str, dtype: str, ranges: np.ndarray, padding: Padding) -> Sequences:
        """Return sequences of one range each."""
        return cls(path, dtype, ranges, np.arange(1, len(ranges) + 1), padding)

    @classmethod
    def none(cls, padding: Padding) -> Sequences:
        """Return no sequences."""
        return cls.of("", "uint16", np.empty((0, 2), np.int64), padding)

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return len(self.ends)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sequence, without padding: int64 [sequences]."""
        total = np.append(0, np.cumsum(self.ranges[:, 1] - self.ranges[:, 0]))
        return np.diff(total[self.ends], prepend=0)

    def parts(self, index: int) -> list[Part]:
        """Read the parts of a sequence.

        The file is not mapped, because the pages of a mapping would count as memory of this
        process, and a shuffled epoch touches all of them.
        """
        begin = self.ends[index - 1] if index else 0
        size = np.dtype(self.dtype).itemsize
        return [
            (np.fromfile(self.path, self.dtype, end - start, offset=start * size), self.end_of_text)
            for start, end in self.ranges[begin : self.ends[index]].tolist()
        ]

    def read(self, indices: np.ndarray) -> MicroBatch:
        """Return the sequences `indices`."""
        return micro_batch([self.parts(int(n)) for n in indices], self.padding, self.packed)

    def tokens(self, indices: np.ndarray) -> int:
        """Return the number of tokens in these sequences, without padding."""
        return int(self.lengths[indices].sum())

    def take(self, count: int) -> Sequences:
        """Return the first `count` sequences."""
        return replace(self, ends=self.ends[:count])

    def hold_out(self, count: int, at_random: bool) -> tuple[Sequences, Sequences]:
        """Return all sequences of one range but `count`, and these: random ones, or the last."""
        order = np.arange(self.num_sequences)[::-1]
        if at_random:  # the same in each run
            order = np.random.default_rng(0).permutation(self.num_sequences)
        kept, held_out = self.ranges[np.sort(order[count:])], self.ranges[np.sort(order[:count])]
        return (
            replace(self, ranges=kept, ends=np.arange(1, len(kept) + 1)),
            replace(self, ranges=held_out, ends=np.arange(1, len(held_out) + 1)),
        )

    def pack(self) -> Sequences:
        """Return the examples of this object packed into fewer sequences."""
        members, ends = pack(self.lengths, self.padding.seq_length)
        return replace(self, ranges=self.ranges[members], ends=ends, packed=True)

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order of the sequences of an epoch, the same on every rank: int64."""
        return np.random.default_rng([seed, epoch]).permutation(self.num_sequences)


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Distribute examples over few sequences by best-fit decreasing (Johnson et al., 1974).

    The longest example first, each goes into the sequence with the least room that is enough, or
    into a new one.

    Args:
        lengths: tokens of each example, from 1 to `capacity`.
    Returns:
        (members, ends): the examples sequence after sequence, and where each sequence ends in
        `members`. The sequences are in the order of their first example, and so are the examples of
        a sequence.
    """
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences by free tokens
    rooms = 0  # bit r is set if a sequence has r free tokens
    sequence_of, count = np.empty(len(lengths), np.int64), 0
    order = np.argsort(-lengths, kind="stable")
    for example, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, sequence, count = capacity, count, count + 1
        sequence_of[example] = sequence
        with_room[room - length].append(sequence)
        rooms |= 1 << (room - length)
    _, first, sizes = np.unique(sequence_of, return_index=True, return_counts=True)
    members = np.argsort(first[sequence_of], kind="stable")
    return members, sizes[np.argsort(first)].cumsum()


# ---------------------------------------------------------------------------------- several corpora


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
    exact = [share * min(total, total if most is None else most) for share in shares]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for number in by_remainder[: int(sum(exact)) - sum(counts)]:
        counts[number] += 1
    return counts


@dataclass(frozen=True)
class Mixture:
    """Sequences of several datasets, which are numbered dataset after dataset.

    An epoch has as many sequences as the dataset that is the smallest for its weight allows without
    a repetition. The larger datasets contribute a part of their sequences to each epoch, the next
    part to the next one, and repeat none before all were used.
    """

    datasets: tuple[Sequences, ...]
    counts: tuple[int, ...]  # how many sequences of each are in an epoch

    @classmethod
    def of(cls, datasets: list[Sequences], weights: list[Fraction] | None = None) -> Mixture:
        """Return a mixture in the shares of the weights (None: of all sequences)."""
        sizes = [dataset.num_sequences for dataset in datasets]
        return cls(tuple(datasets), tuple(shares_of(weights, sizes) if weights else sizes))

    @property
    def num_sequences(self) -> int:
        """The number of sequences in an epoch."""
        return sum(self.counts)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sequence of each dataset, without padding."""
        return np.concatenate([dataset.lengths for dataset in self.datasets])

    @cached_property
    def _begins(self) -> np.ndarray:  # the number of the first sequence of each dataset
        return np.cumsum([0, *(dataset.num_sequences for dataset in self.datasets)])

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the numbers of an epoch's sequences in their order, the same on every rank."""
        chosen = []
        for number, (dataset, count) in enumerate(zip(self.datasets, self.counts, strict=True)):
            first, size = (epoch - 1) * count, dataset.num_sequences
            if not count:
                continue
            # The dataset's own order is one permutation after the other.
            passes = range(first // size, (first + count - 1) // size + 1)
            order = [np.random.default_rng([seed, number, n]).permutation(size) for n in passes]
            begin = first - passes[0] * size
            chosen.append(np.concatenate(order)[begin : begin + count] + self._begins[number])
        return np.random.default_rng([seed, epoch]).permutation(np.concatenate(chosen))

    def read(self, indices: np.ndarray) -> MicroBatch:
        """Return the sequences `indices`."""
        parts, packed = [], False
        for index in indices.tolist():
            number = int(np.searchsorted(self._begins, index, side="right")) - 1
            parts.append(self.datasets[number].parts(index - int(self._begins[number])))
            packed |= self.datasets[number].packed
        return micro_batch(parts, self.datasets[0].padding, packed)

    def tokens(self, indices: np.ndarray) -> int:
        """Return the number of tokens in these sequences, without padding."""
        return int(self.lengths[indices].sum())

    def take(self, count: int) -> Mixture:
        """Return the first sequences of each dataset, `count` in all, in the same shares."""
        if not self.num_sequences or count >= self.num_sequences:
            return self
        counts = shares_of([Fraction(share) for share in self.counts], list(self.counts), count)
        datasets = zip(self.datasets, counts, strict=True)
        return Mixture(tuple(dataset.take(share) for dataset, share in datasets), tuple(counts))
