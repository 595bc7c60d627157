"""Detection of the launcher, and the end of a run whose ranks cannot communicate yet.

Imports nothing heavy, so that wrong arguments are reported within a fraction of a second.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from support import process
from support.errors import LESS_MEMORY, OutOfMemory, UserError, explain, print_traceback

# A variable that only this launcher sets.
LAUNCHER_MARKS = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}
START_SKEW_SECONDS = 10  # time between the starts of the ranks on busy machines


@dataclass(frozen=True)
class Launch:
    """Rank of this process, size of the run, and address of its store."""

    launcher: str  # "python", "torchrun" (also for accelerate), "deepspeed", "srun" or "simulated"
    rank: int  # index of this process among all processes, from 0
    local_rank: int  # the same among the processes of this node
    world_size: int  # number of all processes
    local_world_size: int  # number of processes of this node
    node: int  # index of this node, from 0
    master_addr: str  # where the store of the run listens
    master_port: int

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only process that prints and writes."""
        return self.rank == 0

    @property
    def is_node_leader(self) -> bool:
        """True on local rank 0 of each node, which downloads and tokenizes."""
        return self.local_rank == 0


def detect_launch() -> Launch:
    """Read the launcher's environment variables, and set those that torch and DeepSpeed read.

    torchrun, accelerate and deepspeed set RANK; srun sets SLURM_*. Without either the run has a
    single process.

    Raises:
        UserError: a variable is missing, invalid or contradicts another one, or Slurm's node list
            cannot be expanded.
    """
    env = os.environ
    # The shell of a batch script also has SLURM_PROCID, but is no job step.
    in_step = "SLURM_PROCID" in env and ("SLURM_STEP_ID" in env or "SLURM_JOB_ID" not in env)
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            launch = _from_rank_variables(env, _tasks(env) if in_step else 1)
        elif in_step:
            launch = _from_slurm(env)
        else:
            launch = Launch("python", 0, 0, 1, 1, 0, "127.0.0.1", free_port())
    except (KeyError, ValueError) as error:
        raise UserError(
            f"The launcher's environment is incomplete: {error}. "
            "Start with python, torchrun or srun."
        ) from error
    if not (launch.rank < launch.world_size and launch.local_rank < launch.local_world_size):
        raise UserError(
            f"RANK={launch.rank} or LOCAL_RANK={launch.local_rank} does not fit "
            f"WORLD_SIZE={launch.world_size}: unset all of them, or use torchrun."
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


def agent_hosts_store() -> bool:
    """Return whether torchrun's agent hosts the store of the run instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def simulated(launch: Launch, world_size: int) -> Launch:
    """Return rank 0 of a simulated run of `world_size` ranks in this process (--simulate_gpus)."""
    if launch.world_size > 1:
        raise UserError(
            "--simulate_gpus measures one rank in one process: "
            "start it with python, without a launcher."
        )
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    return replace(launch, launcher="simulated", world_size=world_size, local_world_size=world_size)


def _from_rank_variables(env: Mapping[str, str], tasks: int) -> Launch:
    """Read the variables of torchrun and deepspeed; `tasks` is the number of tasks of srun."""
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    # LOCAL_SIZE, CROSS_RANK and CROSS_SIZE are set by the deepspeed launcher.
    local_world = int(env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or world) or 1
    local_rank = int(env.get("LOCAL_RANK") or rank % local_world)
    node = int(env.get("GROUP_RANK") or env.get("CROSS_RANK") or rank // local_world)
    nodes = int(env.get("GROUP_WORLD_SIZE") or env.get("CROSS_SIZE") or world)
    launcher = next((name for name, mark in LAUNCHER_MARKS.items() if mark in env), "python")
    if world < tasks or (nodes < tasks and launcher != "python"):
        raise UserError(
            f"Each of the {tasks} tasks of srun starts a separate run of {world} ranks "
            f"({launcher}): use `srun python real_model_example.py …` with one task per GPU and "
            "without RANK and WORLD_SIZE, or one torchrun per node (srun --ntasks-per-node=1 "
            f"torchrun --nnodes={tasks} --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT …)."
        )
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", 29500))
    return Launch(launcher, rank, local_rank, world, local_world, node, address, port)


def _tasks(env: Mapping[str, str]) -> int:
    """Return the number of tasks of this step; SLURM_NTASKS is that of the whole allocation."""
    return int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"])


def _from_slurm(env: Mapping[str, str]) -> Launch:
    rank, world, local_rank = int(env["SLURM_PROCID"]), _tasks(env), int(env["SLURM_LOCALID"])
    node = int(env.get("SLURM_NODEID", 0))
    # The tasks on each node of the step, for example "3,1" or "4(x2),1".
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", str(world)))
    per_node = [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]
    # Every rank must compute the same port. Jobs on the same node rarely get the same one.
    number = 101 * int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))
    port = int(env.get("MASTER_PORT") or 20000 + number % 20000)
    address = env.get("MASTER_ADDR") or _first_slurm_host(env)
    return Launch("srun", rank, local_rank, world, per_node[node], node, address, port)


def _first_slurm_host(env: Mapping[str, str]) -> str:
    """Return the first node of the step, or of the job.

    Slurm's list is compressed ("gpu[07-08,11]"), so `scontrol` must expand it.
    """
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    if not re.search(r"[\[,]", nodes):
        return nodes
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"Cannot expand Slurm's node list {nodes} with scontrol: "
            "export MASTER_ADDR=<first node>."
        ) from error


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is unused at the moment of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def exit_before_start(error: BaseException, verbose: bool) -> NoReturn:
    """Report an error raised before the ranks can communicate, and exit with its exit code.

    Usually every rank raises such an error, and the message of rank 0 is enough: the others wait
    before they print, and the launcher ends them meanwhile.
    """
    text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    place, user_error = "", explain(error)
    if text != "0":
        time.sleep(START_SKEW_SECONDS)
        place = f" [rank {text} on {socket.gethostname()}]"
    if verbose:
        print_traceback(error)
    # A launcher that ends this rank from here on must not cause a second message.
    for number in process.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    print(f"❌ {user_error}{place}", file=sys.stderr, flush=True)
    if isinstance(user_error, OutOfMemory):
        print(f"   {LESS_MEMORY}", file=sys.stderr, flush=True)
    os._exit(user_error.exit_code)
