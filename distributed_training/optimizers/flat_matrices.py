"""Whole matrices of flat partitions, for an optimizer that cannot update parts of a matrix.

DeepSpeed's ZeRO concatenates the parameters, and a rank updates a range of their elements (stages 1
and 2) or a part of each parameter (stage 3). Here one rank computes the update of a whole matrix:
the others send it their elements, and it sends theirs back. Each of the two exchanges is one
collective for a whole partition. Under stages 1 and 2 only the matrices at the ends of a partition
are exchanged; under stage 3 all are, and each rank computes its share of the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
import torch.distributed as dist

from distributed_training.model_parts import Piece


class FlatMatrices:
    """The matrices of which the ranks have elements in corresponding partitions.

    Attributes:
        owners: the rank that computes the update of each matrix, by name.
        sent, received: for each rank the pieces that this rank sends to it, and receives from it,
            before the update. The way back is the same.
        kept: the pieces of its own matrices that this rank has itself.
    """

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], pieces: list[list[Piece]], rank: int
    ) -> None:
        """Choose the owners, the same on every rank.

        Args:
            shapes: of each matrix, in the same order on every rank.
            pieces: for each rank the elements of these matrices in its partition.
            rank: this rank.
        """
        self._shapes = shapes
        self.owners = owners = choose_owners(shapes, pieces)
        ranks = range(len(pieces))

        def from_to(source: int, owner: int) -> list[Piece]:
            return [piece for piece in pieces[source] if owners[piece.name] == owner]

        self.kept = from_to(rank, rank)
        self.sent = [[] if other == rank else from_to(rank, other) for other in ranks]
        self.received = [[] if other == rank else from_to(other, rank) for other in ranks]
        # All ranks take part in a collective, or none.
        self._exchanges = any(
            owners[piece.name] != source for source in ranks for piece in pieces[source]
        )

    @torch.no_grad()
    def update(
        self,
        partition: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        """Replace each matrix in a partition by a function of it; every rank calls it.

        Args:
            partition: of this rank, flat. Elements that belong to no matrix are unchanged.
            function: returns a tensor of the shape of its argument.
            device: that computes, and on which the ranks communicate.
        """
        # Zeros, because a simulated exchange (--simulate_gpus) writes nothing.
        sent, received = (
            torch.zeros(sum(_sizes(parts)), dtype=partition.dtype, device=device)
            for parts in (self.sent, self.received)
        )
        for piece, part in _slices(sent, chain(*self.sent)):
            part.copy_(_elements(partition, piece))
        if self._exchanges:
            dist.all_to_all_single(received, sent, _sizes(self.received), _sizes(self.sent))
        for shape, parts in self._own_matrices(partition, received):
            matrix = torch.cat([part.to(device) for _, part in parts]).view(shape)
            flat = matrix.copy_(function(matrix)).view(-1)  # a function may return a transposed one
            for start, part in parts:
                part.copy_(flat[start : start + len(part)])
        if self._exchanges:
            dist.all_to_all_single(sent, received, _sizes(self.sent), _sizes(self.received))
        for piece, part in _slices(sent, chain(*self.sent)):
            _elements(partition, piece).copy_(part)

    def _own_matrices(
        self, partition: torch.Tensor, received: torch.Tensor
    ) -> Iterator[tuple[tuple[int, ...], list[tuple[int, torch.Tensor]]]]:
        """Yield the shape of each matrix of this rank, and its (start, elements) in order."""
        kept = ((piece, _elements(partition, piece)) for piece in self.kept)
        parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for piece, elements in chain(kept, _slices(received, chain(*self.received))):
            parts.setdefault(piece.name, []).append((piece.start, elements))
        for name, own in parts.items():
            yield self._shapes[name], sorted(own, key=lambda part: part[0])


def choose_owners(shapes: dict[str, tuple[int, ...]], pieces: list[list[Piece]]) -> dict[str, int]:
    """Choose the rank that computes the update of each matrix.

    It is one that has at least half as many of the elements as the rank that has most of them, so
    that little is sent; among these it is the one with the least to compute.
    """
    held: dict[str, dict[int, int]] = {name: {} for name in shapes}
    for rank, own in enumerate(pieces):
        for piece in own:
            held[piece.name][rank] = piece.numel
    work, owners = [0] * len(pieces), {}
    for name in sorted(held, key=lambda name: len(held[name])):  # whole matrices have no choice
        most = max(held[name].values())
        able = [rank for rank, numel in held[name].items() if 2 * numel >= most]
        owners[name] = owner = min(able, key=work.__getitem__)
        rows, columns = shapes[name]
        work[owner] += rows * columns * min(rows, columns)
    return owners


def _sizes(parts: list[list[Piece]]) -> list[int]:
    return [sum(piece.numel for piece in pieces) for pieces in parts]


def _elements(partition: torch.Tensor, piece: Piece) -> torch.Tensor:
    return partition[piece.offset : piece.offset + piece.numel]


def _slices(buffer: torch.Tensor, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield each piece with its elements in a buffer that has the pieces one after the other."""
    position = 0
    for piece in pieces:
        yield piece, buffer[position : position + piece.numel]
        position += piece.numel
