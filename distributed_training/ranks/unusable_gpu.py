"""Why torch cannot use the GPU of this machine, and what to do about it."""

import contextlib
import ctypes
import os

from distributed_training import hardware
from distributed_training.errors import first_line

# The CUDA of a driver, and a build of torch for it: each CUDA 12 runs on all drivers of CUDA 12.
CUDA_BUILDS = {12: "cu126", 13: "cu130"}


def reason_and_remedy(vendor: str) -> tuple[str, str]:
    """Return why torch cannot use the GPUs of a vendor, and what to do."""
    import torch

    needed = "CUDA" if vendor == "NVIDIA" else "ROCm"
    build = torch.version.cuda if vendor == "NVIDIA" else torch.version.hip
    if build is None:
        return f"torch {torch.__version__} is built without {needed}", _install(vendor)
    devices = sorted(hardware.DEVICES.glob("kfd" if vendor == "AMD" else "nvidia[0-9]*"))
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
    for name in hardware.SELECTING[vendor] if "GPUs are available" in reason else ():
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
        return f"driver {(hardware.SYSTEM / 'module/nvidia/version').read_text().strip()}"
    return "driver"
