"""Which launcher started this process, and what must be settled before torch is imported.

Nothing heavy is imported here: a wrong argument is answered within a fraction of a second.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from support.advice import LESS_MEMORY
from support.errors import OutOfMemory, UserError, explain
from support.redaction import print_traceback


@dataclass(frozen=True)
class Launch:
    """This process's place among all processes of the run.

    Attributes:
        launcher: "python", "torchrun" (also accelerate's several processes), "deepspeed", "srun" or
            "simulated".
        rank, world_size: place among all processes; 0 … world_size - 1.
        local_rank, local_world_size: the same among the processes of this node.
        node: number of this node.
        master_addr, master_port: where rank 0's store listens.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    master_addr: str
    master_port: int

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes."""
        return self.rank == 0

    @property
    def is_node_leader(self) -> bool:
        """True on the one process of each node that downloads and tokenises."""
        return self.local_rank == 0


def detect_launch() -> Launch:
    """Read the launcher's environment variables and complete them (RANK, WORLD_SIZE, MASTER_ADDR,
    …).

    torchrun, accelerate and deepspeed set RANK; srun sets SLURM_*; without either this is a single
    process.
    Raises:
        UserError: the variables contradict each other or Slurm's node list cannot be read.
    """
    env = os.environ
    # A batch script's own shell has SLURM_PROCID, too, but no step: there `python` is one process.
    in_step = "SLURM_PROCID" in env and ("SLURM_STEP_ID" in env or "SLURM_JOB_ID" not in env)
    try:
        if "RANK" in env and "WORLD_SIZE" in env and not (in_step and _exported_to_all_tasks(env)):
            launch = _from_rank_variables(env)
        elif in_step:
            launch = _from_slurm(env)
            _report_overruled(env, launch)
        else:
            launch = Launch("python", 0, 0, 1, 1, 0, "127.0.0.1", free_port())
    except (KeyError, ValueError) as error:
        raise UserError(
            f"The launcher's environment is incomplete: {error}. Start with python, torchrun or srun."
        ) from error
    if not 0 <= launch.rank < launch.world_size:
        raise UserError(
            f"RANK={launch.rank} does not fit WORLD_SIZE={launch.world_size}: unset both or use torchrun."
        )
    if not 0 <= launch.local_rank < launch.local_world_size:
        raise UserError(
            f"LOCAL_RANK={launch.local_rank} does not fit LOCAL_WORLD_SIZE={launch.local_world_size}: unset both "
            "or use torchrun."
        )
    if not 0 < launch.master_port < 65536:
        raise UserError(
            f"MASTER_PORT={launch.master_port} is not a port: unset it, or use 1024 to 65535."
        )
    env.update(
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.world_size),
        LOCAL_RANK=str(launch.local_rank),
        LOCAL_WORLD_SIZE=str(launch.local_world_size),
        MASTER_ADDR=launch.master_addr,
        MASTER_PORT=str(launch.master_port),
    )
    return launch


def simulated(launch: Launch, world_size: int) -> Launch:
    """Rank 0 of `world_size`, in this one process.

    Raises:
        UserError: a launcher has started several processes.
    """
    if launch.world_size > 1:
        raise UserError(
            "--simulate_gpus measures one rank in one process: start it with python, without a launcher."
        )
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    return replace(launch, launcher="simulated", world_size=world_size, local_world_size=world_size)


def _from_rank_variables(env) -> Launch:
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_world = int(
        env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or world
    )  # LOCAL_SIZE: deepspeed's name
    if local_world < 1:
        raise ValueError(f"WORLD_SIZE={world}, of which {local_world} are on this node")
    local_rank = int(env.get("LOCAL_RANK") or rank % local_world)
    node = int(env.get("GROUP_RANK") or env.get("CROSS_RANK") or rank // local_world)
    launcher = (
        "torchrun"
        if "TORCHELASTIC_RUN_ID" in env
        else "deepspeed"
        if "CROSS_RANK" in env
        else "python"
    )
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", 29500))
    return Launch(launcher, rank, local_rank, world, local_world, node, address, port)


def _tasks(env) -> int:
    """Tasks of this step. In the shell that salloc opens, SLURM_NTASKS counts what the job may
    start.
    """
    return int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"])


def _exported_to_all_tasks(env) -> bool:
    """Whether RANK was set before srun started this step's tasks, so that all of them have the
    same.

    A batch script that exports RANK and then calls `srun python` does this. A launcher or a shell
    inside of a task is different: there RANK is not yet in the environment with which Slurm started
    the task. The answer must be the same on every task, so it cannot depend on the value of RANK
    alone.
    """
    set_by_launcher = any(name in env for name in ("TORCHELASTIC_RUN_ID", "CROSS_RANK"))
    if set_by_launcher or _tasks(env) < 2:
        return False
    try:
        started_with = Path(f"/proc/{int(env['SLURM_TASK_PID'])}/environ").read_bytes().split(b"\0")
    except (KeyError, ValueError, OSError):  # a container hides the task's process
        return int(env["WORLD_SIZE"]) <= _tasks(env)
    return f"RANK={env['RANK']}".encode() in started_with


def _report_overruled(env, launch: Launch) -> None:
    """One task says that RANK, WORLD_SIZE or MASTER_ADDR of the environment is not used, if one
    contradicts Slurm.
    """
    given = {name: env[name] for name in ("RANK", "WORLD_SIZE") if name in env}
    size_differs = given.get("WORLD_SIZE", str(launch.world_size)) != str(launch.world_size)
    rank_differs = given.get("RANK", str(launch.rank)) != str(launch.rank)
    # With the same RANK in all tasks, task 0 sees no contradiction if it is 0.
    speaker = 0 if size_differs or given.get("RANK") != "0" else 1
    if launch.rank == speaker and (size_differs or rank_differs):
        shown = " ".join(f"{name}={value}" for name, value in given.items())
        print(
            f"ℹ️  {shown} was exported before srun: Slurm's numbers are used, {launch.world_size} ranks.",
            flush=True,
        )
    address = env.get("MASTER_ADDR")
    if launch.rank == 0 and address not in (None, "", launch.master_addr):
        print(
            f"ℹ️  MASTER_ADDR={address} is not one host that all ranks reach: {launch.master_addr} is used.",
            flush=True,
        )


def _from_slurm(env) -> Launch:
    rank, world, local_rank = int(env["SLURM_PROCID"]), _tasks(env), int(env["SLURM_LOCALID"])
    node = int(env.get("SLURM_NODEID", 0))
    # "3,1" or "4(x2),1": tasks on each node of the step
    per_node: list[int] = []
    for tasks, times in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")
    ):
        per_node += [int(tasks)] * min(int(times or 1), node + 1)
    local_world = per_node[node] if node < len(per_node) else world
    # Every rank must arrive at the same port; the job's number spreads jobs that share a node.
    number = 101 * int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))
    port = int(env.get("MASTER_PORT") or 20000 + number % 20000)
    address = env.get("MASTER_ADDR") or ""
    several_nodes = local_world < world
    if not address or re.search(r"[\[\],\s]", address) or (several_nodes and _is_loopback(address)):
        address = _first_slurm_host(env)
    return Launch("srun", rank, local_rank, world, local_world, node, address, port)


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _first_slurm_host(env) -> str:
    """The head node: Slurm's list is compressed ("gpu[07-08,11]"), so `scontrol` must expand it."""
    nodes = (
        env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    )
    if not nodes:
        return "127.0.0.1"
    if not re.search(r"[\[,]", nodes):
        return nodes
    try:
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"Cannot expand Slurm's node list {nodes} with scontrol: export MASTER_ADDR=<first node>."
        ) from error
    return hosts.stdout.split()[0]


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def has_nvidia_gpu() -> bool:
    """Whether this host shows an NVIDIA GPU, asked without importing torch."""
    return (
        Path("/dev/nvidiactl").exists()
        or Path("/dev/dxg").exists()
        or shutil.which("nvidia-smi") is not None
    )


DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # of cuBLAS; PyTorch compares with exactly these


def tune_process(args, launch: Launch) -> None:
    """Set what libraries read once, when they are imported: threads, allocator, log levels.

    Raises:
        UserError: the environment contradicts a flag.
    """
    env = os.environ
    if env.get("ACCELERATE_USE_CPU", "").lower() == "true":  # accelerate launch --cpu
        env["CUDA_VISIBLE_DEVICES"] = ""
    # torchrun sets OMP_NUM_THREADS=1, which makes CPU training and the CPU optimizer of offload
    # crawl.
    if env.get("OMP_NUM_THREADS", "1") == "1":
        granted = env.get("SLURM_CPUS_PER_TASK") if launch.launcher == "srun" else None
        env["OMP_NUM_THREADS"] = granted or str(
            max(1, available_cores() // launch.local_world_size)
        )
    if has_nvidia_gpu():
        enable_expandable_segments()
    else:
        return_freed_memory()
    # DeepSpeed builds its ops with ninja, and pip puts one beside this interpreter. Always that
    # one, if it is there: another version compiles again what this one has built, and a second time
    # when the next run finds this one first.
    own = Path(sys.executable).parent
    if (own / "ninja").exists():
        env["PATH"] = f"{own}{os.pathsep}{env.get('PATH', '')}"
    if args.deterministic:
        check_workspace(env.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_WORKSPACES[0]))
    env.setdefault("TOKENIZERS_PARALLELISM", "true")
    env.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would announce its start and end
    if not args.verbose:
        warnings.simplefilter("ignore")
        # A torch built for CUDA says on a machine with nvcc and without a GPU that it found the
        # first.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        env.setdefault("TRANSFORMERS_VERBOSITY", "error")
        env.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        env.setdefault("DATASETS_VERBOSITY", "error")
        if args.quiet or not (launch.is_main and sys.stderr.isatty()):
            env.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
            env.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def check_workspace(workspace: str) -> None:
    """--deterministic on a GPU needs a workspace of cuBLAS that PyTorch accepts; a CPU does
    without.

    Raises:
        UserError: this shell sets another one.
    """
    if has_nvidia_gpu() and workspace not in DETERMINISTIC_WORKSPACES:
        needed = " or ".join(DETERMINISTIC_WORKSPACES)
        raise UserError(
            f"--deterministic needs CUBLAS_WORKSPACE_CONFIG={needed}, and this shell "
            f"sets {workspace}: unset it."
        )


def available_cores() -> int:
    """Cores this process may run on (a scheduler often grants fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Every torch from 2.6 to 2.13 reads the first of them; 2.9 announces the second and does not read
# it (pytorch/pytorch#183387).
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def enable_expandable_segments() -> None:
    """Let PyTorch's allocator on a GPU extend its segments, instead of adding some of fixed sizes.

    Batches of examples differ in length, and a strategy that shards gathers and frees tensors of
    many sizes: segments that fit nothing any more stay reserved. A user's own settings stay as they
    are.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def return_freed_memory() -> None:
    """While a model loads: give every large tensor back to the kernel as soon as it is freed.

    Without this glibc raises its own threshold with the first large tensor that is freed, and the
    parameters that ZeRO-3 holds for a moment while it shards would stay with the process.
    """
    _mallopt(mmap_threshold=1 << 20)


def keep_freed_memory() -> None:
    """While a model trains on the CPU: keep the memory of one step's activations for the next step.

    Returning it to the kernel costs page faults at every step (benchmarks/RESULTS.md has the cost
    for GPT-2 124M). Tensors of 8 MB and more are returned: if they were kept, they would leave
    holes that nothing else fills.
    """
    _mallopt(mmap_threshold=8 << 20, trim_threshold=(1 << 31) - 1, top_pad=64 << 20)


def _mallopt(**settings: int) -> bool:
    """glibc's mallopt(3); False where the C library has none or refuses."""
    numbers = {"trim_threshold": -1, "top_pad": -2, "mmap_threshold": -3}  # from <malloc.h>
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(numbers[name], value) for name, value in settings.items())


def exit_before_start(error: BaseException, verbose: bool, linger: float = 0) -> NoReturn:
    """Report an error found before the ranks can talk to each other, and end with its exit code.

    As a rule every rank finds such an error, so rank 0 speaks for all. The others wait: a launcher
    ends all ranks when one ends, and rank 0 must have had its say. Whoever is still there then has
    an error of its own.

    Args:
        linger: seconds that rank 0 stays after its message, because it may host the store in which
            the others read.
    """
    given = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    rank = int(given) if re.fullmatch("[0-9]{1,9}", given) else 0  # it may be what is wrong
    host, shown = "", explain(error)
    if rank != 0:
        time.sleep(4)
        host = f" [rank {rank} on {socket.gethostname()}]"
    if verbose:
        print_traceback(error)
    print(f"❌ {shown}{host}", file=sys.stderr, flush=True)
    if isinstance(shown, OutOfMemory):
        print(f"   {LESS_MEMORY}", file=sys.stderr, flush=True)
    time.sleep(linger if rank == 0 else 0)
    os._exit(shown.exit_code)
