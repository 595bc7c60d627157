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
from typing import NamedTuple

import numpy as np
import torch

from distributed_training.data.facts import Targets
from distributed_training.data.token_file import TokenFile
from distributed_training.loss_chunks import IGNORED

# Inputs, labels, and the positions of the tokens in their documents (None: not isolated), each
# int64 of shape [sequences, length].
MicroBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
# Stored token ids of a part of a sequence, and the id of the token that ends a document in it, if
# its documents are isolated from each other.
Part = tuple[np.ndarray, int | None]
COMPILED_LENGTHS = 4  # of micro-batches with --compile or --compile_loss


class Padding(NamedTuple):
    """The length of a micro-batch."""

    seq_length: int
    # Of the length: it suits matrix units, and on a GPU there are few lengths, because cuDNN
    # prepares attention for each anew.
    multiple: int

    @classmethod
    def of(cls, seq_length: int, whole: bool, device_type: str, compiles: bool = False) -> Padding:
        """Return the padding of a run.

        Args:
            seq_length: the most tokens of a sequence, and the length of micro-batches of text.
            whole: every micro-batch has this length: --simulate_gpus must show the largest use of
                memory.
            device_type: "cpu" or "cuda".
            compiles: there are at most COMPILED_LENGTHS, because each is compiled.
        """
        multiple = 64 if compiles or device_type == "cuda" else 8
        if compiles:  # a fourth of the length, rounded up
            multiple *= -(-seq_length // (COMPILED_LENGTHS * multiple))
        return cls(seq_length, seq_length if whole else multiple)

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
        learned = _are_targets(stored, place)
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


def _are_targets(stored: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return which tokens have a loss: not the first one of a document."""
    return (stored >= 0) & (positions > 0)


@dataclass(frozen=True)
class Sequences:
    """The sequences of a split, which are read from disk when they are needed.

    Those of several datasets are numbered dataset after dataset. A dataset that is larger than its
    share contributes a part of its sequences to each epoch, the next part to the next one, and
    repeats none before all were used.
    """

    files: tuple[TokenFile, ...]
    ranges: np.ndarray  # int64 [ranges, 3]: number of a file, start and end of a range in it
    ends: np.ndarray  # int64 [sequences]: where each sequence ends in `ranges`
    padding: Padding
    packed: bool = False
    # Of several datasets: (number of its sequences, how many of them are in an epoch).
    shares: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, file: TokenFile, ranges: np.ndarray, padding: Padding) -> Sequences:
        """Return sequences of one range [start, end) each."""
        numbered = np.insert(ranges, 0, 0, axis=1)
        return cls((file,), numbered, np.arange(1, len(ranges) + 1), padding)

    @classmethod
    def none(cls, padding: Padding) -> Sequences:
        """Return no sequences."""
        return cls((), np.empty((0, 3), np.int64), np.empty(0, np.int64), padding)

    @property
    def num_sequences(self) -> int:
        """The number of sequences in an epoch."""
        return sum(count for _, count in self.shares) if self.shares else len(self.ends)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sequence, without padding: int64 [sequences]."""
        total = np.append(0, np.cumsum(self.ranges[:, 2] - self.ranges[:, 1]))
        return np.diff(total[self.ends], prepend=0)

    def parts(self, index: int) -> list[Part]:
        """Read the parts of a sequence.

        Raises:
            TrainingError: a file cannot be read, or its size has changed.
        """
        parts = []
        begin = self.ends[index - 1] if index else 0
        for number, start, end in self.ranges[begin : self.ends[index]].tolist():
            file = self.files[number]
            parts.append((file.read(start, end), file.end_of_text))
        return parts

    def first_sequence(self) -> list[Part]:
        """Return the parts of the first sequence."""
        return self.parts(0)

    def read(self, indices: np.ndarray) -> MicroBatch:
        """Return the sequences `indices`."""
        return micro_batch([self.parts(int(n)) for n in indices], self.padding, self.packed)

    def tokens(self, indices: np.ndarray) -> int:
        """Return the number of tokens in these sequences, without padding."""
        return int(self.lengths[indices].sum())

    def targets(self) -> Targets:
        """Count the tokens with a loss of all sequences, and the bytes of their text."""
        tokens, size = 0, 0.0
        sizes = [file.sizes_by_id() for file in self.files]
        for number, start, end in self.ranges.tolist():
            file = self.files[number]
            ids = file.read(start, end)
            targets = ids[_are_targets(ids, _positions_of(ids, file.end_of_text))]
            tokens += len(targets)
            size += float(sizes[number][targets].sum())
        return {"tokens": tokens, "bytes": round(size)}

    def select(self, numbers: np.ndarray) -> Sequences:
        """Return these sequences of one dataset."""
        begins = np.append(0, self.ends[:-1])[numbers]
        sizes = self.ends[numbers] - begins
        ends = np.cumsum(sizes)
        members = np.repeat(begins - ends + sizes, sizes) + np.arange(sizes.sum())
        return replace(self, ranges=self.ranges[members], ends=ends)

    def take(self, count: int) -> Sequences:
        """Return the first `count` sequences; of several datasets the first of each, in shares."""
        if count >= self.num_sequences:
            return self
        if not self.shares:
            return self.select(np.arange(count))
        in_epoch = [share for _, share in self.shares]
        counts = shares_of([Fraction(share) for share in in_epoch], in_epoch, count)
        begins = np.cumsum([0, *(size for size, _ in self.shares)])
        first = [begin + np.arange(own) for begin, own in zip(begins, counts, strict=False)]
        taken = self.select(np.concatenate(first))
        return replace(taken, shares=tuple((own, own) for own in counts))

    def hold_out(self, count: int, at_random: bool) -> tuple[Sequences, Sequences]:
        """Return all sequences but `count`, and these: random ones, or the last."""
        order = np.arange(self.num_sequences)[::-1]
        if at_random:  # the same in each run
            order = np.random.default_rng(0).permutation(self.num_sequences)
        return self.select(np.sort(order[count:])), self.select(np.sort(order[:count]))

    def pack(self) -> Sequences:
        """Return the examples of this object packed into fewer sequences."""
        from distributed_training.data.packing import pack

        members, ends = pack(self.lengths, self.padding.seq_length)
        return replace(self, ranges=self.ranges[members], ends=ends, packed=True)

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the numbers of an epoch's sequences in their order, the same on every rank."""
        numbers = np.random.default_rng([seed, epoch])
        if not self.shares:
            return numbers.permutation(self.num_sequences)
        chosen, begin = [], 0
        for dataset, (size, count) in enumerate(self.shares):
            if count:
                # The dataset's own order is one permutation after the other.
                first = (epoch - 1) * count
                passes = range(first // size, (first + count - 1) // size + 1)
                order = [
                    np.random.default_rng([seed, dataset, n]).permutation(size) for n in passes
                ]
                first -= passes[0] * size
                chosen.append(np.concatenate(order)[first : first + count] + begin)
            begin += size
        return numbers.permutation(np.concatenate(chosen))


# ---------------------------------------------------------------------------------- several corpora


def shares_of(weights: list[Fraction], sizes: list[int], most: int | None = None) -> list[int]:
    """Return how many sequences each dataset contributes to an epoch.

    They are in the ratios of the weights, rounded by the largest remainders, and `most` in all or
    as many as fit without a repetition.
    """
    shares = [weight / sum(weights) for weight in weights]
    total = min(int(size / share) for size, share in zip(sizes, shares, strict=True) if share)
    exact = [share * min(total, total if most is None else most) for share in shares]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for number in by_remainder[: int(sum(exact)) - sum(counts)]:
        counts[number] += 1
    return counts
