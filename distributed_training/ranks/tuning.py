"""Settings of this process: threads, allocators, logs, its GPU, and the precision.

Imports nothing heavy, because torch reads some of the settings on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training.errors import UserError
from distributed_training.hardware import computes_bf16
from distributed_training.process import ACCELERATE, prefer_own_ninja
from distributed_training.ranks import gpus
from distributed_training.ranks.launch import Launch

if TYPE_CHECKING:
    import torch

# Parameters of glibc's mallopt(3), with their numbers in <malloc.h>.
MALLOC = {"TRIM_THRESHOLD": -1, "TOP_PAD": -2, "MMAP_THRESHOLD": -3, "MMAP_MAX": -4}
# Every torch from 2.6 to 2.13 reads the first variable. torch 2.9 announces the second one but does
# not read it (pytorch/pytorch#183387).
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def choose_hardware(device: str) -> None:
    """Hide the GPUs if --device (`device`) or `accelerate launch --cpu` asks for the CPU."""
    if device == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        gpus.hide_gpus()


def tune_process(
    launch: Launch, compiles: bool, deterministic: bool, verbose: bool, quiet: bool
) -> None:
    """Set what libraries read once, when they are imported: threads, allocator, log levels.

    A variable that the user has set keeps its value.

    Args:
        compiles: --compile.
        deterministic, verbose, quiet: the flags of these names.
    """
    env = os.environ
    if "OMP_NUM_THREADS" not in env or is_launchers_default(launch.launcher):
        cores_per_task = env.get("SLURM_CPUS_PER_TASK") if launch.launcher == "srun" else None
        share = max(1, available_cores() // launch.local_world_size)
        env["OMP_NUM_THREADS"] = cores_per_task or str(share)
    if gpus.vendor_to_use() != "NVIDIA":
        return_freed_memory()
    elif gpus.maps_segments() and not any(name in env for name in ALLOCATOR_VARIABLES):
        # Batches of chat examples differ in length, and a sharding strategy gathers and frees
        # tensors of many sizes: segments of fixed sizes that fit no new tensor stay reserved.
        env[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    prefer_own_ninja()
    defaults = {"TOKENIZERS_PARALLELISM": "true", "KINETO_LOG_LEVEL": "99"}  # logs start and end
    if not compiles:
        # torch creates this folder when it is imported, by default an empty one in TMPDIR.
        defaults["TORCHINDUCTOR_CACHE_DIR"] = tempfile.gettempdir()
    # DeepSpeed 0.19.0 to 0.19.4 call nvcc when they are imported on a machine with a GPU, for ops
    # that only inference uses, and fail without nvcc. 0.19.5 prints a warning for each op.
    defaults["DS_IGNORE_CUDA_DETECTION"] = "1"
    if deterministic:
        defaults["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS needs it
    if not verbose:
        if not sys.warnoptions:  # PYTHONWARNINGS, or python -W
            warnings.simplefilter("ignore")
        # torch's message about nvcc on a machine without a GPU; bitsandbytes, which peft imports.
        for logger in ("torch.utils.cpp_extension", "bitsandbytes"):
            logging.getLogger(logger).setLevel(logging.ERROR)
        defaults |= {
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TRANSFORMERS_VERBOSITY": "error",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "DATASETS_VERBOSITY": "error",
        }
        if quiet or not (launch.is_main and sys.stderr.isatty()):
            bars = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
            defaults |= dict.fromkeys(bars, "1")
    for name, value in defaults.items():
        env.setdefault(name, value)


def is_launchers_default(launcher: str) -> bool:
    """Return whether torchrun or accelerate has set OMP_NUM_THREADS=1, and not the user.

    They do so for each rank if the variable is not set, and training on a CPU or the CPU optimizer
    of offload would then be very slow. The environment in which the launcher, the parent process,
    was started shows which of the two it is.
    """
    sets_it = launcher == "torchrun" or ACCELERATE in os.environ
    if not sets_it or os.environ.get("OMP_NUM_THREADS") != "1":
        return False
    try:
        environment = _environment_of_parent().read_bytes()
    except OSError:
        return True
    return not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in environment.split(b"\0"))


def _environment_of_parent() -> Path:
    return Path(f"/proc/{os.getppid()}/environ")


def available_cores() -> int:
    """Return the number of cores this process may use, often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def return_freed_memory() -> None:
    """Return each large tensor to the kernel as soon as it is freed; used while a model loads.

    By default glibc raises this threshold when the first large tensor is freed. The parameters that
    ZeRO-3 holds while it shards would then remain in the process's memory.
    """
    _mallopt({"MMAP_THRESHOLD": 1 << 20})


def keep_freed_memory(large: bool) -> None:
    """Keep the memory of one step's tensors for the next step, where a CPU trains.

    Returning it to the kernel causes page faults at every step (tools/benchmarks/RESULTS.md).

    Args:
        large: also keep tensors of 8 MB and more, which fragments the heap.
    """
    # Without memory mappings no tensor is returned alone.
    mapped = {"MMAP_MAX": 0} if large else {"MMAP_THRESHOLD": 8 << 20}
    _mallopt({**mapped, "TRIM_THRESHOLD": (1 << 31) - 1, "TOP_PAD": 64 << 20})


def _mallopt(settings: dict[str, int]) -> None:
    """Call glibc's mallopt(3), except for what the user's environment sets.

    Other C libraries keep their defaults.
    """
    env = os.environ
    with contextlib.suppress(OSError, AttributeError):
        for name, value in settings.items():
            tunable = f"glibc.malloc.{name.lower()}="
            if f"MALLOC_{name}_" not in env and tunable not in env.get("GLIBC_TUNABLES", ""):
                ctypes.CDLL(None).mallopt(MALLOC[name], value)


def choose_device(launch: Launch) -> torch.device:
    """Return this rank's GPU; without GPUs the CPU.

    Sets the environment variables that tell DeepSpeed the same.

    Raises:
        MissingRequirement: the machine has a GPU, and torch cannot use it.
    """
    import torch

    visible = gpus.usable_gpus()
    if not visible:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        gpus.require_usable()
        return torch.device("cpu")
    os.environ.setdefault("DS_ACCELERATOR", "cuda")
    # Fewer GPUs than ranks: Slurm (--gpus-per-task, --gpu-bind) or a script may show each rank its
    # own GPUs. Whether two ranks have the same one is known when they meet (`require_own_gpu`).
    device = torch.device("cuda", launch.local_rank % visible)
    torch.ones(1, device=device).item()  # fails if this build of torch has no kernels for the GPU
    os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed uses it as the GPU's index
    return device


def choose_precision(requested: str, device: torch.device) -> str:
    """Return the precision of --precision on this device: "fp32", "bf16" or "fp16"."""
    import torch

    if device.type == "cuda":
        has_bf16 = computes_bf16(device)
        if requested == "bf16" and not has_bf16:
            name = torch.cuda.get_device_name(device)
            raise UserError(
                f"--precision bf16 needs an Ampere GPU or newer, and this is a {name}: use fp16, "
                "or fp32."
            )
        return ("bf16" if has_bf16 else "fp16") if requested == "auto" else requested
    if requested == "fp16":
        raise UserError("--precision fp16 needs a GPU: on a CPU use bf16, or fp32.")
    return ("bf16" if computes_bf16(device) else "fp32") if requested == "auto" else requested
