"""Checks of what a strategy needs of the machine: a compiler, locked memory, NVMe."""

import os
import re
import resource
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.version import Version

from support.cli.arguments import Arguments, configured_strategy
from support.errors import MissingRequirement
from support.files.atomic import TemporaryFolder
from support.strategies import ops
from support.tables import Strategy
from support.units import GB

OLDEST_INFINITY_ON_CPU = Version("0.19.4")  # of DeepSpeed
CAP_IPC_LOCK = 14  # of linux/capability.h
NVME_PREFIX = "distributed_training_nvme_"  # of the names of folders with infinity's files


def check_requirements(args: Arguments) -> None:
    """Check what the strategy needs of this machine, before any data is read.

    Raises:
        MissingRequirement: a newer release, a compiler or libaio is missing.
    """
    strategy = configured_strategy(args)
    if not torch.cuda.is_available():
        check_cpu_support(strategy)
    missing = ops.missing_ops(strategy)
    check_builds(missing)
    if "async_io" in missing:
        ops.check_libaio()


def check_cpu_support(strategy: Strategy) -> None:
    """Check that the installed releases support the strategy on a CPU."""
    # torch's streams for the CPU record no events in 2.6.
    if strategy.engine == "fsdp" and not hasattr(torch.cpu.Stream, "record_event"):
        raise MissingRequirement(
            "--strategy fsdp on a CPU needs a newer torch: pip install --upgrade torch, or use "
            "zero3."
        )
    if strategy.uses_nvme and Version(version("deepspeed")) < OLDEST_INFINITY_ON_CPU:
        raise MissingRequirement(
            f"--strategy infinity on a CPU needs DeepSpeed {OLDEST_INFINITY_ON_CPU} or newer: "
            "pip install --upgrade 'deepspeed<0.20', or use offload."
        )


def check_builds(missing: list[str]) -> None:
    """Check for a C++ compiler, which the missing ops need."""
    compiler = os.environ.get("CXX", "c++")
    if missing and shutil.which(compiler) is None:
        raise MissingRequirement(
            f"DeepSpeed's {', '.join(missing)} must be compiled, but there is no C++ compiler "
            f"({compiler}): apt install build-essential, or module load gcc on a cluster."
        )


def check_locked_memory(needed: int) -> None:
    """Check that each rank may lock so many bytes of I/O buffers for infinity (ulimit -l).

    DeepSpeed's allocation returns a null pointer otherwise.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = Path("/proc/self/status").read_text()
    capabilities = re.findall(r"^CapEff:\s*(\w+)", status, re.MULTILINE)
    is_capable = any(int(mask, 16) >> CAP_IPC_LOCK & 1 for mask in capabilities)
    if limit == resource.RLIM_INFINITY or limit >= needed or is_capable:
        return
    raise MissingRequirement(
        f"--strategy infinity locks {needed / GB:.2f} GB of I/O buffers in memory on each rank, "
        f"and this shell allows {limit / GB:.3f} GB: run `ulimit -l unlimited` first (in a "
        "container --ulimit memlock=-1, under Slurm PropagateResourceLimitsExcept=MEMLOCK), or use "
        "offload."
    )


def make_nvme_folder(path: str | None, needed: int) -> TemporaryFolder:
    """Create this job's own folder for infinity's files, and check that `needed` bytes will fit.

    The folders of killed jobs are removed first; this one is removed when the process exits.

    Raises:
        MissingRequirement: `path` (--nvme_path; None: the temporary folder) is not writable, has
            too little free space, or its file system has no direct I/O.
    """
    parent, temporary, problem = Path(path or tempfile.gettempdir()), None, ""
    try:
        temporary = TemporaryFolder(parent, NVME_PREFIX, mode=0o700)
        if (free := shutil.disk_usage(parent).free) < needed:
            problem = f"has {free / GB:.2f} GB free, and infinity needs {needed / GB:.2f} GB there"
        else:
            os.close(os.open(temporary.path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError as error:  # NFS and tmpfs often have no direct I/O
        problem = f"cannot be written with direct I/O ({error.strerror})"
    if temporary and not problem:
        return temporary
    if temporary:
        temporary.remove()
    raise MissingRequirement(f"--nvme_path {parent} {problem}: name a folder on a local disk.")
