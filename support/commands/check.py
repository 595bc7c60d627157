"""--check: tests what a run needs of this machine and its network, without training.

Each result is one line: ok, a warning, or a problem that prevents the chosen strategy from running,
with a remedy.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from mmap import mmap
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from support import PROJECT
from support.cli import checks
from support.cli.arguments import Arguments, choose_seq_length
from support.cli.ds_config import configured_strategy
from support.cluster.context import DistContext
from support.cluster.tuning import available_cores, has_nvidia_gpu
from support.errors import EXIT_COMPLETED, EXIT_FAILED, UserError, redact
from support.files import hub_cache
from support.memory import architectures, fit
from support.memory.estimate import predict
from support.strategies import ops
from support.tables import STRATEGIES
from support.units import GB, MB

OK, WARNING, PROBLEM = "ok", "warning", "problem"
MARKS = {OK: "✅", WARNING: "⚠️ ", PROBLEM: "❌"}
IMPORTED = ("torch", "transformers", "datasets", "tokenizers", "safetensors", "deepspeed")


class Line(NamedTuple):
    """Result of one check."""

    status: str
    name: str  # what was checked
    text: str
    remedy: str = ""  # what to do if the status is not OK

    def __str__(self) -> str:
        text = f"{MARKS[self.status]} {self.name:13} {self.text}"
        return f"{text}: {self.remedy}" if self.remedy else text


def _line(is_ok: bool, name: str, text: str, remedy: str, status: str = WARNING) -> Line:
    return Line(OK, name, text) if is_ok else Line(status, name, text, remedy)


def check(args: Arguments, ctx: DistContext) -> int:
    """Run all checks and print their results; all ranks must call it.

    Rank 0 prints all of its own results, and of the other ranks those that are not ok.

    Returns:
        The exit code: 0 if the chosen strategy can run on every rank.
    """
    parts = (_software, _gpu, _ops, _nvme, _disk, _limits, _memory, _hub)
    own_lines = [line for part in parts for line in part(args, ctx)]
    # Printed before the ranks communicate, because the communication may fail.
    _print(own_lines, ctx)
    communication = _communication(ctx)
    others = _problems_of(ctx.all_gather((socket.gethostname(), own_lines)))
    _print((communication, *others, *_cluster(ctx)), ctx)
    lines = ctx.broadcast_from_rank0((*own_lines, communication, *others))
    problems = sum(line.status == PROBLEM for line in lines)
    verdict = f"{_count(problems, 'problem')} to solve first" if problems else "it can run"
    ranks = _count(ctx.world_size, "GPU" if ctx.device.type == "cuda" else "CPU rank")
    mark = MARKS[PROBLEM if problems else OK]
    _print([f"{mark} --strategy {args.strategy} on {ranks}: {verdict}"], ctx)
    return EXIT_FAILED if problems else EXIT_COMPLETED


def _print(lines: Iterable[Line | str], ctx: DistContext) -> None:
    for line in lines if ctx.is_main else ():
        ctx.console.print(str(line))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _problems_of(ranks: list[tuple[str, list[Line]]]) -> list[Line]:
    """Return the results of other ranks that are not ok, once per host."""
    seen = {(ranks[0][0], line) for line in ranks[0][1]}
    selected = []
    for rank, (host, lines) in enumerate(ranks):
        for line in lines:
            if line.status != OK and (host, line) not in seen:
                seen.add((host, line))
                selected.append(line._replace(text=f"{host}, rank {rank}: {line.text}"))
    return selected


# ------------------------------------------------------------------------------------- this machine


def _software(args: Arguments, ctx: DistContext) -> Iterator[Line]:
    supported = _releases("requirements/core.txt") | _releases("requirements/deepspeed.txt")
    listed, problems = [sys.version.split()[0]], []
    for name in IMPORTED:
        try:
            release = version(name)
        except PackageNotFoundError:
            if name != "deepspeed" or args.ds_config_dict:
                problems.append(f"No module named {name}, which {args.strategy} needs")
            continue
        listed.append(f"{name} {release}")
        # Containers have builds such as 2.7.0a0+79aa17489c.
        if not supported[name].contains(Version(release).base_version):
            problems.append(f"this project needs {name}{supported[name]}")
    text = ", ".join([*listed, *problems])
    yield _line(not problems, "Python", text, "pip install -r requirements.txt", PROBLEM)


def _releases(file: str) -> dict[str, SpecifierSet]:
    """Read which releases of each package a file of requirements allows on this Python."""
    lines = (PROJECT / file).read_text().splitlines()
    packages = [Requirement(line) for line in lines if line[:1].isalpha()]
    return {p.name: p.specifier for p in packages if p.marker is None or p.marker.evaluate()}


def _gpu(args: Arguments, ctx: DistContext) -> Iterator[Line]:
    if ctx.device.type != "cuda":
        text = f"none found; training in {ctx.precision} on {available_cores()} CPU cores"
        built = f"this torch {torch.__version__} is built for CUDA {torch.version.cuda or 'none'}"
        remedy = f"the host has one: {built}; see nvidia-smi and CUDA_VISIBLE_DEVICES"
        yield _line(not has_nvidia_gpu(), "GPU", text, remedy)
        return
    gpu = torch.cuda.get_device_properties(ctx.device)
    free, total = torch.cuda.mem_get_info(ctx.device)
    rocm = torch.version.hip
    platform = f"ROCm {rocm}" if rocm else f"CUDA {torch.version.cuda}"
    drivers = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    text = (
        f"{gpu.name}, {free / GB:.1f} of {total / GB:.1f} GB free, "
        f"compute capability {gpu.major}.{gpu.minor}, torch for {platform}, "
        f"driver {drivers.partition(chr(10))[0] or 'unknown'}, {ctx.precision}"
    )
    remedy = "another process uses a part of it (nvidia-smi shows which)"
    yield _line(free >= 0.8 * total, "GPU", text, remedy)


def _run(*command: str) -> str:
    """Return what a command prints, or "" if it fails or does not exist."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout.strip()


def _ops(args: Arguments, ctx: DistContext) -> Iterator[Line]:
    """Check DeepSpeed's ops, and what compiles those that are missing."""
    compiler = os.environ.get("CXX", "c++")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    tools = {
        "a C++ compiler (apt install build-essential, module load gcc)": shutil.which(compiler),
        "ninja (pip install ninja)": shutil.which("ninja"),
        "Python's headers (apt install python3-dev)": headers.exists(),
    }
    own = configured_strategy(args)
    release = _run(compiler, "--version").partition("\n")[0]
    lacking = ", ".join(name for name, is_found in tools.items() if not is_found)
    status = PROBLEM if args.ds_config_dict and ops.missing_ops(own) else WARNING
    text = f"missing: {lacking}" if lacking else f"{release}; ninja and Python's headers found"
    yield _line(not lacking, "compiler", text, "DeepSpeed's ops need it", status)
    if importlib.util.find_spec("deepspeed") is None:
        return
    missing = {name: ops.missing_ops(STRATEGIES[name]) for name in ("offload", "infinity")}
    states = [
        f"{name} will compile {', '.join(names)}" if names else f"{name} ready"
        for name, names in missing.items()
    ]
    try:
        if "async_io" in missing["infinity"]:
            ops.check_libaio()
        yield Line(OK, "DeepSpeed ops", "; ".join(states))
    except UserError as error:
        status = PROBLEM if own.uses_nvme else WARNING
        yield Line(status, "DeepSpeed ops", f"{states[0]}; infinity cannot run", str(error))


def _nvme(args: Arguments, ctx: DistContext) -> Iterator[Line]:
    if not (configured_strategy(args).uses_nvme and ctx.launch.is_node_leader):
        return  # only one rank per node: several would share the bandwidth
    folder = args.nvme_path or tempfile.gettempdir()
    try:
        written, read = _disk_speed(folder)
    except OSError as error:
        remedy = "name a local disk with --nvme_path; NFS and tmpfs often cannot do direct I/O"
        yield Line(PROBLEM, "NVMe", f"{folder}: {error.strerror} (direct I/O)", remedy)
        return
    text = (
        f"{folder}: {shutil.disk_usage(folder).free / GB:.1f} GB free, "
        f"writes {written / GB:.2f} and reads {read / GB:.2f} GB/s (direct I/O)"
    )
    remedy = "slow for infinity: name a local NVMe disk with --nvme_path"
    yield _line(min(written, read) >= 0.5 * GB, "NVMe", text, remedy)


def _disk_speed(folder: str, size: int = 256 * MB) -> tuple[float, float]:
    """Measure the (write, read) speed of a folder in bytes per second, with direct I/O.

    Raises:
        OSError: the folder has no space or no direct I/O.
    """
    piece = mmap(-1, 4 * MB)  # direct I/O needs aligned memory, and mmap aligns to pages
    piece.write(os.urandom(MB) * 4)
    speeds = []
    with tempfile.TemporaryDirectory(prefix="distributed_training_", dir=folder) as test_folder:
        for flags, move in ((os.O_CREAT | os.O_WRONLY, os.writev), (os.O_RDONLY, os.readv)):
            file = os.open(Path(test_folder) / "probe", flags | getattr(os, "O_DIRECT", 0))
            try:
                start = time.perf_counter()
                moved = sum(move(file, [piece]) for _ in range(size // len(piece)))
                os.fsync(file)
                speeds.append(moved / (time.perf_counter() - start))
            finally:
                os.close(file)
    return speeds[0], speeds[1]


def _disk(args: Arguments, ctx: DistContext) -> Iterator[Line]:
    """Check the free space for results, checkpoints and tokens."""
    free = {}
    output, cache = Path(args.output_dir or "runs"), hub_cache.cache_folder(args.cache_dir)
    for name, folder in (("output", output), ("cache", cache)):
        existing = next(f for f in (folder.absolute(), *folder.absolute().parents) if f.exists())
        free[f"{name} {folder}"] = shutil.disk_usage(existing).free
    try:
        checks.check_export_folder(args)
    except UserError as error:
        yield Line(PROBLEM, "output", str(error))
    text, least = (
        "; ".join(f"{n} {f / GB:.1f} GB free" for n, f in free.items()),
        min(free.values()),
    )
    remedy = (
        "a checkpoint has 12 bytes per parameter: free some space (df -h, quota -s), "
        "or name other folders with --output_dir and --cache_dir"
    )
    yield _line(least >= GB, "disk", text, remedy, PROBLEM if least < 50 * MB else WARNING)


def _limits(args: Arguments, ctx: DistContext) -> Iterator[Line]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy, status = "ulimit -n 65536 before the run", PROBLEM if files < 128 else WARNING
    yield _line(files >= 1024, "open files", f"{files} (ulimit -n)", remedy, status)
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        remedy = "NCCL shares memory there: docker run --shm-size=8g"
        is_enough = free >= 256 * MB * ctx.launch.local_world_size
        yield _line(is_enough, "/dev/shm", f"{free / GB:.1f} GB free", remedy)


def _memory(args: Arguments, ctx: DistContext) -> Iterator[Line]:
    limits = fit.memory_limits(ctx)
    owner = "GPU" if ctx.device.type == "cuda" else "process"
    capacity = f"{(limits.gpu or 0) / GB:.1f} GB for each {owner}"
    try:
        model = architectures.find_architecture(args.model)
        try:
            args = args.replace(seq_length=choose_seq_length(args, model.limit))
        except UserError as error:
            yield Line(PROBLEM, "sequence length", str(error))
            return
        work = fit.planned_work(args, ctx, model)
    except UserError as error:
        yield Line(OK, "memory", f"{capacity}; not planned: {error}")
        return
    estimate = predict(work, args.strategy)
    text = f"planned {estimate.total / GB:.1f} of {capacity}"
    if limits.host and estimate.host:
        host = estimate.host * limits.ranks_per_node
        text += f", {host / GB:.1f} of {limits.host / GB:.1f} GB of host memory"
    fits = limits.hold(estimate)
    flags = "" if fits else " or ".join(fit.remedies(work, args.strategy, limits))
    remedy = f"it would fit with {flags}" if flags else "see scripts/plan_memory.py"
    yield _line(fits, "memory", text, remedy, PROBLEM)


def _hub(args: Arguments, ctx: DistContext) -> Iterator[Line]:
    if args.hub_problem:
        yield Line(PROBLEM, "hub", args.hub_problem)
    elif args.hub_offline:
        yield Line(OK, "hub", "not needed: the model and the dataset are local or cached")
    else:
        endpoint = redact(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
        yield Line(OK, "hub", f"{endpoint} answers")


# --------------------------------------------------------------------------------- between machines


def _communication(ctx: DistContext) -> Line:
    """Measure collectives among the ranks: bandwidth with 64 and 1 MiB, latency with 8 bytes.

    scripts/forecast_scaling.py takes these numbers.
    """
    if ctx.world_size == 1:
        return Line(OK, "communication", f"{ctx.backend}; a single process")
    latency = _seconds_of(dist.all_reduce, ctx, torch.ones(2, device=ctx.device))
    speeds, small = _bandwidth(ctx, 64 * MB), _bandwidth(ctx, MB)
    hosts = ", ".join(sorted(set(ctx.all_gather(socket.gethostname()))))
    interface = os.environ.get(f"{ctx.backend.upper()}_SOCKET_IFNAME", "automatic")
    large = ", ".join(f"{kind} {speed / GB:.3g}" for kind, speed in speeds.items())
    of_1_mib = ", ".join(f"{speed / GB:.3g}" for speed in small.values())
    text = (
        f"{ctx.backend} over {ctx.world_size} ranks on {hosts}: {large} GB/s, "
        f"{1e6 * latency:.0f} µs; with 1 MiB {of_1_mib} GB/s; network interface {interface}"
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
    seconds = {
        "all-reduce": _seconds_of(dist.all_reduce, ctx, whole) / 2,
        "all-gather": _seconds_of(dist.all_gather_into_tensor, ctx, whole, part),
        "reduce-scatter": _seconds_of(dist.reduce_scatter_tensor, ctx, part, whole),
    }
    sent = (ranks - 1) / ranks * whole.nbytes
    return {kind: sent / each for kind, each in seconds.items()}


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


def _cluster(ctx: DistContext) -> Iterator[Line]:
    env, launch = os.environ, ctx.launch
    if "SLURM_JOB_ID" in env:
        cores = env.get("SLURM_CPUS_PER_TASK", "1")
        nodes = env.get("SLURM_JOB_NODELIST", "")
        text = f"job {env['SLURM_JOB_ID']} on {nodes}, cores per task: {cores}"
        is_enough = launch.launcher != "srun" or cores != "1"
        remedy = "data preparation and offload need more cores: --cpus-per-task=8"
        yield _line(is_enough, "Slurm", text, remedy)
    ranks = f"{_count(ctx.nodes, 'node')}, {_count(launch.local_world_size, 'rank')} per node"
    store = f"{launch.launcher}, master {launch.master_addr}:{launch.master_port}"
    yield Line(OK, "rendezvous", f"{store}, {ranks}")
