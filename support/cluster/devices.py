"""The device of a rank: which of the visible GPUs, and the precision in which it computes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from support.cluster.launch import Launch
from support.errors import UserError


def check_visible_gpus(launch: Launch, visible: int) -> int:
    """Choose this rank's GPU.

    Args:
        launch: this process's place in the run.
        visible: number of GPUs that torch sees.
    Returns:
        The index of the GPU among the visible ones.
    Raises:
        UserError: this node has more ranks than visible GPUs.
    """
    if launch.launcher == "simulated":
        return 0
    if launch.launcher == "srun" and (visible == 1 or "SLURM_GPUS_PER_TASK" in os.environ):
        return 0  # Slurm shows each task its own GPUs (--gpus-per-task, --gpu-bind)
    if launch.local_world_size > visible:
        raise UserError(
            f"{launch.local_world_size} ranks were started on this node, but only {visible} "
            f"GPU(s) are visible: start {visible} (--nproc_per_node, --num_gpus), "
            "or check CUDA_VISIBLE_DEVICES."
        )
    return launch.local_rank


def choose_precision(requested: str, device) -> str:
    """Resolve --precision for this device.

    Args:
        requested: "auto", "fp32", "bf16" or "fp16".
        device: a torch.device.
    Returns:
        "fp32", "bf16" or "fp16".
    Raises:
        UserError: the device does not support the requested precision.
    """
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
    """Return whether this CPU has bf16 instructions (avx512_bf16 or amx_bf16).

    Without them, bf16 is emulated and slow.
    """
    try:
        flags = next(
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("flags")
        ).split()
    except (OSError, StopIteration):
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
