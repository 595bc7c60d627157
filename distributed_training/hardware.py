"""What devices can do: generations of GPUs, attention kernels, bf16; facts about the CPU."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Compute capability of the first GPUs of a generation.
TURING, AMPERE, HOPPER = (7, 5), (8, 0), (9, 0)
DEVICES, SYSTEM = Path("/dev"), Path("/sys")  # tests replace them
# Variables that choose the GPUs of a process, by vendor.
SELECTING = {
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
    "AMD": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}


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


def computes_bf16(device: torch.device) -> bool:
    """Return whether a device has instructions for bf16; else it is emulated, and slow on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_capability(device) >= AMPERE
    return cpu_computes_bf16()


@functools.cache
def cpu_computes_bf16() -> bool:
    """Return whether this CPU has instructions for bf16."""
    flags = cpu_fact("flags").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def cpu_fact(name: str) -> str:
    """Return an entry of /proc/cpuinfo, such as "model name"; "" if there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
