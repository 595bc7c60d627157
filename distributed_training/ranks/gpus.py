"""The GPUs of this machine: whether there is one, whether torch can use it, and if not, why.

A GPU counts as present if this process may open its device file, or if nvidia-smi lists it. That
nvidia-smi is installed says nothing: it also is on login nodes and in containers without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from distributed_training import hardware
from distributed_training.errors import MissingRequirement

WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")  # Windows Subsystem for Linux
JETSON = Path("/etc/nv_tegra_release")  # on other computers with ARM cores it does not exist
# The GPU in an AMD processor, which ROCm's builds of torch do not support, has less memory.
INTEGRATED_BYTES = 4 << 30


def hide_gpus() -> None:
    """Hide all GPUs from this process and its children; call it before torch is imported."""
    # "-1" and not "": HIP ignores an empty value.
    os.environ.update(CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")


def vendor_to_use() -> str | None:
    """Return "NVIDIA" or "AMD" if this machine has a GPU that the environment does not hide."""
    vendor = _vendor()
    hidden = (_hides_all(os.environ.get(name)) for name in hardware.SELECTING.get(vendor or "", ()))
    return None if any(hidden) else vendor


def usable_gpus() -> int:
    """Return the number of GPUs that torch can use.

    torch.cuda.device_count() alone asks the driver, and also counts GPUs that torch cannot use.
    """
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def require_usable() -> None:
    """Check that torch can use this machine's GPUs; nothing to check without a GPU to use.

    Raises:
        MissingRequirement: it cannot; the message has the reason and a remedy.
    """
    vendor = vendor_to_use()
    if vendor and not usable_gpus():
        from distributed_training.ranks.unusable_gpu import reason_and_remedy  # only for those

        reason, remedy = reason_and_remedy(vendor)
        raise MissingRequirement(
            f"This machine has an {vendor} GPU, but {reason}: {remedy}; or add --device cpu to "
            "train on the CPU."
        )


def maps_segments() -> bool:
    """Return whether an NVIDIA GPU of this machine can have allocator segments that grow.

    On WSL and on a Jetson the first allocation fails (pytorch/pytorch#192330).
    """
    release, files = platform.release().lower(), (hardware.DEVICES / "dxg", JETSON)
    return not ("microsoft" in release or "tegra" in release or any(f.exists() for f in files))


def _vendor() -> str | None:
    """Return the vendor of the GPUs whose device files this process may open."""
    on_wsl = (hardware.DEVICES / "dxg").exists() and WSL_DRIVER.exists()
    devices = list(hardware.DEVICES.glob("nvidia[0-9]*"))
    if on_wsl or any(map(_belongs_to_us, devices)) or (not devices and _nvidia_smi_lists_gpus()):
        return "NVIDIA"
    return "AMD" if _belongs_to_us(hardware.DEVICES / "kfd") and _has_separate_amd_gpu() else None


@functools.cache
def _nvidia_smi_lists_gpus() -> bool:
    """Return whether `nvidia-smi -L` lists GPUs: on a Jetson they have other device files."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        command = ["nvidia-smi", "-L"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return False
    return listed.returncode == 0 and listed.stdout.startswith("GPU ")


def _has_separate_amd_gpu() -> bool:
    """Return whether AMD's driver knows a GPU that is not a part of the processor."""
    for file in hardware.SYSTEM.glob("class/drm/card*/device/mem_info_vram_total"):
        with contextlib.suppress(OSError, ValueError):
            if int(file.read_text()) > INTEGRATED_BYTES:
                return True
    return False


def _belongs_to_us(device: Path) -> bool:
    """Return whether a device file exists and is not one that Slurm has given to other jobs.

    Slurm denies access to those by a control group, whatever the mode of the file says.
    """
    if not device.exists():
        return False
    allows_everyone = device.stat().st_mode & 0o006 == 0o006
    return os.access(device, os.R_OK | os.W_OK) or not allows_everyone


def _hides_all(value: str | None) -> bool:
    """Return whether this value of CUDA_VISIBLE_DEVICES hides every GPU.

    As CUDA reads it, the list ends at the first entry that names no GPU: "", "-1", "NoDevFiles".
    """
    return value is not None and not re.match(r"\s*\+?\d|GPU-|MIG-", value)
