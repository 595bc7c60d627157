"""Units, numbers as people read them, and sizes that training and the memory plan share."""

import math

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


IGNORED = -100  # label of tokens without a loss: the default ignore_index of cross_entropy

# Elements of the logits in one chunk of the loss. Each chunk reads and writes the whole gradient of
# the output layer. A GPU gets larger chunks, because its kernels are fast only on large matrices.
LOGITS_CHUNK = {"cpu": 2**24, "cuda": 2**26}
MOST_CHUNKS = {"cuda": 8}  # a large batch leaves room for larger chunks: its activations need more
# Up to this number, a compiled output layer computes all logits at once. On a GPU it is what
# Inductor's kernels index in 32 bits, 4 GiB in 16 bits; 1.65e9 were run on an H200.
COMPILED_LOGITS = {"cpu": 2**29, "cuda": 2**31 - 1}
NORM_CHUNK = 2**16  # elements of a gradient whose squares are summed in fp32 for the norm
# Compute capability of the first GPUs of a generation.
TURING, AMPERE, HOPPER = (7, 5), (8, 0), (9, 0)
PHASES = ("data", "forward", "backward", "update")  # of an optimizer step


def fits_in_graph(tokens: int, vocabulary: int, device: str) -> bool:
    """Return whether a compiled output layer computes all logits of a micro-batch at once."""
    return tokens * vocabulary <= COMPILED_LOGITS[device]


def shares_keys(device: str, precision: str, capability: tuple[int, int]) -> bool:
    """Return whether SDPA computes grouped-query attention without a copy of K and V per query.

    On a GPU only FlashAttention and cuDNN do, which need 16 bits and compute capability 8.0. The
    memory-efficient kernel, which is left for fp32 and for older GPUs, needs as many heads of K and
    V as of Q (torch 2.13: ATen/native/transformers/cuda/sdp_utils.cpp,
    use_mem_efficient_attention); with fewer, PyTorch stores all scores.

    Args:
        device: "cuda" or "cpu".
        precision: "fp32", "bf16" or "fp16".
        capability: compute capability of the GPU.
    """
    return device == "cpu" or (precision != "fp32" and capability >= AMPERE)


def number_of_chunks(tokens: int, vocabulary: int, device: str) -> int:
    """Return in how many chunks the loss of a micro-batch is computed on a type of device."""
    chunks = -(-tokens * vocabulary // LOGITS_CHUNK[device])
    return min(chunks, MOST_CHUNKS.get(device, chunks))
