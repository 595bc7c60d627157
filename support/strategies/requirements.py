"""Checks of what a strategy needs of the machine: compilers, libaio, the CUDA toolkit, NVMe."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from support.cli.ds_config import configured_strategy
from support.errors import MissingRequirement, UserError
from support.files.atomic import TemporaryFolder
from support.strategy import Strategy
from support.units import GB

NVME_PREFIX = "distributed_training_nvme_"  # of the names of folders with infinity's files


def needed_ops(strategy: Strategy, device) -> dict[str, list[Path]]:
    """Return DeepSpeed's C++ ops that this strategy needs, with the folders of their builds.

    A folder may not exist yet, or hold an unfinished build.

    Args:
        strategy: a row with DeepSpeed's engine.
        device: a torch.device.
    """
    from torch.utils.cpp_extension import get_default_build_root

    needed = ["deepspeed_shm_comm"] if device.type == "cpu" else []
    needed += ["cpu_adam"] if strategy.offloads else []
    if strategy.uses_nvme:
        needed += ["async_io", "pin_memory"] if _has_pin_memory_op() else ["async_io"]
    if own := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return {op: [Path(own) / op] for op in needed}
    # torch has one build folder for each CUDA version.
    builds = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_*"
    return {op: list(Path(get_default_build_root()).glob(f"{builds}/{op}")) for op in needed}


def _has_pin_memory_op() -> bool:
    """Return whether this DeepSpeed's async_io loads an op pin_memory, as 0.19 does.

    DeepSpeed is not imported: its files are tested.
    """
    package = importlib.util.find_spec("deepspeed")
    folders = (package.submodule_search_locations if package else None) or []
    return any(
        (Path(folder) / "ops" / "op_builder" / "pin_memory.py").exists() for folder in folders
    )


def ops_to_compile(strategy: Strategy, device) -> list[str]:
    """Return the ops of `needed_ops` that are not compiled yet on this machine."""
    op_folders = needed_ops(strategy, device)
    return [
        op
        for op, folders in op_folders.items()
        if not any(file for folder in folders for file in folder.glob("*.so"))
    ]


def check_requirements(args, device) -> None:
    """Check what a DeepSpeed strategy needs of this machine, before any data is read.

    Raises:
        MissingRequirement: the compiler is missing; or, if something is offloaded to NVMe, libaio
            or the CUDA toolkit.
    """
    strategy = configured_strategy(args)
    if not strategy.uses_deepspeed:
        return
    check_compiler(args, device)
    if strategy.uses_nvme:
        check_async_io(device)


def check_compiler(args, device) -> None:
    """Check for the C++ compiler that DeepSpeed needs.

    DeepSpeed compiles its CPU Adam at the first use of offload and infinity, and on a CPU its
    shared-memory collectives.

    Raises:
        MissingRequirement: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "c++")
    is_needed = device.type == "cpu" or configured_strategy(args).offloads
    if is_needed and shutil.which(compiler) is None:
        raise MissingRequirement(
            f"--strategy {args.strategy} compiles parts of DeepSpeed at its first use, but there "
            f"is no C++ compiler ({compiler}): apt install build-essential, "
            "or module load gcc on a cluster. dp and fsdp need none without --compile."
        )


def check_async_io(device) -> None:
    """Check that DeepSpeed's async_io op, with which infinity reads and writes NVMe, can be built.

    On a GPU, DeepSpeed compiles the op with the headers of the CUDA toolkit; CPU Adam (offload)
    needs none. `is_compatible` tests for libaio only. Without the toolkit, `load` fails later, when
    it joins a path to CUDA_HOME = None (deepspeed/ops/op_builder/async_io.py, include_paths).

    Raises:
        MissingRequirement: DeepSpeed's async_io op cannot be built here.
    """
    import torch
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import CUDA_HOME

    compiles_for_cuda = device.type == "cuda" and not torch.version.hip
    if compiles_for_cuda and CUDA_HOME is None and not installed_ops.get("async_io"):
        raise MissingRequirement(
            "--strategy infinity on a GPU compiles with the CUDA toolkit, which was not found: "
            "install the one of torch's CUDA version, "
            "or set CUDA_HOME (module load cuda on a cluster)."
        )
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise MissingRequirement(
            "--strategy infinity needs libaio, which is missing here: apt install libaio-dev "
            "(without root: conda install libaio, "
            "then set CFLAGS and LDFLAGS to its include and lib folders)."
        )


def make_nvme_folder(
    path: str | None, parameters: int, local_world_size: int, world_size: int
) -> TemporaryFolder:
    """Create this job's own folder for infinity's files, and check that they will fit.

    The folders of killed jobs are removed first.

    Args:
        path: --nvme_path; None for the temporary folder.
        parameters: number of parameters of the whole model.
        local_world_size: ranks on this node.
        world_size: all ranks; this node stores local_world_size / world_size of the model.
    Returns:
        A new folder, which the caller removes at the end.
    Raises:
        UserError: `path` does not exist or is not writable.
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
        # At most 20 bytes a parameter: fp32 master, two moments and gradient, and the working copy.
        needed = 20 * parameters * local_world_size // world_size
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise MissingRequirement(
                f"--nvme_path {parent} has {free / GB:.2f} GB free, and infinity needs "
                f"{needed / GB:.2f} GB there: free some space, or name another folder."
            )
        check_direct_io(str(temporary.path))
    except MissingRequirement:
        temporary.remove()
        raise
    return temporary


def check_direct_io(folder: str) -> None:
    """Check that a folder's file system supports direct I/O, which infinity uses.

    Raises:
        MissingRequirement: it does not.
    """
    try:
        os.close(
            os.open(Path(folder) / "probe", os.O_CREAT | os.O_RDWR | getattr(os, "O_DIRECT", 0))
        )
    except OSError as error:
        raise MissingRequirement(
            f"--nvme_path {Path(folder).parent}: its file system cannot do direct I/O "
            f"({error.strerror}), as NFS and tmpfs often cannot: name a folder on a local disk."
        ) from error
