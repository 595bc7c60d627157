"""The GPUs of this machine: whether there is one, whether torch can use it, and if not, why.

A GPU counts as present if this process may open its device file, or if nvidia-smi lists it. That
nvidia-smi is installed says nothing: it also is on login nodes and in containers without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from distributed_training.errors import MissingRequirement, first_line

DEVICES, SYSTEM = Path("/dev"), Path("/sys")  # tests replace them
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")  # Windows Subsystem for Linux
# Variables that choose the GPUs of a process, by vendor.
SELECTING = {
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
    "AMD": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
# The GPU in an AMD processor, which ROCm's builds of torch do not support, has less memory.
INTEGRATED_BYTES = 4 << 30
# The CUDA of a driver, and a build of torch for it: each CUDA 12 runs on all drivers of CUDA 12.
CUDA_BUILDS = {12: "cu126", 13: "cu130"}


def hide_gpus() -> None:
    """Hide all GPUs from this process and its children; call it before torch is imported."""
    # "-1" and not "": HIP ignores an empty value.
    os.environ.update(CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")


def vendor_to_use() -> str | None:
    """Return "NVIDIA" or "AMD" if this machine has a GPU that the environment does not hide."""
    vendor = _vendor()
    hidden = (_hides_all(os.environ.get(name)) for name in SELECTING.get(vendor or "", ()))
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
        reason, remedy = _reason_and_remedy(vendor)
        raise MissingRequirement(
            f"This machine has an {vendor} GPU, but {reason}: {remedy}; or add --device cpu to "
            "train on the CPU."
        )


def _vendor() -> str | None:
    """Return the vendor of the GPUs whose device files this process may open."""
    on_wsl = (DEVICES / "dxg").exists() and WSL_DRIVER.exists()
    devices = list(DEVICES.glob("nvidia[0-9]*"))
    if on_wsl or any(map(_belongs_to_us, devices)) or (not devices and _nvidia_smi_lists_gpus()):
        return "NVIDIA"
    return "AMD" if _belongs_to_us(DEVICES / "kfd") and _has_separate_amd_gpu() else None


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
    for file in SYSTEM.glob("class/drm/card*/device/mem_info_vram_total"):
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


def _reason_and_remedy(vendor: str) -> tuple[str, str]:
    """Return why torch cannot use the GPUs of a vendor, and what to do."""
    import torch

    needed = "CUDA" if vendor == "NVIDIA" else "ROCm"
    build = torch.version.cuda if vendor == "NVIDIA" else torch.version.hip
    if build is None:
        return f"torch {torch.__version__} is built without {needed}", _install(vendor)
    devices = sorted(DEVICES.glob("kfd" if vendor == "AMD" else "nvidia[0-9]*"))
    if devices and not any(os.access(device, os.R_OK | os.W_OK) for device in devices):
        return f"you may not open {devices[0]}", f"join its group (`ls -l {devices[0]}` names it)"
    reason = f"torch {torch.__version__} ({needed} {build}) cannot use it ({_reason_of_torch()})"
    driver = _cuda_of_driver()
    if vendor == "NVIDIA" and driver and driver[0] < int(build.partition(".")[0]):
        supports = f"the {_driver()} supports CUDA {driver[0]}.{driver[1]}"
        return f"{reason}; {supports}", f"update the driver, or {_install(vendor)}"
    if "no NVIDIA driver" in reason:
        containers = "docker run --gpus all, apptainer exec --nv"
        return reason, f"install the driver; in a container pass it on ({containers})"
    tool = "`nvidia-smi -L`" if vendor == "NVIDIA" else "`rocm-smi`"
    for name in SELECTING[vendor] if "GPUs are available" in reason else ():
        if value := os.environ.get(name):
            return f"{reason}, with {name}={value}", f"choose GPUs that {tool} lists"
    return reason, f"see whether {tool} lists the GPU, and restart the machine if it does not"


def _reason_of_torch() -> str:
    """Return torch's own reason why it finds no GPU; is_available() only prints it as a warning."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error).partition(" Please ")[0].rstrip(".")
    return "torch.cuda.is_available() is False"


def _install(vendor: str) -> str:
    """Return how to install a build of torch for the vendor, and for the driver's CUDA."""
    driver = _cuda_of_driver()
    if vendor == "AMD" or driver is None:
        needed = "CUDA" if vendor == "NVIDIA" else "ROCm"
        return f"install a build for {needed} (https://pytorch.org/get-started/locally)"
    if driver[0] < min(CUDA_BUILDS):
        return f"update the {_driver()}, which supports CUDA {driver[0]}.{driver[1]} only"
    build = CUDA_BUILDS[max(cuda for cuda in CUDA_BUILDS if cuda <= driver[0])]
    index = f"https://download.pytorch.org/whl/{build}"
    return f"pip install --force-reinstall torch --index-url {index}"


def _cuda_of_driver() -> tuple[int, int] | None:
    """Return the newest CUDA that the NVIDIA driver supports, or None; it needs no GPU."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else (number.value // 1000, number.value % 1000 // 10)


def _driver() -> str:
    """Return "driver" with the version of the NVIDIA driver, if it is known."""
    with contextlib.suppress(OSError):
        return f"driver {(SYSTEM / 'module/nvidia/version').read_text().strip()}"
    return "driver"
