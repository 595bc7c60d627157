"""--check: tests what a run needs of this machine and its network, without training.

Each result is one line: ok, a warning, or a problem that prevents the chosen strategy from running,
with a remedy.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from support import PROJECT
from support.cli import paths
from support.cli.arguments import choose_seq_length
from support.cli.ds_config import uses_nvme
from support.cluster.context import DistContext
from support.cluster.launch import available_cores, has_nvidia_gpu
from support.errors import EXIT_COMPLETED, EXIT_FAILED, UserError
from support.files import hub_cache
from support.memory import advise, architectures
from support.memory import estimate as planner
from support.redaction import redact
from support.strategies import requirements
from support.strategy import STRATEGIES
from support.units import GB, MB

OK, WARNING, PROBLEM = "ok", "warning", "problem"
MARKS = {OK: "✅", WARNING: "⚠️ ", PROBLEM: "❌"}
IMPORTED = ("torch", "transformers", "datasets", "tokenizers", "safetensors", "deepspeed")


@dataclass(frozen=True)
class Line:
    """Result of one check.

    Attributes:
        status: OK, WARNING or PROBLEM.
        name: what was checked; padded to 13 characters in the output.
        text: the result.
        remedy: what to do if the status is not OK.
    """

    status: str
    name: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{MARKS[self.status]} {self.name:13} {self.text}" + (
            f": {self.remedy}" if self.remedy else ""
        )


def check(args, ctx: DistContext) -> int:
    """Run all checks and print their results; all ranks must call it.

    Rank 0 prints all of its own results, and of the other ranks those that are not ok or differ,
    with their hosts.

    Args:
        args: the flags of the run.
        ctx: this process, with an initialized process group if there are several ranks.
    Returns:
        The exit code: 0 if the chosen strategy can run on every rank.
    """
    parts = (_software, _gpu, _compiler, _ops, _nvme, _disk, _limits, _memory, _hub)
    own_lines = [line for part in parts for line in part(args, ctx)]
    # Printed before the ranks communicate, because the communication may fail.
    for line in own_lines if ctx.is_main else ():
        ctx.console.print(str(line))
    communication = _communication(ctx)
    ranks = ctx.all_gather((socket.gethostname(), own_lines))
    others = _what_differs(ranks)
    more = [communication, *others, *_cluster(ctx)]
    for line in more if ctx.is_main else ():
        ctx.console.print(str(line))
    problem_count = sum(line.status == PROBLEM for line in [communication, *ranks[0][1], *others])
    verdict = (
        f"{problem_count} problem{'s' * (problem_count > 1)} to solve first"
        if problem_count
        else "it can run"
    )
    singular, plural = (
        ("GPU", "GPUs") if ctx.device.type == "cuda" else ("CPU process", "CPU processes")
    )
    processes = f"{ctx.world_size} {plural if ctx.world_size > 1 else singular}"
    if ctx.is_main:
        ctx.console.print(
            f"{MARKS[PROBLEM if problem_count else OK]} "
            f"--strategy {args.strategy} on {processes}: {verdict}"
        )
    return EXIT_FAILED if problem_count else EXIT_COMPLETED


def _what_differs(ranks: list[tuple[str, list[Line]]]) -> list[Line]:
    """Select the results of other ranks that are not ok or differ from those of rank 0.

    Equal results of one host are returned once, with the first rank that has them. Only the results
    for Python, the GPU and the compiler are compared, because sizes of memory and disks differ
    between machines.
    """
    rank0_texts = {line.name: line.text for line in ranks[0][1]}
    selected, reported = [], set()
    for rank, (host, lines) in enumerate(ranks[1:], 1):
        for line in lines:
            own = rank0_texts.get(line.name, "")
            differs = line.name in ("Python", "GPU", "compiler") and _without_sizes(
                line.text
            ) != _without_sizes(own)
            is_new = (line.status != OK or differs) and not (
                host == ranks[0][0] and line.text == own
            )
            if is_new and (host, line.name, line.text) not in reported:
                reported.add((host, line.name, line.text))
                selected.append(
                    Line(line.status, line.name, f"{host}, rank {rank}: {line.text}", line.remedy)
                )
    return selected


def _without_sizes(text: str) -> str:
    return re.sub(r"[\d.]+ of [\d.]+ GB free", "", text)


# ------------------------------------------------------------------------------------- this machine


def _software(args, ctx: DistContext) -> Iterator[Line]:
    tested = dict(re.findall(r"^([\w-]+)==(\S+)", (PROJECT / "constraints.txt").read_text(), re.M))
    minimum = dict(
        re.findall(r"^([\w-]+)>=(\S+)", (PROJECT / "requirements.txt").read_text(), re.M)
    )
    installed, differing, problems = [], [], []
    for name in IMPORTED:
        try:
            installed_version = version(name)
        except PackageNotFoundError:
            if name != "deepspeed":
                problems.append(f"{name} is missing")
            continue
        installed.append(f"{name} {installed_version}")
        if _numbers(installed_version) < _numbers(minimum.get(name, "0")):
            problems.append(f"{name} {installed_version} is older than {minimum[name]}")
        elif name in tested and _numbers(installed_version) != _numbers(tested[name]):
            differing.append(f"{name} {tested[name]}")
    text = f"{sys.version.split()[0]}; {', '.join(installed)}"
    if problems:
        yield Line(PROBLEM, "Python", "; ".join(problems), "pip install -r requirements.txt")
    elif differing:
        yield Line(WARNING, "Python", text, f"tested with {', '.join(differing)}")
    else:
        yield Line(OK, "Python", f"{text} (the tested versions)")
    if args.ds_config_dict and not _has("deepspeed"):
        yield Line(
            PROBLEM,
            "deepspeed",
            f"No module named deepspeed, which {args.strategy} needs",
            "pip install deepspeed",
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text.split("+")[0])[:3])


def _has(module: str) -> bool:
    with contextlib.suppress(PackageNotFoundError):
        return bool(version(module))
    return False


def _gpu(args, ctx: DistContext) -> Iterator[Line]:
    if ctx.device.type != "cuda":
        text = f"none seen; training in {ctx.precision} on {available_cores()} CPU cores"
        if has_nvidia_gpu():
            built = (
                f"this torch {torch.__version__} is built for CUDA {torch.version.cuda or 'none'}"
            )
            yield Line(
                WARNING,
                "GPU",
                text,
                f"the host has one: {built}; see nvidia-smi and CUDA_VISIBLE_DEVICES",
            )
        else:
            yield Line(OK, "GPU", text)
        return
    properties = torch.cuda.get_device_properties(ctx.device)
    free, total = torch.cuda.mem_get_info(ctx.device)
    capability = f"{properties.major}.{properties.minor}"
    text = (
        f"{properties.name}, {free / GB:.1f} of {total / GB:.1f} GB free, "
        f"compute capability {capability}, torch for CUDA {torch.version.cuda}, "
        f"driver {_nvidia_smi('driver_version')}, {ctx.precision}"
    )
    if free < 0.8 * total:
        yield Line(
            WARNING, "GPU", text, "another process holds a part of it (nvidia-smi shows which)"
        )
    else:
        yield Line(OK, "GPU", text)
    if torch.cuda.device_count() > 1:
        topology = _run("nvidia-smi", "topo", "-m") or ""
        linked = "NVLink" if re.search(r"\bNV\d+", topology) else "PCIe" if topology else "unknown"
        yield Line(OK, "GPUs joined by", f"{linked} ({torch.cuda.device_count()} on this host)")


def _nvidia_smi(field: str) -> str:
    return (_run("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader") or "unknown").split(
        "\n"
    )[0]


def _run(*command: str) -> str | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _compiler(args, ctx: DistContext) -> Iterator[Line]:
    compiler, ninja = shutil.which(os.environ.get("CXX", "c++")), shutil.which("ninja")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [] if compiler else ["a C++ compiler (apt install build-essential, module load gcc)"]
    missing += [] if ninja else ["ninja (pip install ninja)"]
    missing += [] if headers.exists() else ["Python's headers (apt install python3-dev)"]
    if missing:
        needed = args.ds_config_dict is not None and not _passes(
            requirements.check_compiler, args.strategy, ctx.device
        )
        needed = needed or bool(
            args.ds_config_dict and requirements.ops_to_compile(args.strategy, ctx.device)
        )
        reason = (
            f"{args.strategy} compiles parts of DeepSpeed"
            if needed
            else "DeepSpeed's strategies may need them"
        )
        yield Line(
            PROBLEM if needed else WARNING, "compiler", f"missing: {', '.join(missing)}", reason
        )
    else:
        release = (_run(compiler, "--version") or "").split("\n")[0]
        yield Line(OK, "compiler", f"{release}; ninja and Python's headers are there")
    if ctx.device.type == "cuda":
        nvcc = shutil.which("nvcc") or os.path.join(
            os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc"
        )
        release_match = re.search(r"release ([\d.]+)", _run(nvcc, "--version") or "")
        remedy = "infinity compiles with the toolkit of torch's CUDA (module load cuda, CUDA_HOME)"
        if release_match and release_match[1].split(".")[0] == torch.version.cuda.split(".")[0]:
            yield Line(OK, "nvcc", f"release {release_match[1]}")
        else:
            text = (
                f"release {release_match[1]}, torch is for CUDA {torch.version.cuda}"
                if release_match
                else "not found"
            )
            yield Line(
                PROBLEM if STRATEGIES[args.strategy].uses_nvme else WARNING, "nvcc", text, remedy
            )


def _passes(check, *args) -> bool:
    try:
        check(*args)
    except UserError:
        return False
    return True


def _ops(args, ctx: DistContext) -> Iterator[Line]:
    if not _has("deepspeed"):
        return
    states = []
    for strategy in ("zero1", "offload", "infinity"):
        to_compile = requirements.ops_to_compile(strategy, ctx.device)
        names = {"zero1": "zero1, zero2, zero3"}.get(strategy, strategy)
        states.append(
            f"{names} {'will compile ' + ', '.join(to_compile) if to_compile else 'ready'}"
        )
    try:
        requirements.check_async_io(ctx.device)
        yield Line(OK, "DeepSpeed ops", "; ".join(states))
    except UserError as error:
        status = PROBLEM if args.ds_config_dict and uses_nvme(args.ds_config_dict) else WARNING
        yield Line(status, "DeepSpeed ops", "; ".join(states[:2]) + "; infinity cannot", str(error))


def _nvme(args, ctx: DistContext) -> Iterator[Line]:
    if not (args.ds_config_dict and uses_nvme(args.ds_config_dict) and ctx.launch.is_node_leader):
        return  # only one rank per node: several would share the bandwidth
    folder = args.nvme_path or tempfile.gettempdir()
    try:
        written, read = _disk_speed(folder)
        free = shutil.disk_usage(folder).free
        text = (
            f"{folder}: {free / GB:.1f} GB free, "
            f"writes {written / GB:.2f} and reads {read / GB:.2f} GB/s (direct I/O)"
        )
        slow = min(written, read) < 0.5 * GB
        remedy = "slow for infinity: name a local NVMe disk with --nvme_path" if slow else ""
        yield Line(WARNING if slow else OK, "NVMe", text, remedy)
    except OSError as error:
        remedy = (
            "name a folder with space on a local disk with --nvme_path; "
            "NFS and tmpfs often cannot do direct I/O"
        )
        yield Line(PROBLEM, "NVMe", f"{folder}: {error.strerror} (direct I/O)", remedy)


def _disk_speed(folder: str, size: int = 256 * MB) -> tuple[float, float]:
    """Measure the (write, read) speed of a folder in bytes per second, with direct I/O.

    A temporary file of `size` bytes is written and read in pieces of 4 MiB.

    Raises:
        OSError: the folder has no space or no direct I/O, or reading or writing fails.
    """
    piece = mmap.mmap(-1, 4 * MB)  # direct I/O needs aligned memory, and mmap aligns to pages
    piece.write(os.urandom(MB) * 4)
    speeds = []
    with tempfile.TemporaryDirectory(prefix="distributed_training_", dir=folder) as test_folder:
        for flags, move in ((os.O_CREAT | os.O_WRONLY, os.writev), (os.O_RDONLY, os.readv)):
            file = os.open(Path(test_folder) / "probe", flags | getattr(os, "O_DIRECT", 0))
            try:
                start, moved = time.perf_counter(), 0
                while moved < size:  # a call may move less than it was asked to
                    count = move(file, [piece])
                    if not count:
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    moved += count
                os.fsync(file)
                speeds.append(moved / (time.perf_counter() - start))
            finally:
                os.close(file)
    return speeds[0], speeds[1]


def _disk(args, ctx: DistContext) -> Iterator[Line]:
    """Check the free space for results, checkpoints and tokens."""
    folders = {
        "output": Path(args.output_dir or "runs"),
        "cache": hub_cache.cache_folder(args.cache_dir),
    }
    free = {}
    for purpose, folder in folders.items():
        existing_parent = next(
            parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()
        )
        free[f"{purpose} {folder}"] = shutil.disk_usage(existing_parent).free
    try:
        paths.check_export_folder(args)
    except UserError as error:
        yield Line(PROBLEM, "output", str(error))
    text = "; ".join(f"{purpose} {size / GB:.1f} GB free" for purpose, size in free.items())
    minimum = min(free.values())
    if minimum < GB:
        remedy = (
            "free some space (df -h, quota -s), "
            "or name other folders with --output_dir and --cache_dir"
        )
        yield Line(
            PROBLEM if minimum < 50 * MB else WARNING,
            "disk",
            text,
            f"a checkpoint has 12 bytes a parameter: {remedy}",
        )
    else:
        yield Line(OK, "disk", text)


def _limits(args, ctx: DistContext) -> Iterator[Line]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 1024:
        yield Line(
            PROBLEM if files < 128 else WARNING,
            "open files",
            f"{files} (ulimit -n)",
            "ulimit -n 65536 before the run",
        )
    else:
        yield Line(OK, "open files", f"{files} (ulimit -n)")
    if ctx.device.type == "cuda" and STRATEGIES[args.strategy].offloads:
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if locked == resource.RLIM_INFINITY:
            yield Line(OK, "locked memory", "unlimited")
        else:
            yield Line(
                WARNING,
                "locked memory",
                f"{locked / MB:.0f} MB (ulimit -l)",
                "offload pins host memory: ulimit -l unlimited, if pinning fails",
            )
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        small = free < 256 * MB * ctx.launch.local_world_size
        yield Line(
            WARNING if small else OK,
            "/dev/shm",
            f"{free / GB:.1f} GB free",
            "NCCL and DeepSpeed share memory there: docker run --shm-size=8g" if small else "",
        )


def _memory(args, ctx: DistContext) -> Iterator[Line]:
    limits = advise.memory_limits(ctx)
    capacity = (
        f"{limits.gpu / GB:.1f} GB for each {'GPU' if ctx.device.type == 'cuda' else 'process'}"
    )
    try:
        model = architectures.find_architecture(args.model)
        try:
            seq_length = choose_seq_length(args, model.limit)
        except UserError as error:
            yield Line(PROBLEM, "sequence length", str(error))
            return
        work = advise.planned_work(args.replace(seq_length=seq_length), ctx, model)
    # The model's config.json is not on this machine, or the planner does not support the flags.
    except UserError:
        yield Line(
            OK,
            "memory",
            f"{capacity}; not planned: "
            "no config.json of the model here, or your own DeepSpeed or FSDP file",
        )
        return
    estimate = planner.predict(work, args.strategy)
    text = f"planned {estimate.total / GB:.1f} of {capacity}"
    if limits.host and estimate.host:
        text += (
            f", {estimate.host * limits.ranks_per_node / GB:.1f} "
            f"of {limits.host / GB:.1f} GB of host memory"
        )
    if limits.hold(estimate):
        yield Line(OK, "memory", text)
    else:
        remedies = [way.flags for way in planner.ways_to_fit(work, args.strategy, limits)]
        yield Line(
            PROBLEM,
            "memory",
            text,
            f"it would fit with {' or '.join(remedies)}"
            if remedies
            else "see scripts/plan_memory.py",
        )


# --------------------------------------------------------------------------------- between machines


def _communication(ctx: DistContext) -> Line:
    """Measure an all-reduce among the ranks: bandwidth with 64 MiB, latency with 8 bytes.

    The bandwidth is the bus bandwidth, the bytes that each rank sends per second: a ring all-reduce
    sends 2 · (N − 1) / N times the message.
    """
    if ctx.world_size == 1:
        return Line(OK, "communication", f"{ctx.backend}; one process, nobody to talk to")
    seconds = {}
    for name, size in (("large", 64 * MB), ("small", 8)):
        tensor = torch.ones(size // 4, device=ctx.device)
        for attempt in range(6):
            if attempt == 1:  # the first all-reduce opens the connections
                _wait_for(ctx)
                start = time.perf_counter()
            dist.all_reduce(tensor)
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] = (time.perf_counter() - start) / 5
    bandwidth = 2 * (ctx.world_size - 1) / ctx.world_size * 64 * MB / seconds["large"]
    hosts = sorted(set(ctx.all_gather(socket.gethostname())))
    interface = os.environ.get(
        "NCCL_SOCKET_IFNAME" if ctx.backend == "nccl" else "GLOO_SOCKET_IFNAME", "chosen by itself"
    )
    text = (
        f"{ctx.backend}, all-reduce over {ctx.world_size} ranks on {', '.join(hosts)}: "
        f"{bandwidth / GB:.2f} GB/s, {1e6 * seconds['small']:.0f} µs; network interface {interface}"
    )
    slow = ctx.backend == "nccl" and bandwidth < GB
    remedy = (
        "slow for GPUs: see NCCL_DEBUG=INFO for the network it took, docs/MULTI_NODE.md"
        if slow
        else ""
    )
    return Line(WARNING if slow else OK, "communication", text, remedy)


def _wait_for(ctx: DistContext) -> None:
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    else:
        dist.barrier()


def _hub(args, ctx: DistContext) -> Iterator[Line]:
    if args.hub_problem:
        yield Line(PROBLEM, "hub", args.hub_problem)
    elif args.hub_offline:
        yield Line(OK, "hub", "not needed: model and data are here or in the cache")
    else:
        yield Line(
            OK, "hub", redact(f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')} answers")
        )


def _cluster(ctx: DistContext) -> Iterator[Line]:
    env = os.environ
    if "SLURM_JOB_ID" in env:
        tasks, cpus = env.get("SLURM_NTASKS", "1"), env.get("SLURM_CPUS_PER_TASK", "1")
        nodes = env.get("SLURM_JOB_NODELIST", "")
        gpus = env.get("SLURM_GPUS_ON_NODE", 0)
        text = (
            f"job {env['SLURM_JOB_ID']} on {nodes}, "
            f"{tasks} tasks, {cpus} cores each, {gpus} GPUs a node"
        )
        few = ctx.launch.launcher == "srun" and cpus == "1"
        yield Line(
            WARNING if few else OK,
            "Slurm",
            text,
            "--cpus-per-task=8 lets data and offload keep up" if few else "",
        )
    elif shutil.which("squeue"):
        yield Line(
            OK,
            "Slurm",
            "there; not inside of a job "
            "(a pending one: squeue --me --start says why and until when)",
        )
    address = f"{ctx.launch.master_addr}:{ctx.launch.master_port}"
    yield Line(
        OK,
        "rendezvous",
        f"{ctx.launch.launcher}, master {address}, {ctx.nodes} node{'s' * (ctx.nodes > 1)}, "
        f"{ctx.launch.local_world_size} rank{'s' * (ctx.launch.local_world_size > 1)} on each",
    )
