"""The device of a rank: which of the visible GPUs, and the precision in which it computes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from support.cluster.launch import Launch
from support.errors import UserError


def choose_device(launch: Launch) -> torch.device:
    """Return this rank's GPU, and make it the current device; without GPUs the CPU.

    Sets the environment variables that tell DeepSpeed the same.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return torch.device("cpu")
    os.environ.setdefault("DS_ACCELERATOR", "cuda")
    visible, index = torch.cuda.device_count(), launch.local_rank
    # Slurm may show each task its own GPUs (--gpus-per-task, --gpu-bind).
    own_gpus = launch.launcher == "srun" and (visible == 1 or "SLURM_GPUS_PER_TASK" in os.environ)
    if own_gpus or launch.launcher == "simulated":
        index = 0
    elif launch.local_world_size > visible:
        raise UserError(
            f"{launch.local_world_size} ranks were started on this node, but only {visible} "
            f"GPU(s) are visible: start {visible} (--nproc_per_node, --num_gpus), "
            "or check CUDA_VISIBLE_DEVICES."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = str(index)  # DeepSpeed uses it as the GPU's index
    return device


def unused_gpu() -> str | None:
    """Return the name of a GPU that PyTorch could use and this project cannot, or None."""
    if torch.cuda.is_available():
        return None
    if torch.backends.mps.is_available():
        return "Apple GPUs (MPS)"
    return "Intel GPUs (XPU)" if torch.xpu.is_available() else None


def choose_precision(requested: str, device) -> str:
    """Return the precision of --precision on this device: "fp32", "bf16" or "fp16"."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
        if requested == "bf16" and not has_bf16:
            name = torch.cuda.get_device_name(device)
            raise UserError(
                f"--precision bf16 needs an Ampere GPU or newer, and this is a {name}: use fp16, "
                "or fp32."
            )
        return ("bf16" if has_bf16 else "fp16") if requested == "auto" else requested
    if requested == "fp16":
        raise UserError("--precision fp16 needs a GPU: on a CPU use bf16, or fp32.")
    return ("bf16" if cpu_computes_bf16() else "fp32") if requested == "auto" else requested


def cpu_computes_bf16() -> bool:
    """Return whether this CPU has bf16 instructions; without them bf16 is emulated and slow."""
    flags = cpu_fact("flags").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def cpu_fact(name: str) -> str:
    """Return an entry of /proc/cpuinfo, such as "model name"; "" if there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def identify_gpu(device: torch.device) -> str | None:
    """Return the UUID of this process's GPU; None on a CPU or where ranks may share a GPU.

    AMD GPUs may all have the same UUID. Slices of a GPU (MIG) may have that of the whole GPU;
    CUDA_VISIBLE_DEVICES names the slice.
    """
    if (
        device.type != "cuda"
        or torch.version.hip
        or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0")
    ):
        return None
    properties = torch.cuda.get_device_properties(device)
    piece = os.environ.get("CUDA_VISIBLE_DEVICES", "") if "MIG" in properties.name else ""
    return f"{properties.uuid} {piece}"
