"""--packing: distribute examples over few sequences."""

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Distribute examples over few sequences by best-fit decreasing (Johnson et al., 1974).

    Args:
        lengths: tokens of each example, from 1 to `capacity`.
    Returns:
        (members, ends): the examples sequence after sequence, in their order, and where each
        sequence ends in `members`.
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
