"""The process group: waiting until all ranks have started and fit together, and its backend.

The ranks meet in a key-value store (torch's TCPStore, hosted by rank 0 or by torchrun's agent) and
not in a collective, which hangs when one rank has exited. torchrun's store still has the keys of
the attempt before a restart, so rank 0 names each attempt.
"""

from __future__ import annotations

import faulthandler
import json
import re
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from support import console as progress
from support.cli.arguments import Arguments
from support.cluster.context import DistContext
from support.cluster.devices import choose_device, identify_gpu, unused_gpu
from support.cluster.launch import Launch, agent_hosts_store
from support.cluster.watchdog import rank_names
from support.console import Console
from support.errors import EXIT_FAILED, TrainingError
from support.process import code_digest, exit_now, versions
from support.tables import STRATEGIES

ARRIVAL_SECONDS = 300  # for all ranks to start: first imports from a busy shared disk take minutes
NOTICE_SECONDS = 10  # after which a line names the ranks that are missing
SAME_ON_ALL = ("python", "torch", "transformers", "deepspeed", "cuda")


def join(args: Arguments, launch: Launch) -> DistContext:
    """Initialize the process group: NCCL for GPUs, gloo for CPU processes.

    A single process also gets a process group, so that there is only one code path.

    Returns:
        This process among the ranks: its device, its output, and the monitor of failures.
    Raises:
        TrainingError: a rank did not arrive in time, or the ranks do not fit together.
        UserError: this rank has no GPU of its own.
    """
    device = choose_device(launch)
    backend = "fake" if args.simulate_gpus else "nccl" if device.type == "cuda" else "gloo"
    console = Console(launch.is_main, args.quiet, args.verbose)
    if gpu := unused_gpu():
        console.warn(f"{gpu} are not supported: training on the CPU.")
    ctx = DistContext(launch, device, backend, console)
    dist.init_process_group(
        store=connect_ranks(ctx, args.ddp_timeout, args.hang_seconds),
        rank=ctx.rank,
        world_size=ctx.world_size,
        timeout=timedelta(seconds=args.ddp_timeout),
        **group_options(args, ctx),
    )
    ctx.nodes = sum(ctx.all_gather(launch.is_node_leader))  # one leader per node
    torch.set_float32_matmul_precision("high")  # use TF32 tensor cores for fp32 where available
    # Not warn_only: the backward pass of attention on a GPU would not be deterministic then.
    torch.use_deterministic_algorithms(args.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # no result depends on it
    return ctx


def group_options(args: Arguments, ctx: DistContext) -> dict[str, Any]:
    """Return keyword arguments of `dist.init_process_group`: `backend`, and maybe `device_id`."""
    if ctx.backend != "nccl":
        return {"backend": ctx.backend}
    # FSDP with CPU offload reduces GradScaler's found_inf flag in host memory, which NCCL cannot
    # do. Gloo only then: it needs a network interface that all hosts reach by name.
    if STRATEGIES[args.strategy].engine == "fsdp" and args.fsdp.offload:
        return {"backend": "cpu:gloo,cuda:nccl"}
    # DeepSpeed clones the group of all ranks. NCCL then splits its communicator instead of creating
    # another one, if the group is bound to a device. torch 2.6.1 to 2.7.0 may hang (issue 153960).
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:3])
    if args.ds_config_dict and ctx.world_size > 1 and not (2, 6, 0) < release < (2, 7, 1):
        return {"backend": "nccl", "device_id": ctx.device}
    return {"backend": "nccl"}


def connect_ranks(ctx: DistContext, seconds: float, hang_seconds: int) -> dist.Store:
    """Wait until all ranks have started and fit together, and watch them from then on.

    This also installs the handlers of the stop signals and of SIGUSR2. In a simulation this process
    is rank 0 and alone: collectives of PyTorch's "fake" backend return at once.

    Args:
        seconds: time to wait for the last rank.
    Returns:
        The store for `dist.init_process_group`.
    Raises:
        TrainingError: (rank 0) a rank did not arrive in time, or the ranks do not fit together.
    """
    if ctx.simulated:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        ctx.stop.install()
        ctx.failures.watch(None, hang_seconds)
        return FakeStore()
    seconds = min(seconds, ARRIVAL_SECONDS)
    faulthandler.dump_traceback_later(2 * seconds + 15, exit=True)  # calls to a hung store block
    # A single process without a launcher needs no port.
    alone = ctx.world_size == 1 and ctx.launch.launcher == "python"
    store = dist.HashStore() if alone else connect(ctx.launch, seconds)
    versions_here = {name: text for name, text in versions().items() if name in SAME_ON_ALL}
    entry = {
        "host": socket.gethostname(),
        "gpu": identify_gpu(ctx.device),
        "same": {**versions_here, "script": code_digest(), "backend": ctx.backend},
    }
    attempt, problem = meet(store, ctx.launch, entry, seconds)
    faulthandler.cancel_dump_traceback_later()
    if problem and not ctx.is_main:
        time.sleep(5)  # rank 0 must report it first: a launcher ends all ranks when one exits
        exit_now(EXIT_FAILED)
    if problem:
        raise TrainingError(problem)
    ctx.stop.install()
    # Before NCCL connects the ranks: it would wait for a rank that has already failed.
    several = ctx.world_size > 1
    own = dist.PrefixStore(attempt, _open_store(ctx.launch, 60)) if several else None
    ctx.failures.watch(own, hang_seconds)
    return dist.PrefixStore(f"{attempt}/group", store)


def connect(launch: Launch, timeout: float) -> dist.Store:
    """Connect to the store of the run; rank 0 hosts it, unless torchrun's agent does.

    Raises:
        TrainingError: there is no connection within `timeout` seconds.
    """
    hosts_it = launch.is_main and not agent_hosts_store()
    place, start = f"{launch.master_addr}:{launch.master_port}", time.monotonic()
    notice = NOTICE_SECONDS if launch.is_node_leader else timeout
    # Python handles no signal while torch waits for a connection, or for its own name.
    while True:
        try:
            if hosts_it:
                socket.getaddrinfo(launch.master_addr, launch.master_port)
            else:
                socket.create_connection((launch.master_addr, launch.master_port), 5).close()
            return _open_store(launch, timeout, is_master=hosts_it)
        except OSError as error:
            waited = time.monotonic() - start
            if waited > timeout:
                raise TrainingError(
                    f"Rank 0 does not answer at {place} ({error.strerror or error}). Has it "
                    "started, is the port open between the hosts, and does its name have an "
                    "address here (/etc/hosts, or torchrun --local_addr=ADDRESS)?"
                ) from error
            if waited > notice:
                notice = timeout
                progress.write(
                    f"⏳ Rank {launch.rank} waits for rank 0, which is missing at {place}"
                )
            time.sleep(0.1)


def _open_store(launch: Launch, seconds: float, is_master: bool = False) -> dist.TCPStore:
    """Open a connection to the store; each call to it may take so many seconds."""
    limit = timedelta(seconds=seconds)
    address = launch.master_addr, launch.master_port
    return dist.TCPStore(*address, is_master=is_master, wait_for_workers=False, timeout=limit)


def meet(store: dist.Store, launch: Launch, entry: dict, seconds: float) -> tuple[str, str]:
    """Wait for all ranks, and check that they fit together.

    Args:
        entry: "host", "gpu" and what must be the "same" on all ranks.
    Returns:
        The attempt's name, a prefix of keys; and a problem for rank 0 to report, or "".
    """
    deadline, place = time.monotonic() + seconds, f"meeting/{launch.world_size}"
    entry, attempt = {**entry, "id": uuid.uuid4().hex}, ""
    if launch.is_main:
        attempt = f"attempt/{entry['id']}"
        store.set(place, attempt)
        problem = _call_roll(store, launch, {0: entry}, attempt, deadline)
        return attempt, problem
    while time.monotonic() < deadline + 5:  # rank 0 names missing ranks at the deadline
        try:
            latest = store.get(place).decode() if store.check([place]) else ""
            if latest != attempt:
                attempt = latest
                store.set(f"{attempt}/{launch.rank}", json.dumps(entry))
            if attempt:
                _check_own(entry, store.get(f"{attempt}/{launch.rank}"), launch.rank)
            if attempt and store.check([f"{attempt}/verdict"]):
                verdict = json.loads(store.get(f"{attempt}/verdict"))
                if verdict["ids"].get(str(launch.rank)) == entry["id"]:  # otherwise an old attempt
                    return attempt, verdict["problem"]
        except RuntimeError:  # the store has exited with rank 0, which has printed the reason
            return attempt, "rank 0 has ended"
        time.sleep(0.05)
    raise TrainingError(
        f"Rank 0 has not arrived at {launch.master_addr}:{launch.master_port}: "
        "look at what it prints."
    )


def _call_roll(
    store: dist.Store, launch: Launch, entries: dict[int, dict], attempt: str, deadline: float
) -> str:
    """Rank 0: wait for the entries of all ranks, publish whether they fit together, return it."""
    notice, problem = time.monotonic() + NOTICE_SECONDS, ""
    store.set(f"meeting/{launch.world_size}/0", json.dumps(entries[0]))
    while (missing := {*range(launch.world_size)} - entries.keys()) and not problem:
        for rank in [rank for rank in missing if store.check([f"{attempt}/{rank}"])]:
            entries[rank] = json.loads(store.get(f"{attempt}/{rank}"))
        arrived = f"{len(missing)} of {launch.world_size} ranks have not arrived"
        if time.monotonic() > deadline:
            hosts = ", ".join(sorted({entry["host"] for entry in entries.values()}))
            problem = (
                f"{arrived} ({rank_names(missing)}). The others are on {hosts}. Look at what the "
                "missing ranks print, and whether their hosts reach "
                f"{launch.master_addr}:{launch.master_port}."
            )
        elif time.monotonic() > notice:
            progress.write(f"⏳ {arrived}; missing: {rank_names(missing)}")
            notice = deadline
        _check_own(entries[0], store.get(f"meeting/{launch.world_size}/0"), 0)
        time.sleep(0.05)
    problem = problem or misfit(entries)
    ids = {rank: entry["id"] for rank, entry in entries.items()}
    store.set(f"{attempt}/verdict", json.dumps({"ids": ids, "problem": problem}))
    return problem


def _check_own(own: dict, found: bytes, rank: int) -> None:
    """Check that no other process has written the entry of this rank."""
    if (other := json.loads(found))["id"] != own["id"]:
        raise TrainingError(
            f"Two processes have rank {rank} (on {own['host']} and {other['host']}): give each "
            "node its own --node_rank, or use torchrun --rdzv_backend=c10d, which numbers the "
            "nodes."
        )


def misfit(entries: dict[int, dict]) -> str:
    """Return why the ranks do not fit together, or "": different software, or shared GPUs."""
    first = entries[0]
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, entry in sorted(entries.items()):
        if differing := {*entry["same"].items()} ^ {*first["same"].items()}:
            differences = [
                f"{key} {entry['same'].get(key, 'missing')} there and "
                f"{first['same'].get(key, 'missing')} on {first['host']}"
                for key in sorted({key for key, _ in differing})
            ]
            place = f"Rank {rank} on {entry['host']} is not as rank 0"
            return f"{place}: {'; '.join(differences)}. Make them the same."
        if entry["gpu"]:
            ranks_of.setdefault((entry["host"], entry["gpu"]), []).append(rank)
    shared = [f"{rank_names(r)} on {host}" for (host, _), r in ranks_of.items() if len(r) > 1]
    if not shared:
        return ""
    return (
        f"More than one rank has the same GPU ({'; '.join(shared)}), and NCCL needs one for each: "
        "start as many ranks on a node as it has GPUs, each with its own "
        "(srun --ntasks-per-node=N --gpus-per-node=N)."
    )
