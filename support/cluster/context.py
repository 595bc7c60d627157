"""Coordination of the ranks: rendezvous, preparation once per node, failures, and the end of a run.

A key-value store (torch's TCPStore, hosted by rank 0 or by torchrun's agent) is used for what must
not depend on a collective: a collective has a time limit, needs every rank, and hangs when one rank
has exited.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from support import PROJECT, process, progress
from support.cluster import failures
from support.cluster.launch import Launch
from support.console import Console
from support.errors import (
    EXIT_FAILED,
    LESS_MEMORY,
    OutOfMemory,
    StoppedBySignal,
    TrainingError,
    UserError,
    explain,
)
from support.files.atomic import remove
from support.redaction import print_traceback

HOST_IS_FULL = (
    "It is the host's memory, not the GPU's: "
    "fewer ranks on a node, or a strategy that offloads less."
)
GRACE_SECONDS = 5  # for a rank to exit by itself after another one has failed
SAME_REQUEST_SECONDS = 5  # later signals within this time repeat the first one (launchers do this)
STORE_SECONDS = 2  # time limit of the store when an error is reported
DISK_SECONDS = 5  # time limit of each function in `DistContext.on_failure`
END_SECONDS = 20  # time limit of what a failed rank does before it exits
LONGEST_MESSAGE = 2000  # characters of an error in the store
RESERVE_BYTES = 64 << 20
# A disk is full or hangs (TimeoutError), or the host cannot start a thread: the error is printed
# nevertheless.
NO_REASON_FOR_SILENCE = (OSError, RuntimeError, MemoryError)


class StopSignal:
    """Handler of the signals that ask the run to stop: SIGTERM, SIGINT, SIGUSR1 and SIGHUP.

    Before training there is nothing to save, and a signal ends the run like an error. After
    `defer()` a signal is only recorded, and the ranks agree on it between two steps. Launchers send
    several signals for one request: those within SAME_REQUEST_SECONDS of the first are ignored. A
    later Ctrl-C (SIGINT) interrupts the run at once.

    Attributes:
        requested: True after the first signal.
    """

    def __init__(self):
        self.requested, self._name = False, ""
        self._deferred, self._first = False, 0.0
        for number in process.STOP_SIGNALS:
            if number in process.ALSO_IF_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._arrived)

    def defer(self) -> None:
        """Record further signals instead of ending the run; called when training starts.

        Raises:
            StoppedBySignal: a signal has already arrived, and its exception was lost because Python
                ignores exceptions in some places, such as destructors.
        """
        if self.requested:
            self._end()
        self._deferred = True

    def ignore(self) -> None:
        """Ignore all further stop signals, because the run is about to exit."""
        # Python allows only the main thread to change handlers.
        if threading.current_thread() is threading.main_thread():
            for number in process.STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _arrived(self, number: int, _frame) -> None:
        now, repeated = time.monotonic(), self.requested
        if not repeated:
            self.requested, self._name, self._first = True, signal.Signals(number).name, now
        elif now - self._first <= SAME_REQUEST_SECONDS:
            return  # `finally` and `except` blocks of the first signal may be running
        if not self._deferred:
            self._end()
        if repeated and number == signal.SIGINT:
            raise KeyboardInterrupt

    def _end(self) -> NoReturn:
        raise StoppedBySignal(
            f"Stopped by {self._name}; if another rank failed first, its message is above."
        )


@dataclass
class DistContext:
    """This process in the run: its place, its device, and its connection to the other ranks."""

    launch: Launch
    device: torch.device
    backend: str
    console: Console
    # Prefix of this attempt's keys in the store: a restart by torchrun uses the same store.
    attempt: str = ""
    store: dist.Store | None = None
    # Folders and files to remove, at the latest when the run ends.
    temporary: list[str] = field(default_factory=list)
    # Functions that record an error; they return False if another rank has already recorded one.
    on_failure: list[Callable[[UserError], bool]] = field(default_factory=list)
    # Functions whose lines are printed when memory runs out, and one that returns what to change.
    memory_facts: list[Callable[[], list[str]]] = field(default_factory=list)
    ways_to_fit: Callable[[], list[str]] = field(default=lambda: [])
    # Functions to call when training and export are complete.
    at_end: list[Callable[[], None]] = field(default_factory=list)
    # Functions that flush what other programs read of this run; called when it fails, too.
    flushes: list[Callable[[], None]] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)  # this process is exiting
    stop: StopSignal = field(default_factory=lambda: StopSignal())
    # Address space that is released to report that no memory is left (a thread, a file, lines).
    # Nothing is written to it, so it uses no pages.
    reserve: mmap.mmap = field(
        default_factory=lambda: mmap.mmap(-1, RESERVE_BYTES, flags=mmap.MAP_PRIVATE)
    )

    nodes: int = 1
    precision: str = "fp32"  # of the arithmetic, once --precision is resolved for the device
    lock: Any = None  # on rank 0: prevents a second run from using the output folder

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return self.launch.world_size

    @property
    def is_main(self) -> bool:
        return self.launch.is_main

    @property
    def simulated(self) -> bool:
        """True if this process is rank 0 of a simulated run (--simulate_gpus).

        The other ranks do not exist, so computed values are meaningless; memory sizes are valid.
        """
        return self.backend == "fake"

    @property
    def real_world_size(self) -> int:
        """Number of processes that exist: 1 in a simulation, otherwise the world size."""
        return 1 if self.simulated else self.world_size

    def mesh(self, hybrid: bool):
        """Return the device mesh of all ranks, for FSDP.

        Args:
            hybrid: return a mesh of shape (nodes, ranks per node) with the dimensions "replicate"
                and "shard"; otherwise its shape is (world size,).
        """
        if not hybrid:
            return init_device_mesh(self.device.type, (self.world_size,))
        if self.nodes == 1:
            self.console.warn(
                "HYBRID_SHARD on one node is FULL_SHARD: there is no other node to hold a copy."
            )
        return init_device_mesh(
            self.device.type,
            (self.nodes, self.launch.local_world_size),
            mesh_dim_names=("replicate", "shard"),
        )

    # ------------------------------------------------------------------- preparation, once per node

    def once_per_node(self, what: str, prepare: Callable[[], Any]) -> Any:
        """Call `prepare` on local rank 0 of each node while all other ranks wait.

        The wait is not a collective, so it has no time limit: tokenization may take an hour. Every
        rank waits for all nodes, so that no node waits for another one in the next collective.

        Args:
            what: name of the preparation, unique in the run.
            prepare: its result must be serializable as JSON and small: the store accepts 8 MB at
                most. Write data whose size depends on the dataset to a file instead.
        Returns:
            The result of the rank's own node, on every rank.
        """
        if self.store is None:
            return prepare()
        key = f"prepared/{what}/{self.launch.node}"
        if self.launch.is_node_leader:
            self.store.set(key, json.dumps(prepare()))
            self.store.add(f"prepared/{what}/nodes", 1)
        while self.store.add(f"prepared/{what}/nodes", 0) < self.nodes:
            time.sleep(0.1)  # if local rank 0 of a node fails, `_watch` ends this process
        return json.loads(self.store.get(key))

    def asked_to_stop(self) -> bool:
        """Return whether any rank has received a stop signal, the same on all ranks.

        A collective (all-reduce): all ranks must call it.
        """
        requests = torch.tensor(float(self.stop.requested), device=self.device)
        dist.all_reduce(requests)
        return requests.item() > 0

    def broadcast_from_rank0(self, value: Any) -> Any:
        """Broadcast an object from rank 0; return it on every rank."""
        values = [value]
        if self.simulated:
            return value
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def all_gather(self, value: Any) -> list[Any]:
        """All-gather an object; return the objects of all ranks in the order of the ranks.

        In a simulation the list has one item, that of this process.
        """
        if self.simulated:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    # ------------------------------------------------------------------------------ failure and end

    def watch_for_failures(self) -> None:
        """Start the threads that end this process when another rank has failed."""
        if self.world_size > 1:
            monitor = failures.FailureMonitor(
                open_store(self.launch, self.attempt), self.rank, self.world_size
            )
            threading.Thread(target=monitor.ask_until, args=(self.ending,), daemon=True).start()
            threading.Thread(target=self._watch, args=(monitor,), daemon=True).start()

    def _watch(self, monitor: failures.FailureMonitor) -> None:
        """End the process when another rank has failed; runs in a thread.

        The main thread may be blocked in a collective that never completes.
        """
        while not self.ending.wait(failures.PERIOD_SECONDS):
            failure_text = monitor.look()
            if failure_text is None:
                continue
            # The store also exits when the run completes, and the main thread may have a more
            # precise error.
            if monitor.lost and self.ending.wait(GRACE_SECONDS):
                return
            if failure_text:
                self._report(TrainingError(failure_text))
            if not monitor.lost and self.ending.wait(GRACE_SECONDS):
                return
            end_at_latest(EXIT_FAILED)
            self._flush()
            self.clean_up()
            _exit(EXIT_FAILED)

    def clean_up(self, *folders: str) -> None:
        """Remove the given temporary folders and files of this process; without arguments all."""
        for folder in [f for f in self.temporary if not folders or f in folders]:
            with contextlib.suppress(ValueError):  # `_watch` may clean up at the same time
                self.temporary.remove(folder)
            remove(Path(folder))

    def end_failed(self, error: BaseException) -> NoReturn:
        """Report an error and exit with its exit code.

        Only the rank that fails first reports its error: the errors of the other ranks are
        consequences.
        """
        self.reserve.close()
        self.stop.ignore()
        user_error = explain(error)
        end_at_latest(user_error.exit_code)
        try:
            if self.console.verbose:
                print_traceback(error)
            # Before anything is written: an incomplete checkpoint may fill the disk.
            with contextlib.suppress(*NO_REASON_FOR_SILENCE):
                failures.in_time(self.clean_up, END_SECONDS / 2)
            self._report(user_error, error)
            # The other ranks must read the error in the store, which this process may host.
            if self.is_main and self.world_size > 1:
                time.sleep(2 * failures.PERIOD_SECONDS)
            self._flush()
            self.ending.set()
        finally:  # not sys.exit: the destructor of a communicator with a broken peer can hang
            _exit(user_error.exit_code)

    def _flush(self) -> None:
        for flush in self.flushes:
            with contextlib.suppress(Exception):  # must not replace the error that ends the run
                flush()

    def _report(self, shown: UserError, error: BaseException | None = None) -> None:
        """Record and print an error, unless another rank has reported one.

        The first rank to write its error into the store reports it. If the store has exited with
        rank 0, or does not answer, it is the rank that changes the status in results.json.
        """
        if not self._may_report(str(shown)):
            return
        recorded = False
        # Starting a thread needs memory, and there may not be enough.
        with contextlib.suppress(*NO_REASON_FOR_SILENCE):
            if not self._record(shown):
                return
            recorded = True
        rank_label = f" [rank {self.rank} on {socket.gethostname()}]" if self.world_size > 1 else ""
        progress.write(f"❌ {shown}{rank_label}", sys.stderr)
        if isinstance(shown, OutOfMemory):
            self.ending.set()  # `_about_memory` may take longer than GRACE_SECONDS
            for line in self._about_memory(shown):
                progress.write(f"   {line}", sys.stderr)
        if not recorded:
            free_variables(error)
            with contextlib.suppress(*NO_REASON_FOR_SILENCE):
                self._record(shown)

    def _record(self, shown: UserError) -> bool:
        """Call the functions in `on_failure`; return False if another rank has recorded one."""
        return all(
            failures.in_time(partial(record, shown), DISK_SECONDS) for record in self.on_failure
        )

    def _may_report(self, message: str) -> bool:
        """Write the error into the store; return False if another rank or thread was first."""
        if self.store is None:
            return True
        # The store accepts no large values.
        text = message[:LONGEST_MESSAGE].encode(errors="replace").decode()
        entry = f"{self.rank} {threading.get_ident()}: {text}"
        try:
            return (
                failures.in_time(
                    lambda: self.store.compare_set("failure", "", entry), STORE_SECONDS
                ).decode()
                == entry
            )
        except Exception:  # the store has exited or does not answer
            return True

    def _about_memory(self, shown: OutOfMemory) -> Iterator[str]:
        """Yield lines on what used the memory that ran out, and on what would fit."""
        lines = [HOST_IS_FULL] if shown.on_host and self.device.type == "cuda" else []
        for describe in self.memory_facts:
            with contextlib.suppress(Exception):  # there may be too little memory left
                lines += describe()
        remedies = []
        if not (shown.on_host and self.device.type == "cuda"):
            with contextlib.suppress(Exception):  # an architecture that the planner does not know
                remedies = self.ways_to_fit()
        yield from lines
        yield from remedies or [LESS_MEMORY]

    def end_together(self, engine: Any, code: int) -> NoReturn:
        """Exit with `code` at the same time as all other ranks, after everything is written.

        Ranks that exit one after the other make ZeRO-3 abort. The interpreter's shutdown is
        skipped, because it sometimes destroys the I/O threads of infinity's NVMe handles while they
        run ("terminate called").

        Args:
            engine: its `destroy` method is called if it has one (DeepSpeed).
            code: the exit code.
        """
        self.stop.ignore()
        try:
            dist.barrier()
            self.ending.set()
            if hasattr(engine, "destroy"):
                engine.destroy()
            dist.destroy_process_group()
        finally:
            self.clean_up()
            _exit(code)


@contextlib.contextmanager
def ends_within(seconds: float, message: str) -> Iterator[None]:
    """Exit with a message if the `with` block takes longer than `seconds`.

    Calls to a store whose host hangs have no time limit of their own.
    """

    def end() -> None:
        progress.write(f"❌ {message}", sys.stderr)
        _exit(EXIT_FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def free_variables(error: BaseException | None) -> None:
    """Free the local variables in the traceback of an error and of its causes (activations)."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def end_at_latest(code: int) -> None:
    """Exit after END_SECONDS, even if the main thread blocks (hung disk, stopped terminal)."""
    timer = threading.Timer(END_SECONDS, os._exit, (code,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # this host cannot start a thread
        timer.start()


def _exit(code: int) -> NoReturn:
    """Exit at once, without the interpreter's shutdown, after flushing the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the stream is closed
            stream.flush()
    os._exit(code)


CONNECT_SECONDS = 5  # time limit of one connection attempt
ARRIVAL_SECONDS = 300  # for all ranks to start: first imports from a busy shared disk take minutes


def rendezvous(
    launch: Launch, backend: str, timeout: float, gpu: str | None = None
) -> tuple[dist.Store, str]:
    """Rendezvous: wait for all ranks, and check that their versions, backend and GPUs fit together.

    It uses no collective, so it cannot hang. torchrun's store outlives its ranks. After a restart
    it still has the keys of the previous attempt, and each agent counts restarts separately. So
    every process draws a random number. Rank 0 publishes the numbers that it reads under a new
    attempt name, until all ranks have confirmed an attempt that includes their number.

    Args:
        launch: the place of this process in the run.
        backend: backend of the process group that is created afterwards.
        timeout: time to wait for the last rank, in seconds.
        gpu: identity of this rank's GPU from `identify_gpu`.
    Returns:
        The store for `dist.init_process_group`, and the attempt's name, the prefix of keys.
    Raises:
        TrainingError: ranks have not arrived, differ in what must be the same, or share a GPU; the
            message names them and their hosts. Ranks other than 0 raise it only if rank 0 does not
            answer; otherwise they exit with EXIT_FAILED after rank 0 has reported the error.
    """
    unanswered = (
        f"The store at {launch.master_addr}:{launch.master_port} does not answer: "
        "is the host of rank 0 up?"
    )
    with ends_within(timeout + 15, unanswered):
        store = connect(launch, timeout)
    with ends_within(timeout + 15, unanswered):  # a new limit: rank 0's starts later
        own_entry = {
            "number": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "gpu": gpu,
            "facts": {**what_must_agree(), "backend": backend},
        }
        place = f"meeting/{launch.world_size}"
        store.set(f"{place}/here/{launch.rank}", json.dumps(own_entry))
        deadline = time.monotonic() + timeout
        if launch.is_main:
            attempt, error_text = _announce_ranks(store, place, launch, deadline)
        else:
            attempt, error_text = _answer_announcements(
                store, place, launch, deadline, own_entry["number"]
            )
    if error_text and not launch.is_main:
        time.sleep(5)  # rank 0 must report it first: a launcher ends all ranks when one exits
        _exit(EXIT_FAILED)
    if error_text:
        raise TrainingError(error_text)
    return dist.PrefixStore(f"{attempt}/group", store), attempt


def connect(launch: Launch, timeout: float) -> dist.Store:
    """Connect to the store of the run; rank 0 hosts it, unless torchrun's agent does.

    Args:
        launch: the place of this process in the run.
        timeout: time limit of the connection and of each call to the store, in seconds.
    Raises:
        TrainingError: the store's port accepts no connection within `timeout` seconds.
    """
    host, deadline = launch.is_main and not failures.agent_hosts_store(), time.monotonic() + timeout
    # Probe the port first: Python handles no signal while torch waits for a connection.
    while not host:
        try:
            socket.create_connection(
                (launch.master_addr, launch.master_port), CONNECT_SECONDS
            ).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"Rank 0 does not answer at {launch.master_addr}:{launch.master_port}. "
                    "Has it started, and is the port open between the hosts?"
                ) from error
            time.sleep(0.1)
    return dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        is_master=host,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )


def _announce_ranks(store: dist.Store, place: str, launch: Launch, until: float) -> tuple[str, str]:
    """Rank 0's side of the rendezvous: publish the present ranks until all have confirmed.

    Returns:
        The attempt's name, and the error message, or "" if all ranks fit together.
    """
    announced, attempt, unconfirmed = {}, "", list(range(launch.world_size))
    while unconfirmed and time.monotonic() < until:
        present = {
            r: json.loads(store.get(f"{place}/here/{r}"))
            for r in range(launch.world_size)
            if store.check([f"{place}/here/{r}"])
        }
        if present != announced:
            announced, attempt = present, f"attempt/{uuid.uuid4().hex}"
            numbers = {r: rank["number"] for r, rank in present.items()}
            store.set(f"{place}/roll", json.dumps({"attempt": attempt, "numbers": numbers}))
        unconfirmed = [
            r for r in range(1, launch.world_size) if not store.check([f"{attempt}/present/{r}"])
        ]
        time.sleep(0.05 if unconfirmed else 0)
    if unconfirmed:
        error_text = _describe_missing_ranks(unconfirmed, announced, launch)
    else:
        error_text = _describe_differing_rank(announced) or _describe_shared_gpus(announced)
    store.set(f"{attempt}/verdict", error_text)
    return attempt, error_text


def _answer_announcements(
    store: dist.Store, place: str, launch: Launch, until: float, number: str
) -> tuple[str, str]:
    """Other ranks' side: confirm each attempt that includes `number`, until rank 0's verdict.

    Returns:
        The attempt's name, and rank 0's error message, or "".
    Raises:
        TrainingError: rank 0 has not given a verdict 5 s after `until`.
    """
    attempt = ""
    while time.monotonic() < until + 5:  # rank 0 reports missing ranks at `until`
        try:
            roll = (
                json.loads(store.get(f"{place}/roll"))
                if store.check([f"{place}/roll"])
                else {"numbers": {}}
            )
            if roll["numbers"].get(str(launch.rank)) == number:
                attempt = roll["attempt"]
                store.set(f"{attempt}/present/{launch.rank}", "")
                if store.check([f"{attempt}/verdict"]):
                    return attempt, store.get(f"{attempt}/verdict").decode()
        except RuntimeError:  # the store has exited with rank 0, which has printed the reason
            return attempt, "rank 0 has ended"
        time.sleep(0.05)
    raise TrainingError(
        f"Rank 0 has not arrived at {launch.master_addr}:{launch.master_port}: "
        "look at what it prints."
    )


def _describe_missing_ranks(missing: list[int], seen: dict, launch: Launch) -> str:
    """Name the missing ranks and the hosts of the others; which node a rank misses is unknown."""
    listed = ", ".join(str(rank) for rank in missing[:8]) + ", …" * (len(missing) > 8)
    present_hosts = sorted({rank["host"] for number, rank in seen.items() if number not in missing})
    return (
        f"{len(missing)} of {launch.world_size} ranks have not arrived "
        f"(rank{'s' * (len(missing) > 1)} {listed}). The others are on {', '.join(present_hosts)}. "
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


def group_options(args, device: torch.device, world_size: int) -> dict[str, Any]:
    """Choose the backend of the process group, and whether the group is bound to a device.

    FSDP with CPU offload also reduces tensors in host memory, which NCCL cannot do: GradScaler's
    found_inf flag (torch/distributed/tensor/_dispatch.py, found_inf_reduce_handler). Gloo is added
    only in this case, because it needs a network interface that all hosts reach by name.

    DeepSpeed creates a second group of all ranks (deepspeed/utils/groups.py, _clone_world_group).
    If the first group is bound to a device, NCCL splits its communicator instead of creating
    another one. torch 2.6.1 to 2.7.0 may hang then (pytorch issue 153960), and with a single rank
    there is nothing to split.

    Args:
        args: --strategy, and the settings of FSDP or DeepSpeed.
        device: device of this rank.
        world_size: number of ranks.
    Returns:
        Keyword arguments of `dist.init_process_group`: `backend`, and in some cases `device_id`.
    """
    if device.type == "cpu":
        return {"backend": "gloo"}
    if args.strategy == "fsdp" and args.fsdp.offload:
        return {"backend": "cpu:gloo,cuda:nccl"}
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:3])
    if args.ds_config_dict and world_size > 1 and not (2, 6, 0) < release < (2, 7, 1):
        return {"backend": "nccl", "device_id": device}
    return {"backend": "nccl"}


def _describe_shared_gpus(seen: dict) -> str:
    """Return an error message if several ranks use the same GPU, otherwise "".

    Slurm may give each task all GPUs of its node, only its own GPU, or the same GPU as the other
    tasks; only the last case is an error.
    """
    ranks_of: dict[tuple[str, str], list[str]] = {}
    for number, rank in sorted(seen.items()):
        if rank["gpu"]:
            ranks_of.setdefault((rank["host"], rank["gpu"]), []).append(str(number))
    shared = [
        f"ranks {', '.join(ranks)} on {host}"
        for (host, _), ranks in ranks_of.items()
        if len(ranks) > 1
    ]
    if not shared:
        return ""
    return (
        f"More than one rank has the same GPU ({'; '.join(shared)}), and NCCL needs one for each: "
        "start as many ranks on a node as it has GPUs, each with its own "
        "(srun --ntasks-per-node=N --gpus-per-node=N)."
    )


def identify_gpu(device: torch.device) -> str | None:
    """Return an identity of this process's GPU that is unique on its host.

    Slices of a GPU (MIG) may all report the UUID of the whole GPU. A process uses only one slice,
    and CUDA_VISIBLE_DEVICES names it, so the value of this variable is appended.

    Returns:
        The GPU's UUID; None on a CPU, on AMD GPUs, which may all have the same UUID, or where ranks
        may share a GPU (NCCL_MULTI_RANK_GPU_ENABLE of NCCL 2.30 or newer).
    """
    if (
        device.type != "cuda"
        or torch.version.hip
        or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0")
    ):
        return None
    properties = torch.cuda.get_device_properties(device)
    identity = str(properties.uuid)
    if "MIG" in properties.name:
        identity += f" {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    return identity


def what_must_agree() -> dict[str, str]:
    """Return library versions and a digest of this project's code, which all ranks must share.

    Ranks that differ in them may wait for each other without end.
    """
    digest = hashlib.sha256()
    for path in [PROJECT / "real_model_example.py", *sorted((PROJECT / "support").rglob("*.py"))]:
        digest.update(path.read_bytes())
    installed = versions()
    names = ("python", "torch", "transformers", "deepspeed", "cuda")
    selected = {name: installed[name] for name in names if name in installed}
    return {**selected, "script": digest.hexdigest()[:12]}


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the installed libraries that affect the results."""
    installed = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "peft", "numpy"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        installed["cuda"] = torch.version.cuda
    return installed


def open_store(launch: Launch, attempt: str, timeout: float = 60) -> dist.Store:
    """Open another connection to the store that rank 0 or torchrun's agent hosts.

    Args:
        launch: the place of this process in the run.
        attempt: prefix of the keys, from `rendezvous`.
        timeout: time limit of each call, in seconds.
    """
    store = dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return dist.PrefixStore(attempt, store)


def simulate_process_group(world_size: int, timeout: timedelta) -> None:
    """Initialize a process group of `world_size` simulated ranks, with this process as rank 0.

    It uses PyTorch's "fake" backend for tests, whose collectives return at once and transfer no
    data. Every strategy allocates the same memory as among real ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=world_size, timeout=timeout
    )


def describe_difference(values: list[Any], what: str) -> None:
    """Check that all ranks have the same value.

    Args:
        values: one value per rank, in the order of the ranks.
        what: name of the value, for the message.
    Raises:
        TrainingError: a rank has a different value than rank 0; it names the first one.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise TrainingError(
                f"{what} differs between the nodes: "
                f"rank 0 has {values[0]}, rank {rank} has {value}."
            )
