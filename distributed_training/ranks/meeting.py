"""The meeting of the ranks, before there is a process group.

They meet in a key-value store (torch's TCPStore, hosted by rank 0 or by torchrun's agent) and not
in a collective, which hangs when one rank has exited.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from distributed_training import console
from distributed_training.errors import EXIT_FAILED, TrainingError, UserError
from distributed_training.process import exit_now
from distributed_training.ranks.launch import Launch, agent_hosts_store
from distributed_training.units import rank_names

ARRIVAL_SECONDS = 300  # for all ranks to start: first imports from a busy shared disk take minutes
NOTICE_SECONDS = 10  # after which a line names the ranks that are missing


class RankDevice(NamedTuple):
    """What a rank tells rank 0 about its device when the ranks meet."""

    kind: str  # "cuda" or "cpu"
    gpu: str = ""  # UUID of its GPU: each rank may count only its own ones
    visible: int = 0  # number of GPUs that the rank sees
    problem: str = ""  # why the rank cannot train

    @classmethod
    def of(cls, device: torch.device) -> RankDevice:
        """Describe the device of this rank."""
        if device.type != "cuda":
            return cls(device.type)
        gpu = torch.cuda.get_device_properties(device)
        return cls(device.type, str(gpu.uuid), torch.cuda.device_count())


class Arrival(NamedTuple):
    """A rank that has arrived at a meeting."""

    identifier: str  # of its process
    host: str
    device: RankDevice


def connect(launch: Launch, seconds: float) -> dist.Store:
    """Connect to the store of the run; rank 0 hosts it, unless torchrun's agent does.

    Raises:
        TrainingError: there is no connection within `seconds`.
    """
    hosts_it = launch.is_main and not agent_hosts_store()
    address = f"{launch.master_addr}:{launch.master_port}"
    start, silent = time.monotonic(), launch.is_node_leader
    # Python handles no signal while torch waits for a connection, or for its own name.
    while True:
        try:
            if hosts_it:
                socket.getaddrinfo(launch.master_addr, launch.master_port)
            else:
                socket.create_connection((launch.master_addr, launch.master_port), 5).close()
            return open_store(launch, hosts_it)
        except OSError as error:
            waited = time.monotonic() - start
            if waited > seconds:
                raise TrainingError(
                    f"Rank 0 does not answer at {address} ({error.strerror or error}). Has it "
                    "started, is the port open between the hosts, and does its name have an "
                    "address here (/etc/hosts, or torchrun --local_addr=ADDRESS)?"
                ) from error
            if silent and waited > NOTICE_SECONDS:
                silent = False
                console.write(f"⏳ Rank {launch.rank} waits for rank 0, missing at {address}")
            time.sleep(0.1)


def open_store(launch: Launch, hosts_it: bool) -> dist.Store:
    """Open a connection to the store of the run."""
    limit = timedelta(seconds=ARRIVAL_SECONDS)
    return dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        is_master=hosts_it,
        wait_for_workers=False,
        timeout=limit,
    )


def meet(store: dist.Store, launch: Launch, seconds: float, device: RankDevice) -> str:
    """Wait for all ranks, and name those that are missing or cannot train with the others.

    torchrun's store has the keys of earlier starts, and a process may join a start that has ended.
    Each start therefore has a name, and ends the wait of those processes only that it lists.

    Args:
        device: of this rank.
    Returns:
        The name of the start, a prefix of keys.
    Raises:
        TrainingError: a rank did not arrive within `seconds`, or two processes have one rank.
        UserError: on rank 0, if a rank has a problem, another type of device, or another rank's
            GPU.
    """
    own, place = uuid.uuid4().hex, f"meeting/{launch.world_size}"
    arrival = json.dumps(Arrival(own, socket.gethostname(), device))
    deadline, start = time.monotonic() + seconds, ""
    try:
        if launch.is_main:
            start = f"start/{own}"
            store.set(f"{start}/0", arrival)
            store.set(place, start)
            _wait_for_arrivals(store, launch, start, deadline)
        while time.monotonic() < deadline + 5:  # rank 0 names missing ranks at the deadline
            if store.check([place]) and (latest := store.get(place).decode()) != start:
                start = latest
                store.set(f"{start}/{launch.rank}", arrival)
            if start and json.loads(store.get(f"{start}/{launch.rank}"))[0] != own:
                raise TrainingError(f"Another process has rank {launch.rank}, too: start one each.")
            if start and store.check([f"{start}/joined"]):
                joined = json.loads(store.get(f"{start}/joined"))
                if joined is None:
                    time.sleep(5)  # a launcher ends all ranks when one exits: rank 0 is the first
                    exit_now(EXIT_FAILED)
                if joined[launch.rank] == own:  # otherwise the start of earlier processes
                    return start
            time.sleep(0.05)
    except RuntimeError:  # the store has ended with rank 0, which has printed the reason
        exit_now(EXIT_FAILED)
    raise TrainingError(
        f"Rank 0 has not arrived at {launch.master_addr}:{launch.master_port}: "
        "look at what it prints."
    )


def _wait_for_arrivals(store: dist.Store, launch: Launch, start: str, deadline: float) -> None:
    """Rank 0: wait until all ranks have joined a start, and publish their identifiers.

    Raises:
        TrainingError: a rank is missing at the deadline.
        UserError: a rank cannot train with the others.
    """
    ranks, notice = range(launch.world_size), time.monotonic() + NOTICE_SECONDS
    missing = {*ranks}
    while missing := {rank for rank in missing if not store.check([f"{start}/{rank}"])}:
        absent = f"{len(missing)} of {launch.world_size} ranks have not arrived"
        if time.monotonic() > deadline:
            found = [_arrival(store, start, rank) for rank in {*ranks} - missing]
            hosts = sorted({arrival.host for arrival in found})
            store.set(f"{start}/joined", "null")
            raise TrainingError(
                f"{absent} ({rank_names(missing)}). The others are on "
                f"{', '.join(hosts)}. Look at what the missing ranks print, and whether their "
                f"hosts reach {launch.master_addr}:{launch.master_port}."
            )
        if time.monotonic() > notice:
            console.write(f"⏳ {absent}; missing: {rank_names(missing)}")
            notice = deadline
        time.sleep(0.05)
    arrivals = [_arrival(store, start, rank) for rank in ranks]
    try:
        compare_devices(arrivals)
    except UserError:
        store.set(f"{start}/joined", "null")
        raise
    store.set(f"{start}/joined", json.dumps([arrival.identifier for arrival in arrivals]))


def _arrival(store: dist.Store, start: str, rank: int) -> Arrival:
    identifier, host, device = json.loads(store.get(f"{start}/{rank}"))
    return Arrival(identifier, host, RankDevice(*device))


def compare_devices(arrivals: list[Arrival]) -> None:
    """Check that all ranks train on devices of one type, and each on its own GPU.

    Args:
        arrivals: of each rank, in their order.
    Raises:
        UserError: the message names the first rank with a problem.
    """
    for rank, (_, host, device) in enumerate(arrivals):
        if device.problem:
            raise UserError(f"Rank {rank} on {host}: {device.problem}")
    reference, users = arrivals[0], dict[tuple[str, str], int]()
    for rank, (_, host, device) in enumerate(arrivals):
        if device.kind != reference.device.kind:
            raise UserError(
                f"Rank {rank} on {host} would train on {device.kind}, and rank 0 on "
                f"{reference.host} on {reference.device.kind}: `nvidia-smi` on the host without a "
                "GPU shows what is wrong; or add --device cpu to train on the CPUs of all hosts."
            )
        first = users.setdefault((host, device.gpu or str(rank)), rank)
        if first != rank:
            count = sum(arrival.host == host for arrival in arrivals)
            raise UserError(
                f"Ranks {first} and {rank} on {host} use the same GPU: {count} ranks were started "
                f"on this node, and each sees {device.visible} GPU(s). Start one rank per GPU "
                "(--nproc_per_node, --num_gpus; srun: --gpus-per-node), or check "
                "CUDA_VISIBLE_DEVICES."
            )
