"""Units of memory, and numbers as people read them."""

import math
from collections.abc import Iterable

# As nvidia-smi and DeepSpeed count.
KB = 2**10
MB = 2**20
GB = 2**30


def human_bytes(size: float) -> str:
    """12345678 -> "11.8 MB"; GB and MB are 2^30 and 2^20 bytes."""
    return f"{size / GB:.2f} GB" if size >= GB else f"{size / MB:.1f} MB"


def human_count(number: int) -> str:
    """124439808 -> "124M"; below ten millions with one decimal, from a billion on in B."""
    if number >= 1e9:
        return f"{number / 1e9:.1f}B"
    return f"{number / 1e6:.0f}M" if number >= 1e7 else f"{number / 1e6:.1f}M"


def perplexity_of(loss: float) -> float:
    """Return the perplexity exp(loss) of a loss in nats per token; infinite above a loss of 700."""
    return math.inf if loss > 700 else math.exp(loss)


def human_rate(rate: float) -> str:
    """Three digits or more: 0.714, 46.0, 1,204.5."""
    return f"{rate:,.1f}" if rate >= 10 else f"{rate:.3g}"


def rank_names(ranks: Iterable[int]) -> str:
    """Name ranks: "rank 3", "ranks 0, 1, 5"."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' * (len(names) > 1)} {', '.join(names)}"
