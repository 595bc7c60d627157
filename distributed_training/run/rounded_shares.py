"""What --rank_shares becomes in whole sequences."""

import itertools
import math
from collections.abc import Sequence

from distributed_training import console
from distributed_training.files.user_files import shown
from distributed_training.rank_shares import of_each_rank, shown_shares
from distributed_training.settings.training import TrainingSettings


def report(training: TrainingSettings, counts: Sequence[int], node_of_rank: Sequence[int]) -> None:
    """Print a notice if whole sequences do not have the ratios of --rank_shares.

    Args:
        counts: the sequences of each rank in a micro-batch.
        node_of_rank: see `of_each_rank`.
    """
    if are_exact(of_each_rank(training.rank_shares, node_of_rank), counts):
        return
    given, found = shown_shares(training.rank_shares), ",".join(map(str, counts))
    console.warn(
        f"--rank_shares {shown(given)} of the {sum(counts)} sequences of a micro-batch are "
        f"{shown(found)} in whole sequences: a larger --batch_size comes closer."
    )


def are_exact(shares: Sequence[float], sequences: Sequence[int]) -> bool:
    """Return whether whole sequences have the ratios of the shares."""
    parts = (share / sum(shares) * sum(sequences) for share in shares)
    return all(itertools.starmap(math.isclose, zip(parts, sequences, strict=True)))
