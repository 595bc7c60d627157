"""Rendezvous: wait until all ranks have started, and check that they fit together.

It uses a key-value store (torch's TCPStore, hosted by rank 0 or by torchrun's agent) and no
collective: a collective needs every rank, and hangs when one rank has exited.

torchrun's store outlives its ranks. After a restart it still has the keys of the previous attempt,
and each agent counts restarts separately. So every process draws a random number. Rank 0 publishes
the numbers that it reads under a new attempt name, until all ranks have confirmed an attempt that
includes their number.
"""

from __future__ import annotations

import faulthandler
import json
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from support import progress
from support.cluster.hang import rank_names
from support.cluster.launch import Launch
from support.cluster.watchdog import agent_hosts_store
from support.errors import EXIT_FAILED, TrainingError
from support.process import exit_now
from support.versions import code_digest, versions

CONNECT_SECONDS = 5  # time limit of one connection attempt
RESOLVE_SECONDS = 120  # for the name of rank 0's host, which the DNS of a starting pod may not know
ARRIVAL_SECONDS = 300  # for all ranks to start: first imports from a busy shared disk take minutes
NOTICE_SECONDS = 10  # after which a line names the ranks that are missing


def rendezvous(
    launch: Launch, backend: str, timeout: float, gpu: str | None = None
) -> tuple[dist.Store, str]:
    """Wait for all ranks, and check that their versions, backend and GPUs fit together.

    Args:
        timeout: time to wait for the last rank, in seconds.
        gpu: identity of this rank's GPU, see `devices.identify_gpu`.
    Returns:
        The store for `dist.init_process_group`, and the attempt's name, the prefix of keys.
    Raises:
        TrainingError: ranks have not arrived, differ in what must be the same, or share a GPU or a
            rank; the message names them and their hosts. Ranks other than 0 raise it only if rank 0
            does not answer; otherwise they exit with EXIT_FAILED after rank 0 has reported it.
    """
    # Calls to a store whose host hangs have no time limit.
    faulthandler.dump_traceback_later(2 * timeout + 15, exit=True)
    store = connect(launch, timeout)
    own_entry: dict = {
        "number": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "gpu": gpu,
        "facts": {**_what_must_agree(), "backend": backend},
    }
    meeting = _Meeting(store, launch, own_entry, time.monotonic() + timeout)
    store.set(meeting.key_of(launch.rank), json.dumps(own_entry))
    attempt, error_text = meeting.announce() if launch.is_main else meeting.answer()
    faulthandler.cancel_dump_traceback_later()
    if error_text and not launch.is_main:
        time.sleep(5)  # rank 0 must report it first: a launcher ends all ranks when one exits
        exit_now(EXIT_FAILED)
    if error_text:
        raise TrainingError(error_text)
    return dist.PrefixStore(f"{attempt}/group", store), attempt


def connect(launch: Launch, timeout: float) -> dist.Store:
    """Connect to the store of the run; rank 0 hosts it, unless torchrun's agent does.

    Args:
        timeout: time limit of the connection and of each call to the store, in seconds.
    Raises:
        TrainingError: the name of rank 0's host has no address for RESOLVE_SECONDS, or the store's
            port accepts no connection within `timeout` seconds.
    """
    host = launch.is_main and not agent_hosts_store()
    one_per_node = launch.is_node_leader or launch.launcher == "python"
    start, notice = time.monotonic(), NOTICE_SECONDS if one_per_node else timeout
    address = launch.master_addr, launch.master_port
    # Probe the address first: Python handles no signal while torch waits for a connection.
    while True:
        try:
            if host:  # torch also connects to the name here
                socket.getaddrinfo(*address)
            else:
                socket.create_connection(address, CONNECT_SECONDS).close()
            break
        except OSError as error:
            waited = time.monotonic() - start
            if isinstance(error, socket.gaierror) and waited > min(timeout, RESOLVE_SECONDS):
                raise TrainingError(
                    f"{launch.master_addr}, the name of rank 0's host, has no address here: add it "
                    "to /etc/hosts or to the DNS, or give an address instead "
                    "(torchrun --local_addr=ADDRESS, or MASTER_ADDR)."
                ) from error
            place = f"{launch.master_addr}:{launch.master_port}"
            if waited > timeout:
                raise TrainingError(
                    f"Rank 0 does not answer at {place}. "
                    "Has it started, and is the port open between the hosts?"
                ) from error
            if waited > notice:
                progress.write(
                    f"⏳ Rank {launch.rank} waits for rank 0, which is missing at {place}"
                )
                notice = timeout
            time.sleep(0.1)
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(
        *address, launch.world_size, is_master=host, wait_for_workers=False, timeout=limit
    )


class _Meeting:
    """The roll call of a rendezvous.

    Args:
        entry: what this rank has written under its key.
        deadline: time at which the last rank must have arrived (time.monotonic).
    """

    def __init__(self, store: dist.Store, launch: Launch, entry: dict, deadline: float):
        self.store, self.launch, self.entry, self.deadline = store, launch, entry, deadline
        self.place = f"meeting/{launch.world_size}"

    def key_of(self, rank: int) -> str:
        return f"{self.place}/here/{rank}"

    def announce(self) -> tuple[str, str]:
        """Rank 0's side: publish the present ranks until all have confirmed.

        Returns:
            The attempt's name, and the error message, or "" if all ranks fit together.
        """
        store, ranks = self.store, range(self.launch.world_size)
        announced, attempt, unconfirmed, error_text = {}, "", list(ranks), ""
        notice = time.monotonic() + NOTICE_SECONDS
        while unconfirmed and not error_text and time.monotonic() < self.deadline:
            keys = {rank: self.key_of(rank) for rank in ranks}
            present = {r: json.loads(store.get(k)) for r, k in keys.items() if store.check([k])}
            if present != announced:
                announced, attempt = present, f"attempt/{uuid.uuid4().hex}"
                numbers = {r: rank["number"] for r, rank in present.items()}
                store.set(
                    f"{self.place}/roll", json.dumps({"attempt": attempt, "numbers": numbers})
                )
            error_text = _describe_same_rank(0, self.entry, present[0])
            unconfirmed = [r for r in ranks[1:] if not store.check([f"{attempt}/present/{r}"])]
            if unconfirmed and time.monotonic() > notice:
                arrived = f"{len(ranks) - len(unconfirmed)} of {len(ranks)} ranks have started"
                progress.write(f"⏳ {arrived}; missing: {rank_names(unconfirmed)}")
                notice = self.deadline
            time.sleep(0.05 if unconfirmed else 0)
        if unconfirmed and not error_text:
            error_text = _describe_missing_ranks(unconfirmed, announced, self.launch)
        error_text = (
            error_text or _describe_differing_rank(announced) or _describe_shared_gpus(announced)
        )
        store.set(f"{attempt}/verdict", error_text)
        return attempt, error_text

    def answer(self) -> tuple[str, str]:
        """Other ranks' side: confirm each attempt that includes this process, until the verdict.

        Returns:
            The attempt's name, and rank 0's error message, or "".
        Raises:
            TrainingError: rank 0 has not given a verdict 5 s after the deadline, or another process
                has the same rank.
        """
        store, rank, attempt = self.store, self.launch.rank, ""
        while time.monotonic() < self.deadline + 5:  # rank 0 reports missing ranks at the deadline
            try:
                called = store.check([f"{self.place}/roll"])
                roll = json.loads(store.get(f"{self.place}/roll")) if called else {"numbers": {}}
                if roll["numbers"].get(str(rank)) == self.entry["number"]:
                    attempt = roll["attempt"]
                    store.set(f"{attempt}/present/{rank}", "")
                    if store.check([f"{attempt}/verdict"]):
                        return attempt, store.get(f"{attempt}/verdict").decode()
                present = json.loads(store.get(self.key_of(rank)))
            except RuntimeError:  # the store has exited with rank 0, which has printed the reason
                return attempt, "rank 0 has ended"
            if problem := _describe_same_rank(rank, self.entry, present):
                raise TrainingError(problem)
            time.sleep(0.05)
        raise TrainingError(
            f"Rank 0 has not arrived at {self.launch.master_addr}:{self.launch.master_port}: "
            "look at what it prints."
        )


def _describe_same_rank(rank: int, own: dict, present: dict) -> str:
    """Return an error message if another living process has written the entry of this rank."""
    if own["number"] == present["number"]:
        return ""
    return (
        f"Two processes have rank {rank} (on {own['host']} and {present['host']}): give each node "
        "its own --node_rank, or use torchrun --rdzv_backend=c10d, which numbers the nodes."
    )


def _describe_missing_ranks(missing: list[int], seen: dict, launch: Launch) -> str:
    """Name the missing ranks and the hosts of the others; which node a rank misses is unknown."""
    present_hosts = sorted({rank["host"] for number, rank in seen.items() if number not in missing})
    return (
        f"{len(missing)} of {launch.world_size} ranks have not arrived ({rank_names(missing)}). "
        f"The others are on {', '.join(present_hosts)}. "
        "Look at what the missing ranks print, and whether their hosts reach "
        f"{launch.master_addr}:{launch.master_port}."
    )


def _describe_differing_rank(seen: dict) -> str:
    first = seen[0]
    for number, rank in seen.items():
        differences = [
            f"{key} {value or 'missing'} there and {first['facts'].get(key, 'missing')} on "
            f"{first['host']}"
            for key in sorted({*rank["facts"], *first["facts"]})
            if (value := rank["facts"].get(key)) != first["facts"].get(key)
        ]
        if differences:
            return (
                f"Rank {number} on {rank['host']} is not as rank 0: {'; '.join(differences)}. "
                "Make them the same."
            )
    return ""


def _describe_shared_gpus(seen: dict) -> str:
    """Return an error message if several ranks use the same GPU, otherwise "".

    Slurm may give each task all GPUs of its node, only its own GPU, or the same GPU as the other
    tasks; only the last case is an error.
    """
    ranks_of: dict[tuple[str, str], list[str]] = {}
    for number, rank in sorted(seen.items()):
        if rank["gpu"]:
            ranks_of.setdefault((rank["host"], rank["gpu"]), []).append(str(number))
    shared = [(host, ranks) for (host, _), ranks in ranks_of.items() if len(ranks) > 1]
    if not shared:
        return ""
    places = "; ".join(f"ranks {', '.join(ranks)} on {host}" for host, ranks in shared)
    return (
        f"More than one rank has the same GPU ({places}), and NCCL needs one for each: "
        "start as many ranks on a node as it has GPUs, each with its own "
        "(srun --ntasks-per-node=N --gpus-per-node=N)."
    )


def open_store(launch: Launch, attempt: str) -> dist.Store:
    """Open another connection to the store that rank 0 or torchrun's agent hosts.

    Args:
        attempt: prefix of the keys, from `rendezvous`.
    """
    address, limit = (launch.master_addr, launch.master_port), timedelta(seconds=60)  # of each call
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)
    return dist.PrefixStore(attempt, store)


def _what_must_agree() -> dict[str, str]:
    """Return library versions and a digest of this project's code, which all ranks must share.

    Ranks that differ in them may wait for each other without end.
    """
    installed = versions()
    names = ("python", "torch", "transformers", "deepspeed", "cuda")
    selected = {name: installed[name] for name in names if name in installed}
    return {**selected, "script": code_digest()}
