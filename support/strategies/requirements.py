"""Checks of what a run needs: releases that train right, compilers, locked memory, NVMe."""

import importlib.util
import os
import re
import resource
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from packaging.version import Version

from support.cli.arguments import Arguments, configured_strategy
from support.errors import MissingRequirement
from support.files.atomic import TemporaryFolder
from support.strategies import ops
from support.tables import Strategy
from support.units import GB

# Releases of DeepSpeed.
OLDEST_INFINITY_ON_CPU = Version("0.19.4")
OLDEST_WITHOUT_NVCC = Version("0.19.0")
CAP_IPC_LOCK = 14  # of linux/capability.h
NVME_PREFIX = "distributed_training_nvme_"  # of the names of folders with infinity's files


class Fault(NamedTuple):
    """What a range of DeepSpeed's releases does wrong."""

    first: Version  # the first release with the fault
    fixed: Version  # the first release without it
    affects: Callable[[Strategy, int], bool]  # of a strategy, with so many micro-batches a step
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
        lambda strategy, accumulation: strategy.stage == 2 and not strategy.offloads,
        False,
        "keeps only the gradients of the last micro-batch of a step",
        "issue 7718",
    ),
    # The sum is kept only after the first micro-batch, so one or two of them are added right.
    Fault(
        Version("0.17.0"),
        Version("0.19.0"),
        lambda strategy, accumulation: (
            strategy.stage in (1, 2) and strategy.offloads and accumulation > 2
        ),
        False,
        "adds up only the first and the last micro-batch of a step",
        "pull request 7967",
    ),
    # backward() ignores scale_wrt_gas. AdamW hides the wrong scale, but clipping and SGD do not.
    Fault(
        Version("0.18.3"),
        Version("0.18.4"),
        lambda strategy, accumulation: strategy.uses_deepspeed,
        False,
        "divides the gradients by --gradient_accumulation_steps once more",
        "pull request 7724",
    ),
    # gloo copies into the weights, which here are views of a tensor with a gradient.
    Fault(
        Version("0.18.7"),
        Version("0.19.0"),
        lambda strategy, accumulation: strategy.stage in (1, 2),
        True,
        "fails on a CPU in the first update",
        "pull request 7948",
    ),
)


def check_requirements(args: Arguments) -> None:
    """Check what the strategy needs of this machine, before any data is read.

    Raises:
        MissingRequirement: the installed DeepSpeed trains the strategy wrongly, or another release,
            a compiler or libaio is missing.
    """
    strategy, on_cpu = configured_strategy(args), not torch.cuda.is_available()
    check_release(strategy, args.gradient_accumulation_steps, on_cpu)
    if on_cpu:
        check_cpu_support(strategy)
    else:
        check_gpu_support(strategy)
    missing = ops.missing_ops(strategy)
    check_builds(missing)
    if "async_io" in missing:
        ops.check_libaio()


def deepspeed_release() -> Version | None:
    """Return the installed release of DeepSpeed; None if pip's records have none."""
    try:
        return Version(version("deepspeed"))
    except PackageNotFoundError:
        return None


def check_release(strategy: Strategy, accumulation: int, on_cpu: bool) -> None:
    """Check that the installed DeepSpeed trains the strategy right.

    Args:
        accumulation: micro-batches of a step.
    Raises:
        MissingRequirement: it has one of FAULTS.
    """
    release = deepspeed_release() if strategy.uses_deepspeed else None
    if release is None:
        return
    for fault in FAULTS:
        can_happen = fault.affects(strategy, accumulation) and (on_cpu or not fault.only_on_cpu)
        if can_happen and fault.is_in(release):
            raise MissingRequirement(
                f"DeepSpeed {release} {fault.text} under this strategy (deepspeedai/DeepSpeed, "
                f"{fault.source}): pip install --upgrade 'deepspeed>=0.19,<0.20', or use "
                "--strategy dp or fsdp, which do not use DeepSpeed."
            )


def check_cpu_support(strategy: Strategy) -> None:
    """Check that the installed releases support the strategy on a CPU."""
    # torch's streams for the CPU record no events in 2.6.
    if strategy.engine == "fsdp" and not hasattr(torch.cpu.Stream, "record_event"):
        raise MissingRequirement(
            "--strategy fsdp on a CPU needs a newer torch: pip install --upgrade torch, or use "
            "zero3."
        )
    release = deepspeed_release() if strategy.uses_nvme else None
    if release and release < OLDEST_INFINITY_ON_CPU:
        raise MissingRequirement(
            f"--strategy infinity on a CPU needs DeepSpeed {OLDEST_INFINITY_ON_CPU} or newer: "
            "pip install --upgrade 'deepspeed<0.20', or use offload."
        )


def check_gpu_support(strategy: Strategy) -> None:
    """Check that the installed DeepSpeed can be imported on a machine with an NVIDIA GPU.

    Before 0.19 it calls nvcc when it is imported, for ops that only inference uses
    (deepspeedai/DeepSpeed, issue 7452).

    Raises:
        MissingRequirement: the release is older, and there is no nvcc.
    """
    release = deepspeed_release() if strategy.uses_deepspeed else None
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


def check_compile(device: str) -> None:
    """Check for what torch.compile needs: a compiler, Python's headers, and on a GPU triton.

    On a GPU triton compiles the launchers of its kernels in C (triton/runtime/build.py), on a CPU
    Inductor compiles kernels in C++ (torch/_inductor/cpp_builder.py).

    Args:
        device: "cuda" or "cpu".
    Raises:
        MissingRequirement: one of them is missing.
    """
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if device == "cuda":
        language, variable, compilers = "C", "CC", ["gcc", "clang"]
    else:
        language, variable, compilers = "C++", "CXX", ["g++"]
    if variable in os.environ:
        compilers = [os.environ[variable]]
    problem = ""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        problem = "the package triton is not installed: pip install triton"
    elif not any(map(shutil.which, compilers)):
        problem = f"there is no {language} compiler ({' or '.join(compilers)}): "
        problem += f"apt install build-essential, module load gcc on a cluster, or set {variable}"
    elif not header.exists():
        problem = f"{header} is missing: apt install python3-dev, or use conda's or uv's Python"
    if problem:
        raise MissingRequirement(f"--compile: {problem}; or leave it out.")


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
