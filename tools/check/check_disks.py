"""--check: the disks that a run writes to."""

import os
import shutil
import tempfile
import time
from mmap import mmap
from pathlib import Path

from distributed_training.cli import checks
from distributed_training.errors import UserError
from distributed_training.files.cache import cache_folder
from distributed_training.settings.data import DataSettings
from distributed_training.settings.output import OutputSettings
from distributed_training.units import GB, MB
from tools.check.check_line import PROBLEM, WARNING, Line, line_of


def nvme(folder: str) -> Line:
    """Measure the speed of the disk of --nvme_path."""
    try:
        written, read = _disk_speed(folder)
    except OSError as error:
        remedy = "name a local disk with --nvme_path; NFS and tmpfs often cannot do direct I/O"
        return Line(PROBLEM, "NVMe", f"{folder}: {error.strerror} (direct I/O)", remedy)
    text = (
        f"{folder}: {shutil.disk_usage(folder).free / GB:.1f} GB free, "
        f"writes {written / GB:.2f} and reads {read / GB:.2f} GB/s (direct I/O)"
    )
    remedy = "slow for infinity: name a local NVMe disk with --nvme_path"
    return line_of(min(written, read) >= 0.5 * GB, "NVMe", text, remedy)


def _disk_speed(folder: str, size: int = 256 * MB) -> tuple[float, float]:
    """Measure the (write, read) speed of a folder in bytes per second, with direct I/O.

    Raises:
        OSError: the folder has no space or no direct I/O.
    """
    piece = mmap(-1, 4 * MB)  # direct I/O needs aligned memory, and mmap aligns to pages
    piece.write(os.urandom(MB) * 4)
    speeds = []

    def direct(path: str, flags: int) -> int:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))

    with tempfile.TemporaryDirectory(prefix="distributed_training_", dir=folder) as test_folder:
        for mode, move in (("wb", "write"), ("rb", "readinto")):
            with open(f"{test_folder}/probe", mode, buffering=0, opener=direct) as file:
                start = time.perf_counter()
                moved = sum(getattr(file, move)(piece) for _ in range(size // len(piece)))
                os.fsync(file.fileno())
                speeds.append(moved / (time.perf_counter() - start))
    return speeds[0], speeds[1]


def disk(output: OutputSettings, eval_only: bool, model: str, data: DataSettings) -> Line:
    """Check the folder of the export, and the free space for results, checkpoints and tokens."""
    try:
        checks.check_export_folder(output, eval_only, model, data)
    except UserError as error:
        return Line(PROBLEM, "output", str(error))
    free, full = {}, []
    for folder in (Path(output.output_dir or "runs"), cache_folder(data.cache_dir)):
        existing = next(f for f in (folder.absolute(), *folder.absolute().parents) if f.exists())
        free[folder] = shutil.disk_usage(existing).free
        inodes = os.statvfs(existing)
        if inodes.f_files and not inodes.f_favail:  # some file systems have no fixed number
            full.append(str(folder))
    if full:
        problem = f"{', '.join(full)} cannot hold another file: its disk has no free inode"
        return Line(PROBLEM, "disk", problem, "remove files (df -i), or name other folders")
    text = "; ".join(f"{folder} {size / GB:.1f} GB free" for folder, size in free.items())
    remedy = (
        "a checkpoint has 12 bytes per parameter: free some space (df -h, quota -s), "
        "or name other folders with --output_dir and --cache_dir"
    )
    least = min(free.values())
    return line_of(least >= GB, "disk", text, remedy, PROBLEM if least < 50 * MB else WARNING)
