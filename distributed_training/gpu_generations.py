"""Generations of GPUs, and what their attention kernels can do."""

# Compute capability of the first GPUs of a generation.
TURING, AMPERE, HOPPER = (7, 5), (8, 0), (9, 0)


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
