"""Detection of the launcher, and the end of a run whose ranks cannot communicate yet.

Imports nothing heavy, so that wrong arguments are reported within a fraction of a second.
"""

import contextlib
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

from distributed_training import process
from distributed_training.console import visible
from distributed_training.errors import (
    LESS_MEMORY,
    OutOfMemory,
    Stopped,
    TrainingError,
    UserError,
    explain,
)

# A variable that only this launcher sets.
LAUNCHER_MARKS = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}
START_SKEW_SECONDS = 10  # time between the starts of the ranks on busy machines
MOST_RANKS = 100_000
PORTS = 1, 65535
SLURM_IDS = 0, 2**32 - 1  # of jobs and steps
REMEDY = (
    "Correct it, or unset RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and start "
    "with python, torchrun or srun."
)


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
    if "RANK" in env and "WORLD_SIZE" in env:
        launch = _from_rank_variables(env, _tasks(env) if in_step else 1)
    elif in_step:
        launch = _from_slurm(env)
    elif "RANK" in env or "WORLD_SIZE" in env:
        found, missing = sorted(("RANK", "WORLD_SIZE"), key=lambda name: name not in env)
        raise UserError(f"{found} is set, and {missing} is not. {REMEDY}")
    else:
        launch = Launch("python", 0, 0, 1, 1, 0, "127.0.0.1", free_port())
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
    world = _number(env, "WORLD_SIZE", (1, MOST_RANKS))
    rank = _number(env, "RANK", (0, world - 1), "WORLD_SIZE - 1")
    # LOCAL_SIZE, CROSS_RANK and CROSS_SIZE are set by the deepspeed launcher.
    local_world = _number(env, "LOCAL_WORLD_SIZE LOCAL_SIZE", (1, world), "WORLD_SIZE", world)
    local_ranks = 0, local_world - 1
    local_rank = _number(env, "LOCAL_RANK", local_ranks, "ranks per node - 1", rank % local_world)
    nodes = _number(env, "GROUP_WORLD_SIZE CROSS_SIZE", (1, world), "WORLD_SIZE", world)
    node = _number(env, "GROUP_RANK CROSS_RANK", (0, nodes - 1), "nodes - 1", rank // local_world)
    launcher = next((name for name, mark in LAUNCHER_MARKS.items() if mark in env), "python")
    if world < tasks or (nodes < tasks and launcher != "python"):
        hosts = len(_tasks_per_node(env, tasks))
        raise UserError(
            f"Each of the {tasks} tasks of srun starts a separate run of {world} ranks "
            f"({launcher}): use `srun python real_model_example.py …` with one task per GPU and "
            f"without RANK and WORLD_SIZE, or one torchrun per node (srun --ntasks={hosts} "
            f"--ntasks-per-node=1 torchrun --nnodes={hosts} --nproc_per_node=GPUS "
            "--rdzv_backend=c10d --rdzv_endpoint=HOST:PORT …)."
        )
    address = _host(env.get("MASTER_ADDR", "127.0.0.1"))
    port = _number(env, "MASTER_PORT", PORTS, default=29500)
    return Launch(launcher, rank, local_rank, world, local_world, node, address, port)


def _tasks(env: Mapping[str, str]) -> int:
    """Return the number of tasks of this step; SLURM_NTASKS is that of the whole allocation."""
    return _number(env, "SLURM_STEP_NUM_TASKS SLURM_NTASKS", (1, MOST_RANKS))


def _tasks_per_node(env: Mapping[str, str], tasks: int) -> list[int]:
    """Return the number of tasks on each node of the step; without Slurm's list, on one node."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = env.get(name) or str(tasks)  # for example "3,1" or "4(x2),1"
    per_node: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([1-9]\d{0,5})(?:\(x([1-9]\d{0,5})\))?", part, re.ASCII)
        if found is None:
            needed = "numbers of tasks such as 4(x2),1 are needed"
            raise UserError(f"{name}={_shown(text)}: {needed}. {REMEDY}")
        per_node += [int(found[1])] * int(found[2] or 1)
    return per_node


def _from_slurm(env: Mapping[str, str]) -> Launch:
    world = _tasks(env)
    per_node = _tasks_per_node(env, world)
    rank = _number(env, "SLURM_PROCID", (0, world - 1), "number of tasks - 1")
    node = _number(env, "SLURM_NODEID", (0, len(per_node) - 1), "number of nodes - 1", 0)
    local_ranks = 0, per_node[node] - 1
    local_rank = _number(env, "SLURM_LOCALID", local_ranks, "tasks of this node - 1")
    # Every rank must compute the same port. Jobs on the same node rarely get the same one.
    job, step = (_number(env, f"SLURM_{of}_ID", SLURM_IDS, default=0) for of in ("JOB", "STEP"))
    port = _number(env, "MASTER_PORT", PORTS, default=20000 + (101 * job + step) % 20000)
    address = _host(env.get("MASTER_ADDR") or _first_slurm_host(env))
    return Launch("srun", rank, local_rank, world, per_node[node], node, address, port)


def _number(
    env: Mapping[str, str],
    names: str,
    limits: tuple[int, int],
    highest: str = "",
    default: int | None = None,
) -> int:
    """Return the number in the first of some variables that is set and not empty.

    Args:
        names: names of variables, separated by spaces.
        limits: the smallest and the largest valid number.
        highest: what the largest number is, for the message.
        default: the number if none is set; None: one is required.
    Raises:
        UserError: the variable is missing, or not a number between the limits.
    """
    set_ones = [name for name in names.split() if env.get(name)]
    if not set_ones and default is not None:
        return default
    name, (low, high) = (set_ones or names.split())[0], limits
    text = env.get(name, "")
    if re.fullmatch(r"\d{1,10}", text, re.ASCII) and low <= int(text) <= high:
        return int(text)
    found = f"{name}={_shown(text)}" if name in env else f"{name} is not set"
    high_text = f"{high} ({highest})" if highest else str(high)
    raise UserError(f"{found}: a whole number from {low} to {high_text} is needed. {REMEDY}")


def _host(text: str) -> str:
    """Return MASTER_ADDR, or raise a UserError: a name that no resolver accepts is not retried."""
    with contextlib.suppress(OSError):
        if ":" in text:
            socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
            return text
        if re.fullmatch(r"[\d.]+", text, re.ASCII):
            socket.inet_pton(socket.AF_INET, text)
            return text
        # A host name. The resolver raises an exception for a label of more than 63 characters.
        if re.fullmatch(r"(?!-)[\w-]{1,63}(\.[\w-]{1,63})*\.?", text, re.ASCII):
            return text
    raise UserError(
        f"MASTER_ADDR={_shown(text)}: the name or the IP address of one host is needed, that of "
        f"rank 0, without a port (`scontrol show hostnames` expands a list of Slurm). {REMEDY}"
    )


def _shown(value: str) -> str:
    """Return the value of a variable for a message of one line."""
    return value if re.fullmatch(r"[\w.:-]+", value) else repr(value[:100])


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
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise UserError(
            f"Cannot expand Slurm's node list {_shown(nodes)} with scontrol: "
            "export MASTER_ADDR=<first node>."
        ) from error


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is unused at the moment of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stopped_before_start(name: str) -> UserError:
    """Return what a signal means that ends this process before the ranks can communicate."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or "1"
    if name == "SIGTERM" and tasks != "1":
        # srun sends it to all tasks when one has failed, and returns the largest exit code.
        return TrainingError(
            f"Stopped by {name} during the start; if another rank failed first, its message is "
            "above."
        )
    if name == "SIGTERM" and os.environ.get("WORLD_SIZE", "1") != "1":
        # torchrun and deepspeed do the same, and return their own exit code.
        return Stopped(
            f"Stopped by {name} during the start, and nothing was saved. If another rank failed "
            "first, its message is above; else the same command starts again."
        )
    return Stopped.by(name)


def exit_before_start(error: BaseException, verbose: bool) -> NoReturn:
    """Report an error raised before the ranks can communicate, and exit with its exit code.

    Usually every rank raises such an error, and the message of rank 0 is enough: the others wait
    before they print, and the launcher ends them meanwhile.
    """
    place, user_error = "", explain(error)
    # A launcher ends the other ranks when one exits: they have the same error, and are silent.
    for number in process.STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(user_error.exit_code))
    if not process.reports_first():
        time.sleep(START_SKEW_SECONDS)
        place = f" [rank {process.rank_variable()} on {socket.gethostname()}]"
    if verbose:
        process.print_traceback(error)
    # A launcher that ends this rank from here on must not cause a second message.
    for number in process.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    print(visible(f"{user_error.mark} {user_error}{place}"), file=sys.stderr, flush=True)
    if isinstance(user_error, OutOfMemory):
        print(f"   {LESS_MEMORY}", file=sys.stderr, flush=True)
    os._exit(user_error.exit_code)
