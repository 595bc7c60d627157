"""--packing: which examples share a sequence."""

from __future__ import annotations

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Distribute examples over as few sequences as best-fit decreasing finds.

    The longest example first, each goes into the sequence with the least room that is enough, or
    into a new one. This needs at most 11/9 of the fewest possible sequences, plus 4 (Johnson et
    al., "Worst-case performance bounds for simple one-dimensional packing algorithms", SIAM J.
    Comput. 3, 1974). The result depends on nothing but the arguments.

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
