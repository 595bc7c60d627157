"""Checks of what a strategy needs of the machine: a compiler, locked memory, NVMe."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.version import Version

from support.cli.arguments import Arguments
from support.cli.ds_config import configured_strategy
from support.errors import MissingRequirement, UserError
from support.files.atomic import TemporaryFolder
from support.strategies import ops
from support.tables import Strategy
from support.units import GB

OLDEST_INFINITY_ON_CPU = Version("0.19.4")  # of DeepSpeed
CAP_IPC_LOCK = 14  # of linux/capability.h
NVME_PREFIX = "distributed_training_nvme_"  # of the names of folders with infinity's files


def check_requirements(args: Arguments) -> None:
    """Check what the strategy needs of this machine, before any data is read."""
    strategy = configured_strategy(args)
    if not torch.cuda.is_available():
        check_cpu_support(strategy)
    missing = ops.missing_ops(strategy)
    check_builds(missing)
    if "async_io" in missing:
        ops.check_libaio()


def check_cpu_support(strategy: Strategy) -> None:
    """Check that the installed releases support the strategy on a CPU.

    torch's streams for the CPU record no events in 2.6; DeepSpeed before 0.19.4 needs a GPU for the
    page-locked buffers of infinity.
    """
    advice = ""
    if strategy.engine == "fsdp" and not hasattr(torch.cpu.Stream, "record_event"):
        advice = "fsdp on a CPU needs a newer torch: pip install --upgrade torch, or use zero3"
    elif strategy.uses_nvme and Version(version("deepspeed")) < OLDEST_INFINITY_ON_CPU:
        advice = (
            f"infinity on a CPU needs DeepSpeed {OLDEST_INFINITY_ON_CPU} or newer: "
            "pip install --upgrade 'deepspeed<0.20', or use offload"
        )
    if advice:
        raise MissingRequirement(f"--strategy {advice}.")


def check_builds(missing: list[str]) -> None:
    """Check for a C++ compiler and a writable folder, which the missing ops need."""
    if not missing:
        return
    compiler, names = os.environ.get("CXX", "c++"), ", ".join(missing)
    if shutil.which(compiler) is None:
        raise MissingRequirement(
            f"DeepSpeed's {names} must be compiled for offload and infinity, but "
            f"there is no C++ compiler ({compiler}): apt install build-essential, or module load "
            "gcc on a cluster. The other strategies need none without --compile."
        )
    folder = ops.ops_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise MissingRequirement(
            f"DeepSpeed's {names} must be compiled, but {folder} cannot be written "
            f"({error.strerror}): set TORCH_EXTENSIONS_DIR to a folder that can, or compile them "
            "with `python scripts/build_ops.py` where it is writable."
        ) from error


def check_locked_memory(needed: int) -> None:
    """Check that each rank may lock so many bytes of I/O buffers for infinity (ulimit -l).

    DeepSpeed's allocation returns a null pointer otherwise.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= needed or _has_capability(CAP_IPC_LOCK):
        return
    raise MissingRequirement(
        f"--strategy infinity locks {needed / GB:.2f} GB of I/O buffers in memory on each rank, "
        f"and this shell allows {limit / GB:.3f} GB: run `ulimit -l unlimited` first (in a "
        "container --ulimit memlock=-1, under Slurm PropagateResourceLimitsExcept=MEMLOCK), or use "
        "offload."
    )


def _has_capability(number: int) -> bool:
    """Return whether this process has a capability of Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    masks = [line.split()[1] for line in lines if line.startswith("CapEff")]
    return any(int(mask, 16) >> number & 1 for mask in masks)


def make_nvme_folder(path: str | None, needed: int) -> TemporaryFolder:
    """Create this job's own folder for infinity's files, and check that `needed` bytes will fit.

    The folders of killed jobs are removed first; the caller removes this one at the end.

    Raises:
        UserError: `path` (--nvme_path; None: the temporary folder) is not writable.
        MissingRequirement: it has too little free space, or its file system has no direct I/O.
    """
    parent = Path(path or tempfile.gettempdir())
    try:
        temporary = TemporaryFolder(parent, NVME_PREFIX, mode=0o700)
    except OSError as error:
        raise UserError(
            f"--nvme_path {parent} cannot be written: {error.strerror}. Name another folder."
        ) from error
    try:
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise MissingRequirement(
                f"--nvme_path {parent} has {free / GB:.2f} GB free, and infinity needs "
                f"{needed / GB:.2f} GB there: free some space, or name another folder."
            )
        flags = os.O_CREAT | os.O_RDWR | getattr(os, "O_DIRECT", 0)
        os.close(os.open(temporary.path / "probe", flags))
    except OSError as error:
        temporary.remove()
        raise MissingRequirement(
            f"--nvme_path {parent}: its file system cannot do direct I/O ({error.strerror}), as "
            "NFS and tmpfs often cannot: name a folder on a local disk."
        ) from error
    except MissingRequirement:
        temporary.remove()
        raise
    return temporary
