"""--check: tests what a run needs of this machine and its network, without training.

Each result is one line: ok, a warning, or a problem that prevents the chosen strategy from running,
with a remedy.
"""

import importlib.util
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from mmap import mmap
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from support import console
from support.cli import checks
from support.cluster.compiler import check_compile
from support.cluster.context import DistContext
from support.cluster.gpus import require_usable
from support.cluster.tuning import available_cores
from support.errors import EXIT_COMPLETED, EXIT_FAILED, EXIT_USAGE, UserError, redact
from support.files.cache import cache_folder
from support.memory import fit
from support.memory.estimate import predict
from support.memory.find_architecture import find_architecture
from support.process import versions
from support.settings.data import choose_seq_length
from support.settings.settings import Settings
from support.units import GB, MB

OK, WARNING, PROBLEM = "✅", "⚠️ ", "❌"
GPU = "GPU"  # name of a line
IMPORTED = ("transformers", "datasets", "tokenizers", "safetensors")


class Line(NamedTuple):
    """Result of one check, and what to do if it is not OK."""

    status: str
    name: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.status} {self.name:13} {self.text}"
        return f"{text}: {self.remedy}" if self.remedy else text


def _line(is_ok: bool, name: str, text: str, remedy: str, status: str = WARNING) -> Line:
    return Line(OK, name, text) if is_ok else Line(status, name, text, remedy)


def check(settings: Settings, ctx: DistContext) -> int:
    """Run all checks and print their results; all ranks must call it.

    Rank 0 prints all of its own results, and of the other ranks those that are not ok.

    Returns:
        The exit code: 0 if the chosen strategy can run on every rank, 2 if a GPU cannot be used, as
        in a run, or 1.
    """
    parts = (_software, _gpu, _compile, _requirements, _nvme, _disk, _limits, _memory, _hub)
    own_lines = [line for part in parts if (line := part(settings, ctx))]
    # Printed before the ranks communicate, because the communication may fail.
    _print(own_lines, ctx)
    communication = [_communication(ctx), _rendezvous(ctx)]
    others = _problems_of(ctx.all_gather((socket.gethostname(), own_lines)))
    _print([*communication, *others], ctx)
    lines = ctx.broadcast_from_rank0([*own_lines, *communication, *others])
    problems = sum(line.status == PROBLEM for line in lines)
    ranks = f"{ctx.world_size} {'GPU' if ctx.device.type == 'cuda' else 'CPU rank'}"
    ranks += "s" * (ctx.world_size > 1)
    mark, verdict = (PROBLEM, f"{problems} to solve first") if problems else (OK, "it can run")
    _print([f"{mark} --strategy {settings.parallelism.strategy} on {ranks}: {verdict}"], ctx)
    if any(line.status == PROBLEM and line.name == GPU for line in lines):
        return EXIT_USAGE
    return EXIT_FAILED if problems else EXIT_COMPLETED


def _print(lines: Iterable[Line | str], ctx: DistContext) -> None:
    for line in lines if ctx.is_main else ():
        console.write(str(line))


def _problems_of(ranks: list[tuple[str, list[Line]]]) -> list[Line]:
    """Return the results of other ranks that are not ok, once per host."""
    seen, found = set(), []
    for rank, (host, lines) in enumerate(ranks):
        for line in lines:
            if rank > 0 and line.status != OK and (host, line) not in seen:
                found.append(line._replace(text=f"{host}, rank {rank}: {line.text}"))
            seen.add((host, line))
    return found


# ------------------------------------------------------------------------------------- this machine


def _software(settings: Settings, ctx: DistContext) -> Line:
    needed = [*IMPORTED, *settings.parallelism.configured.packages]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    text = ", ".join(f"{name} {number}" for name, number in versions().items())[len("python ") :]
    text += f"; No module named {', '.join(missing)}" if missing else ""
    return _line(not missing, "Python", text, "pip install -r requirements.txt", PROBLEM)


def _gpu(settings: Settings, ctx: DistContext) -> Line | None:
    if ctx.device.type != "cuda":
        try:
            require_usable()
        except UserError as error:
            return Line(PROBLEM, GPU, str(error))
        found = "not used" if settings.training.device == "cpu" else "none found"
        text = f"{found}; training in {ctx.precision} on {available_cores()} CPU cores"
        return Line(OK, GPU, text)
    gpu = torch.cuda.get_device_properties(ctx.device)
    free, total = torch.cuda.mem_get_info(ctx.device)
    built = torch.version.cuda or f"ROCm {torch.version.hip}"
    text = (
        f"{gpu.name}, {free / GB:.1f} of {total / GB:.1f} GB free, "
        f"compute capability {gpu.major}.{gpu.minor}, CUDA {built}, {ctx.precision}"
    )
    remedy = "another process uses a part of it (nvidia-smi shows which)"
    return _line(free >= 0.8 * total, GPU, text, remedy)


def _compile(settings: Settings, ctx: DistContext) -> Line | None:
    if not settings.model.compile:
        return None
    try:
        check_compile(ctx.device.type)
    except UserError as error:
        return Line(PROBLEM, "torch.compile", str(error))
    return Line(OK, "torch.compile", "has a compiler")


def _requirements(settings: Settings, ctx: DistContext) -> Line | None:
    """Check the releases that the strategy needs, DeepSpeed's ops, and what compiles them."""
    strategy = settings.parallelism.configured
    try:
        strategy.check_requirements(settings.training.gradient_accumulation_steps)
    except UserError as error:
        return Line(PROBLEM, "requirements", str(error))
    if not strategy.needed_ops():
        return None
    missing = ", ".join(strategy.missing_ops())
    return Line(OK, "DeepSpeed ops", f"the first run compiles {missing}" if missing else "ready")


def _nvme(settings: Settings, ctx: DistContext) -> Line | None:
    if not (settings.parallelism.configured.needs_nvme and ctx.launch.is_node_leader):
        return None  # only one rank per node: several would share the bandwidth
    folder = settings.parallelism.nvme_path or tempfile.gettempdir()
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
    return _line(min(written, read) >= 0.5 * GB, "NVMe", text, remedy)


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


def _disk(settings: Settings, ctx: DistContext) -> Line | None:
    """Check the free space for results, checkpoints and tokens."""
    try:
        checks.check_export_folder(settings)
    except UserError as error:
        return Line(PROBLEM, "output", str(error))
    free = {}
    for folder in (
        Path(settings.output.output_dir or "runs"),
        cache_folder(settings.data.cache_dir),
    ):
        existing = next(f for f in (folder.absolute(), *folder.absolute().parents) if f.exists())
        free[folder] = shutil.disk_usage(existing).free
    text = "; ".join(f"{folder} {size / GB:.1f} GB free" for folder, size in free.items())
    remedy = (
        "a checkpoint has 12 bytes per parameter: free some space (df -h, quota -s), "
        "or name other folders with --output_dir and --cache_dir"
    )
    least = min(free.values())
    return _line(least >= GB, "disk", text, remedy, PROBLEM if least < 50 * MB else WARNING)


def _limits(settings: Settings, ctx: DistContext) -> Line | None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy, status = "ulimit -n 65536 before the run", PROBLEM if files < 128 else WARNING
    return _line(files >= 1024, "open files", f"{files} (ulimit -n)", remedy, status)


def _memory(settings: Settings, ctx: DistContext) -> Line | None:
    limits = fit.memory_limits(ctx)
    owner = "GPU" if ctx.device.type == "cuda" else "process"
    capacity = f"{(limits.gpu or 0) / GB:.1f} GB for each {owner}"
    try:
        model = find_architecture(settings.model.model)
        length = choose_seq_length(settings.data.seq_length, settings.model.model, model.limit)
        work = fit.planned_work(settings, ctx, model, length)
    except UserError as error:
        return Line(WARNING, "memory", f"{capacity}; not planned", str(error))
    estimate = predict(work, settings.parallelism.strategy)
    text = f"planned {estimate.total / GB:.1f} of {capacity}"
    if limits.host and estimate.host:
        host = estimate.host * limits.ranks_per_node
        text += f", {host / GB:.1f} of {limits.host / GB:.1f} GB of host memory"
    fits = limits.hold(estimate)
    ways = [] if fits else fit.remedies(work, settings.parallelism.strategy, limits)
    remedy = f"it would fit with {' or '.join(ways)}" if ways else "see scripts/plan_memory.py"
    return _line(fits, "memory", text, remedy, PROBLEM)


def _hub(settings: Settings, ctx: DistContext) -> Line | None:
    if settings.hub.problem:
        return Line(PROBLEM, "hub", settings.hub.problem)
    answers = f"{redact(os.environ.get('HF_ENDPOINT', 'https://huggingface.co'))} answers"
    local = "not needed: the model and the dataset are local or cached"
    return Line(OK, "hub", local if settings.hub.offline else answers)


# --------------------------------------------------------------------------------- between machines


def _communication(ctx: DistContext) -> Line:
    """Measure collectives among the ranks: bandwidth with 64 and 1 MiB, latency with 8 bytes."""
    if ctx.world_size == 1:
        return Line(OK, "communication", f"{ctx.backend}; a single process")
    latency = _seconds_of(dist.all_reduce, ctx, torch.ones(2, device=ctx.device))
    speeds, small = _bandwidth(ctx, 64 * MB), _bandwidth(ctx, MB)
    hosts = ", ".join(sorted(set(ctx.all_gather(socket.gethostname()))))
    large = ", ".join(f"{kind} {speed / GB:.3g}" for kind, speed in speeds.items())
    of_1_mib = ", ".join(f"{speed / GB:.3g}" for speed in small.values())
    text = (
        f"{ctx.backend} over {ctx.world_size} ranks on {hosts}: {large} GB/s, "
        f"{1e6 * latency:.0f} µs; with 1 MiB {of_1_mib} GB/s"
    )
    is_fast = ctx.backend != "nccl" or speeds["all-reduce"] >= GB
    remedy = "slow for GPUs: NCCL_DEBUG=INFO shows the network in use; see docs/TROUBLESHOOTING.md"
    return _line(is_fast, "communication", text, remedy)


def _bandwidth(ctx: DistContext, message: int) -> dict[str, float]:
    """Measure the bus bandwidth of collectives with messages of so many bytes.

    It is the bytes that each rank sends per second if the collective is a ring: 2 · (N − 1) / N
    times the message for an all-reduce, half of that for the others.
    """
    ranks = ctx.world_size
    part = torch.ones(max(1, message // 4 // ranks), device=ctx.device)  # elements of 4 bytes
    whole = part.repeat(ranks)
    sent = (ranks - 1) / ranks * whole.nbytes
    return {
        "all-reduce": 2 * sent / _seconds_of(dist.all_reduce, ctx, whole),
        "all-gather": sent / _seconds_of(dist.all_gather_into_tensor, ctx, whole, part),
        "reduce-scatter": sent / _seconds_of(dist.reduce_scatter_tensor, ctx, part, whole),
    }


def _seconds_of(collective: Callable, ctx: DistContext, *tensors: torch.Tensor) -> float:
    """Return the median time of some calls of a collective, after a first one that connects.

    The median, because on a busy host a rank that waits for a core delays some calls.
    """
    wait = torch.cuda.synchronize if ctx.device.type == "cuda" else dist.barrier
    seconds = []
    for _ in range(1 + (3 if tensors[0].nbytes > MB else 9)):
        wait()
        start = time.perf_counter()
        collective(*tensors)
        if ctx.device.type == "cuda":
            wait()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def _rendezvous(ctx: DistContext) -> Line:
    launch, plural = ctx.launch, "s" * (ctx.nodes > 1)
    text = (
        f"{launch.launcher}, master {launch.master_addr}:{launch.master_port}, "
        f"{ctx.nodes} node{plural}, ranks per node: {launch.local_world_size}"
    )
    remedy = "one core per task, and data preparation and offload need more: --cpus-per-task=8"
    one_core = os.environ.get("SLURM_CPUS_PER_TASK", "1") == "1"
    return _line(launch.launcher != "srun" or not one_core, "rendezvous", text, remedy)
