"""Checks of what DeepSpeed needs: releases that train right, a compiler, locked memory, NVMe."""

import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from packaging.version import Version

from distributed_training.errors import MissingRequirement
from distributed_training.files.atomic import TemporaryFolder
from distributed_training.strategies.deepspeed import ops
from distributed_training.units import GB

# Releases of DeepSpeed.
OLDEST_INFINITY_ON_CPU = Version("0.19.4")
OLDEST_WITHOUT_NVCC = Version("0.19.0")
CAP_IPC_LOCK = 14  # of linux/capability.h
NVME_PREFIX = "distributed_training_nvme_"  # of the names of folders with infinity's files


class Fault(NamedTuple):
    """What a range of DeepSpeed's releases does wrong."""

    first: Version  # the first release with the fault
    fixed: Version  # the first release without it
    affects: Callable[[int, bool, int], bool]  # (ZeRO stage, offloads, micro-batches of a step)
    only_on_cpu: bool
    text: str  # what happens
    source: str  # at github.com/deepspeedai/DeepSpeed

    def is_in(self, release: Version) -> bool:
        """Return whether a release has the fault, or may have it because it is a pre-release."""
        # A cluster's 0.18.2+abc is a 0.18.2; 0.18.4rc1 may lack what was repaired in 0.18.4.
        return Version(release.base_version) >= self.first and release < self.fixed


# requirements/deepspeed.txt excludes the releases that train a strategy wrongly with any flags, but
# a cluster may have one of them. What each strategy does under them was measured on two CPU ranks
# with four micro-batches a step, except for infinity, which on a CPU needs a newer release.
FAULTS = (
    # Stage 3 and offload sum the gradients in other code.
    Fault(
        Version("0.17.6"),
        Version("0.18.3"),
        lambda stage, offloads, accumulation: stage == 2 and not offloads,
        False,
        "keeps only the gradients of the last micro-batch of a step",
        "issue 7718",
    ),
    # The sum is kept only after the first micro-batch, so one or two of them are added right.
    Fault(
        Version("0.17.0"),
        Version("0.19.0"),
        lambda stage, offloads, accumulation: stage < 3 and offloads and accumulation > 2,
        False,
        "adds up only the first and the last micro-batch of a step",
        "pull request 7967",
    ),
    # backward() ignores scale_wrt_gas. AdamW hides the wrong scale, but clipping and SGD do not.
    Fault(
        Version("0.18.3"),
        Version("0.18.4"),
        lambda stage, offloads, accumulation: True,
        False,
        "divides the gradients by --gradient_accumulation_steps once more",
        "pull request 7724",
    ),
    # gloo copies into the weights, which here are views of a tensor with a gradient.
    Fault(
        Version("0.18.7"),
        Version("0.19.0"),
        lambda stage, offloads, accumulation: stage < 3,
        True,
        "fails on a CPU in the first update",
        "pull request 7948",
    ),
)


def check_requirements(stage: int, offloads: bool, needed: list[str], accumulation: int) -> None:
    """Check what a strategy needs of this machine, before any data is read.

    Args:
        stage: of ZeRO.
        offloads: it keeps optimizer states outside the device.
        needed: the ops that it needs.
        accumulation: micro-batches of a step.
    Raises:
        MissingRequirement: the installed DeepSpeed trains the strategy wrongly, or another release,
            a compiler or libaio is missing.
    """
    on_cpu = not torch.cuda.is_available()
    check_release(stage, offloads, accumulation, on_cpu)
    if not on_cpu:
        check_gpu_support()
    elif "async_io" in needed:
        check_nvme_on_cpu()
    missing = [op for op in needed if not ops.is_compiled(op)]
    check_builds(missing)
    if "async_io" in missing:
        ops.check_libaio()


def deepspeed_release() -> Version | None:
    """Return the installed release of DeepSpeed; None if pip's records have none."""
    try:
        return Version(version("deepspeed"))
    except PackageNotFoundError:
        return None


def check_release(stage: int, offloads: bool, accumulation: int, on_cpu: bool) -> None:
    """Check that the installed DeepSpeed trains the strategy right.

    Args:
        accumulation: micro-batches of a step.
    Raises:
        MissingRequirement: it has one of FAULTS.
    """
    release = deepspeed_release()
    if release is None:
        return
    for fault in FAULTS:
        can_happen = fault.affects(stage, offloads, accumulation) and (
            on_cpu or not fault.only_on_cpu
        )
        if can_happen and fault.is_in(release):
            raise MissingRequirement(
                f"DeepSpeed {release} {fault.text} under this strategy (deepspeedai/DeepSpeed, "
                f"{fault.source}): pip install --upgrade 'deepspeed>=0.19,<0.20', or use "
                "--strategy dp or fsdp, which do not use DeepSpeed."
            )


def check_nvme_on_cpu() -> None:
    """Check that the installed DeepSpeed trains with states on NVMe without a GPU."""
    release = deepspeed_release()
    if release and release < OLDEST_INFINITY_ON_CPU:
        raise MissingRequirement(
            f"--strategy infinity on a CPU needs DeepSpeed {OLDEST_INFINITY_ON_CPU} or newer: "
            "pip install --upgrade 'deepspeed<0.20', or use offload."
        )


def check_gpu_support() -> None:
    """Check that the installed DeepSpeed can be imported on a machine with an NVIDIA GPU.

    Before 0.19 it calls nvcc when it is imported, for ops that only inference uses
    (deepspeedai/DeepSpeed, issue 7452).

    Raises:
        MissingRequirement: the release is older, and there is no nvcc.
    """
    release = deepspeed_release()
    if release is None or release >= OLDEST_WITHOUT_NVCC or torch.version.cuda is None:
        return
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None or not Path(CUDA_HOME, "bin", "nvcc").exists():
        raise MissingRequirement(
            f"DeepSpeed {release} cannot be imported on a machine with a GPU and without nvcc: "
            "pip install --upgrade 'deepspeed>=0.19,<0.20', or module load cuda on a cluster."
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


def torch_binds_groups() -> bool:
    """Return whether torch can bind NCCL's group to a device: 2.6.1 to 2.7.0 may hang.

    See pytorch/pytorch, issue 153960.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:3])
    return not (2, 6, 0) < release < (2, 7, 1)
