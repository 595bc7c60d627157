"""Updates of whole matrices whose elements are in the flat partitions of several ranks."""

import itertools
import math
import threading

import pytest
import torch

from distributed_training.model_parts import Piece
from distributed_training.optimizers import flat_matrices
from distributed_training.optimizers.flat_matrices import FlatMatrices, choose_owners

SHAPES = {"a": (4, 6), "b": (5, 3), "c": (2, 9), "d": (3, 3)}
CPU = torch.device("cpu")


def of_stage2(ranks):
    """Equal ranges of the concatenated matrices; the last one ends with padding."""
    ends = [*itertools.accumulate(math.prod(shape) for shape in SHAPES.values())]
    size = -(-ends[-1] // ranks)
    pieces = [[] for _ in range(ranks)]
    for (name, shape), end in zip(SHAPES.items(), ends, strict=True):
        start = end - math.prod(shape)
        for rank in range(ranks):
            first, last = max(start, rank * size), min(end, (rank + 1) * size)
            if first < last:
                pieces[rank].append(Piece(name, first - start, first - rank * size, last - first))
    return size, pieces


def of_stage3(ranks):
    """Equal parts of each matrix; those of the last ranks have padding, or are padding only."""
    pieces, offset = [[] for _ in range(ranks)], 0
    for name, shape in SHAPES.items():
        part = -(-math.prod(shape) // ranks)
        for rank, own in enumerate(pieces):
            if (real := min(part, math.prod(shape) - rank * part)) > 0:
                own.append(Piece(name, rank * part, offset, real))
        offset += part
    return offset, pieces


@pytest.fixture
def on_threads(monkeypatch):
    """on_threads(ranks, function) calls function(rank) in a thread for each rank.

    They exchange tensors as the ranks of a process group would.
    """

    def run(ranks, function):
        meet, content, here = threading.Barrier(ranks, timeout=10), {}, threading.local()

        def all_to_all_single(output, sent, output_sizes, input_sizes):
            content[here.rank] = sent.split(input_sizes)
            meet.wait()
            received = [content[other][here.rank] for other in range(ranks)]
            assert [len(part) for part in received] == output_sizes
            result = torch.cat(received)
            meet.wait()
            output.copy_(result)
            meet.wait()

        def start(rank):
            here.rank = rank
            function(rank)

        monkeypatch.setattr(flat_matrices.dist, "all_to_all_single", all_to_all_single)
        threads = [threading.Thread(target=start, args=[rank]) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


@pytest.mark.parametrize("layout", [of_stage2, of_stage3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_function_sees_whole_matrices(on_threads, layout, ranks):
    torch.manual_seed(0)
    size, pieces = layout(ranks)
    matrices = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    partitions, seen = torch.full((ranks, size), 7.0), []
    for rank, own in enumerate(pieces):
        for name, start, offset, numel in own:
            flat = matrices[name].flatten()
            partitions[rank, offset : offset + numel] = flat[start : start + numel]

    def function(matrix):
        seen.append(matrix.clone())
        return (matrix.T * 2).T  # not contiguous

    on_threads(
        ranks,
        lambda rank: FlatMatrices(SHAPES, pieces, rank).update(partitions[rank], function, CPU),
    )
    assert len(seen) == len(SHAPES)  # by one rank each
    assert all(any(torch.equal(m, s) for s in seen) for m in matrices.values())
    padding = torch.ones_like(partitions, dtype=torch.bool)
    for rank, own in enumerate(pieces):
        for name, start, offset, numel in own:
            flat = 2 * matrices[name].flatten()
            assert torch.equal(
                partitions[rank, offset : offset + numel], flat[start : start + numel]
            )
            padding[rank, offset : offset + numel] = False
    assert (partitions[padding] == 7).all()


def test_whole_matrices_are_not_exchanged(monkeypatch):
    monkeypatch.setattr(flat_matrices.dist, "all_to_all_single", None)
    pieces = [[Piece("a", 0, 0, 24)], [Piece("b", 0, 0, 15)]]
    partition = torch.ones(30)
    shapes = {name: SHAPES[name] for name in "ab"}
    FlatMatrices(shapes, pieces, 1).update(partition, torch.neg, CPU)
    assert partition.tolist() == [-1] * 15 + [1] * 15


def test_each_rank_computes_its_share():
    """Under stage 3 every rank has the same part of each of 12 equal matrices."""
    shapes = {str(number): (6, 8) for number in range(12)}
    pieces = [[Piece(name, 16 * rank, 0, 16) for name in shapes] for rank in range(3)]
    owners = [*choose_owners(shapes, pieces).values()]
    assert [owners.count(rank) for rank in range(3)] == [4, 4, 4]


def test_a_rank_with_few_elements_does_not_compute_a_matrix():
    pieces = [[Piece("a", 0, 9, 3)], [Piece("a", 3, 0, 21), Piece("b", 0, 21, 15)]]
    assert choose_owners({"a": (4, 6), "b": (5, 3)}, pieces) == {"a": 1, "b": 1}
