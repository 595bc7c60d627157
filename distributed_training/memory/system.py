"""Memory and disks as the operating system and the GPU's driver count them, in bytes."""

import contextlib
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch


def host_bytes() -> tuple[int, int]:
    """Return (current, peak) resident memory of this process in bytes."""
    now = psutil.Process().memory_info().rss
    # VmHWM starts with this program; ru_maxrss can be inherited from the parent process.
    status = Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""  # not on a Mac
    if found := re.search(r"VmHWM:\s+(\d+) kB", text):
        return now, 1024 * int(found[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return now, unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def allocator_bytes(device: torch.device) -> tuple[int, int | None]:
    """Return the bytes that PyTorch's allocator has allocated and reserved on a GPU.

    On a CPU: the resident memory of this process, and None.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return host_bytes()[0], None


def memory_limit(device: torch.device) -> int:
    """Return the bytes that this process may use of its device.

    On a GPU this is the size of its memory. On a CPU it is the smallest of host memory, the limits
    of control groups (cgroups) and RLIMIT_AS (ulimit -v).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [psutil.virtual_memory().total, *control_group_limits()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:  # it limits virtual memory, most of which is not resident
        usage = psutil.Process().memory_info()
        limits.append(soft - (usage.vms - usage.rss))
    return min(limits)


def control_group_limits() -> list[int]:
    """Return the memory limits that a scheduler or a container has set (cgroup v2 or v1)."""
    return [limit for _, limit in _limited_groups()]


def _limited_groups() -> Iterator[tuple[Path, int]]:
    """Yield the control groups of this process that have a memory limit, and the limit."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            path = line.split(":", 2)[2].lstrip("/")
            for root, file in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
                group = Path("/sys/fs/cgroup", root, path)
                for folder in (group, *group.parents):
                    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                        yield folder, int((folder / file).read_text())


def free_host_bytes() -> int:
    """Return the bytes of host memory that are free, also below the limits of control groups."""
    free = [psutil.virtual_memory().available]
    for folder, limit in _limited_groups():
        for file in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                used = int((folder / file).read_text())
                lines = map(str.split, (folder / "memory.stat").read_text().splitlines())
                counts = {name: int(value) for name, value in lines}
                # The kernel drops these copies of files first.
                dropped = counts.get("total_inactive_file", counts.get("inactive_file", 0))
                free.append(limit - used + dropped)
    return max(0, min(free))


def unseen_bytes(device: torch.device) -> dict[str, int] | None:
    """Return the bytes in use of a GPU as nvidia-smi reports them; None on a CPU.

    "unseen" is outside of PyTorch's allocator: the CUDA context, workspaces of libraries, NCCL's
    buffers, other processes.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return {"used": used, "total": total, "unseen": used - torch.cuda.memory_reserved(device)}


def written_bytes() -> int:
    """Return the bytes that this process has written to disks; 0 where they are not counted."""
    try:
        return psutil.Process().io_counters().write_bytes
    except (AttributeError, psutil.Error):
        return 0


def folder_bytes(folder: str | None) -> int:
    """Return the bytes of all files in a folder and its subfolders; 0 for None."""
    files = Path(folder).rglob("*") if folder else ()
    return sum(file.stat().st_size for file in files if file.is_file())
