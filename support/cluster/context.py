"""Agreement between ranks: who failed first, who prepares what, and an orderly end.

A small key-value store (torch's TCPStore, hosted by rank 0 or by torchrun) carries what must not
depend on a collective: a collective has a time limit, needs every rank, and hangs when one of them
is gone.
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

from support import process, progress
from support.advice import LESS_MEMORY
from support.cli.flags import PROJECT
from support.cluster import failures
from support.cluster.launch import Launch
from support.errors import (
    EXIT_FAILED,
    OutOfMemory,
    StoppedBySignal,
    TrainingError,
    UserError,
    explain,
)
from support.files.atomic import remove
from support.redaction import print_traceback

HOST_IS_FULL = "It is the host's memory, not the GPU's: fewer ranks on a node, or a strategy that offloads less."
GRACE_SECONDS = 5  # for a rank to end by itself after another one has failed
SAME_REQUEST_SECONDS = 5  # signals so soon after the first are the launcher's repetition of it
STORE_SECONDS = 2  # for an answer of the store when an error is reported
DISK_SECONDS = 5  # for a disk when an error is reported
END_SECONDS = 20  # for what a failed rank does before it ends
LONGEST_MESSAGE = 2000  # characters of an error in the store
# A disk that is full, or hangs (TimeoutError), or a host that can start no thread: the error is
# printed all the same.
RESERVE_BYTES = 64 << 20
NO_REASON_FOR_SILENCE = (OSError, RuntimeError, MemoryError)


class StopSignal:
    """A request to end the run, by a scheduler, a launcher or a user: SIGTERM, SIGINT, SIGUSR1, or
    SIGHUP of a lost terminal.

    Before training there is nothing to save, and a signal ends the run like an error. After
    `defer()` it is only recorded, for the ranks to agree on between two steps. Launchers send
    several signals for one request; a second Ctrl-C ends at once.
    """

    def __init__(self):
        self.requested, self._name = False, ""
        self._deferred, self._first = False, 0.0
        for number in process.STOP_SIGNALS:
            if number in process.ALSO_IF_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._arrived)

    def defer(self) -> None:
        """From now on a signal waits for the end of the step.

        Raises:
            StoppedBySignal: one arrived earlier where Python ignores exceptions, as in a
                destructor.
        """
        if self.requested:
            self._end()
        self._deferred = True

    def ignore(self) -> None:
        """Everything is written: let the run end."""
        if (
            threading.current_thread() is threading.main_thread()
        ):  # only there Python lets handlers be changed
            for number in process.STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _arrived(self, number: int, _frame) -> None:
        now, repeated = time.monotonic(), self.requested
        if not repeated:
            self.requested, self._name, self._first = True, signal.Signals(number).name, now
        elif now - self._first <= SAME_REQUEST_SECONDS:
            return  # `finally` and `except` blocks of the first one are at work
        if not self._deferred:
            self._end()
        if repeated and number == signal.SIGINT:
            raise KeyboardInterrupt

    def _end(self) -> NoReturn:
        raise StoppedBySignal(
            f"Stopped by {self._name}; if another rank failed first, its message is above."
        )


@dataclass
class Run:
    """This process in the run: its place, its device, and what is shared with the other ranks."""

    launch: Launch
    device: torch.device
    backend: str
    verbose: bool
    quiet: bool = False
    attempt: str = ""  # prefix of this start's keys in the store
    store: dist.Store | None = None
    temporary: list[str] = field(
        default_factory=list
    )  # folders and files to remove, at the latest when the run ends
    on_failure: list[Callable[[UserError], bool]] = field(
        default_factory=list
    )  # False: another rank has done that
    memory_facts: list[Callable[[], list[str]]] = field(
        default_factory=list
    )  # lines to add when memory runs out
    ways_to_fit: Callable[[], list[str]] = field(default=lambda: [])  # and what to change
    at_end: list[Callable[[], None]] = field(
        default_factory=list
    )  # when training and export are done
    flushes: list[Callable[[], None]] = field(
        default_factory=list
    )  # what others read of this run, also when it fails
    ending: threading.Event = field(default_factory=threading.Event)
    stop: StopSignal = field(default_factory=lambda: StopSignal())
    # For the report that no memory is left (a thread, a file, lines). Nothing is written there, so
    # it takes no pages.
    reserve: mmap.mmap = field(
        default_factory=lambda: mmap.mmap(-1, RESERVE_BYTES, flags=mmap.MAP_PRIVATE)
    )

    nodes: int = 1
    precision: str = "fp32"  # of the arithmetic, once --precision is settled for the device
    lock: Any = None  # keeps a second run out of the output folder, on rank 0

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
        """This process stands for rank 0 of several that do not exist; what it computes means
        nothing, what it holds does.
        """
        return self.backend == "fake"

    @property
    def real_world_size(self) -> int:
        """Processes that there are."""
        return 1 if self.simulated else self.world_size

    def say(self, text: str) -> None:
        """Print on rank 0 only."""
        if self.is_main and not self.quiet:
            self.print(text)

    def print(self, text: str) -> None:
        """Print on this rank, whichever it is, also under --quiet."""
        progress.write(text)  # not through a bar

    def warn(self, text: str) -> None:
        """Say something the user should know, on rank 0 only, also under --quiet."""
        if self.is_main:
            self.print(f"ℹ️  {text}")

    def bar(
        self, what: str, total: int | None = None, unit: str = "step", done: int = 0
    ) -> progress.Bar:
        """A live bar, where somebody watches rank 0."""
        return progress.Bar(
            what, total, unit, self.is_main and not self.quiet and progress.on_terminal(), done
        )

    def mesh(self, hybrid: bool):
        """All ranks in a row; `hybrid` a row for each node, along which FSDP shards, with copies
        down the columns.
        """
        if not hybrid:
            return init_device_mesh(self.device.type, (self.world_size,))
        if self.nodes == 1:
            self.warn(
                "HYBRID_SHARD on one node is FULL_SHARD: there is no other node to hold a copy."
            )
        return init_device_mesh(
            self.device.type,
            (self.nodes, self.launch.local_world_size),
            mesh_dim_names=("replicate", "shard"),
        )

    # ------------------------------------------------------------------- preparation, once per node

    def once_per_node(self, what: str, prepare: Callable[[], Any]) -> Any:
        """Let the first rank of each node prepare something while all others wait.

        The wait is no collective, so it may last as long as it must: an hour of tokenising hits no
        time limit. All wait for all nodes, so that no node waits for another in the next
        collective.
        Args:
            what: name of the preparation, unique in the run.
            prepare: called on the node's first rank; its result must be JSON, and small: the store
                takes 8 MB at most. What grows with the data belongs into a file.
        Returns:
            The result, on every rank.
        """
        if self.store is None:
            return prepare()
        key = f"prepared/{what}/{self.launch.node}"
        if self.launch.is_node_leader:
            self.store.set(key, json.dumps(prepare()))
            self.store.add(f"prepared/{what}/nodes", 1)
        while self.store.add(f"prepared/{what}/nodes", 0) < self.nodes:
            time.sleep(0.1)  # if a first rank fails instead, `_watch` ends this process
        return json.loads(self.store.get(key))

    def asked_to_stop(self) -> bool:
        """Whether a signal has asked any rank to stop; all ranks call it together and get the same
        answer.
        """
        asked = torch.tensor(float(self.stop.requested), device=self.device)
        dist.all_reduce(asked)
        return asked.item() > 0

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        values = [value]
        if self.simulated:
            return value
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks, on every rank; of a simulation, of
        the one that is there.
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
        """The main thread may be stuck in a collective that will never end, so this thread ends the
        process.
        """
        while not self.ending.wait(failures.PERIOD_SECONDS):
            found = monitor.look()
            if found is None:
                continue
            # A store that ends may be the run's orderly end, or the main thread has an error that
            # says more.
            if monitor.lost and self.ending.wait(GRACE_SECONDS):
                return
            if found:
                self._report(TrainingError(found))
            if not monitor.lost and self.ending.wait(GRACE_SECONDS):
                return
            end_at_latest(EXIT_FAILED)
            self._flush()
            self.clean_up()
            _exit(EXIT_FAILED)

    def clean_up(self, *folders: str) -> None:
        """Remove these of this process's temporary folders and files; all of them if none is named."""
        for folder in [f for f in self.temporary if not folders or f in folders]:
            with contextlib.suppress(ValueError):  # `_watch` may clean up at the same time
                self.temporary.remove(folder)
            remove(Path(folder))

    def end_failed(self, error: BaseException) -> NoReturn:
        """End this process. Only the rank that fails first reports its error: those of the others
        follow from it.
        """
        self.reserve.close()
        self.stop.ignore()
        shown = explain(error)
        end_at_latest(shown.exit_code)
        try:
            if self.verbose:
                print_traceback(error)
            with contextlib.suppress(
                *NO_REASON_FOR_SILENCE
            ):  # before anything is written: half a checkpoint may fill the disk
                failures.in_time(self.clean_up, END_SECONDS / 2)
            self._report(shown, error)
            if (
                self.is_main and self.world_size > 1
            ):  # the others must see the error in the store that this process may host
                time.sleep(2 * failures.PERIOD_SECONDS)
            self._flush()
            self.ending.set()
        finally:  # not sys.exit: a communicator with a broken peer can hang in its destructor
            _exit(shown.exit_code)

    def _flush(self) -> None:
        for flush in self.flushes:
            with contextlib.suppress(Exception):  # the run ends for another reason
                flush()

    def _report(self, shown: UserError, error: BaseException | None = None) -> None:
        """Record and print an error, unless another rank has reported one.

        The ranks agree through the store on who is first. Where the store has ended with rank 0, or
        does not answer, it is the rank that changes the status in results.json.
        """
        if not self._may_report(str(shown)):
            return
        recorded = False
        with contextlib.suppress(
            *NO_REASON_FOR_SILENCE
        ):  # a thread needs more memory than there may be
            if not self._record(shown):
                return
            recorded = True
        where = f" [rank {self.rank} on {socket.gethostname()}]" if self.world_size > 1 else ""
        progress.write(f"❌ {shown}{where}", sys.stderr)  # not through a bar
        if isinstance(shown, OutOfMemory):
            self.ending.set()  # collecting the facts may take longer than GRACE_SECONDS
            for line in self._about_memory(shown):
                progress.write(f"   {line}", sys.stderr)
        if not recorded:
            free_variables(error)
            with contextlib.suppress(*NO_REASON_FOR_SILENCE):
                self._record(shown)

    def _record(self, shown: UserError) -> bool:
        """Write the error where it is to be found later; False if another rank has."""
        return all(
            failures.in_time(partial(record, shown), DISK_SECONDS) for record in self.on_failure
        )

    def _may_report(self, message: str) -> bool:
        """False if another rank, or another thread of this one, has written an error into the
        store.
        """
        if self.store is None:
            return True
        shown = (
            message[:LONGEST_MESSAGE].encode(errors="replace").decode()
        )  # the store takes no large values
        mine = f"{self.rank} {threading.get_ident()}: {shown}"
        try:
            return (
                failures.in_time(
                    lambda: self.store.compare_set("failure", "", mine), STORE_SECONDS
                ).decode()
                == mine
            )
        except Exception:  # it has ended, or does not answer
            return True

    def _about_memory(self, shown: OutOfMemory) -> Iterator[str]:
        """What was held where it ran out, and what would have fitted."""
        facts = [HOST_IS_FULL] if shown.on_host and self.device.type == "cuda" else []
        for look in self.memory_facts:
            with contextlib.suppress(Exception):  # there may be no memory left to look around in
                facts += look()
        ways = []
        if not (shown.on_host and self.device.type == "cuda"):
            with contextlib.suppress(Exception):  # an architecture that the planner does not know
                ways = self.ways_to_fit()
        yield from facts
        yield from ways or [LESS_MEMORY]

    def end_together(self, engine: Any, code: int) -> NoReturn:
        """End this process, at the same time as all others, with everything written.

        Together: ranks that leave one by one make ZeRO-3 abort. And without the interpreter's own
        shutdown, in which the I/O threads of infinity's NVMe handles are at times destroyed while
        they run ("terminate called").
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
    """End this process with a message if the block takes longer: calls to a store whose host hangs
    have no limit.
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
    """Free what the functions that an error ended still hold, such as activations."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def end_at_latest(code: int) -> None:
    """End this process soon, even if what is still to be done blocks: a disk that hangs, a terminal
    that is stopped.
    """
    timer = threading.Timer(END_SECONDS, os._exit, (code,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # this host can start no thread
        timer.start()


def _exit(code: int) -> NoReturn:
    """Leave at once, without the interpreter's shutdown, but with everything printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it is closed
            stream.flush()
    os._exit(code)


CONNECT_SECONDS = 5  # of one attempt
ARRIVAL_SECONDS = 300  # for all ranks to start: first imports from a busy shared disk take minutes


def meet(
    launch: Launch, backend: str, timeout: float, gpu: str | None = None
) -> tuple[dist.Store, str]:
    """Let every rank say that it is there, and on what it runs; nothing here is a collective, so
    nothing can hang.

    torchrun's store outlives its ranks, and after a restart it still holds what the attempt before
    wrote, while each agent counts restarts for itself. So every start has a number of its own,
    drawn at random; rank 0 puts the numbers that it finds under a new name for this attempt, until
    all ranks say that theirs are among them.

    Args:
        launch: this process's place.
        backend: of the process group that is to come.
        timeout: seconds to wait for the last rank.
        gpu: of this rank, as `identify_gpu` has it.
    Returns:
        The store that `dist.init_process_group` is to use, and the attempt's name, for the keys of
        this run.
    Raises:
        TrainingError: ranks have not arrived, differ in what must be the same, or have the same
            GPU; the line names them and their hosts.
    """
    unanswered = f"The store at {launch.master_addr}:{launch.master_port} does not answer: is the host of rank 0 up?"
    with ends_within(timeout + 15, unanswered):
        store = connect(launch, timeout)
    with ends_within(timeout + 15, unanswered):  # anew: rank 0 waits as long from its own start
        mine = {
            "number": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "gpu": gpu,
            "facts": {**what_must_agree(), "backend": backend},
        }
        place = f"meeting/{launch.world_size}"
        store.set(f"{place}/here/{launch.rank}", json.dumps(mine))
        until = time.monotonic() + timeout
        if launch.is_main:
            attempt, wrong = _call_the_roll(store, place, launch, until)
        else:
            attempt, wrong = _answer_the_roll(store, place, launch, until, mine["number"])
    if wrong and not launch.is_main:
        time.sleep(5)  # rank 0 says it; a launcher ends all when one ends
        _exit(EXIT_FAILED)
    if wrong:
        raise TrainingError(wrong)
    return dist.PrefixStore(f"{attempt}/group", store), attempt


def connect(launch: Launch, timeout: float) -> dist.Store:
    """The store of the run; rank 0 hosts it, unless torchrun's agent does.

    Raises:
        TrainingError: rank 0 is not there after `timeout` seconds.
    """
    host, until = launch.is_main and not failures.agent_hosts_store(), time.monotonic() + timeout
    while not host:  # no signal is handled while torch waits for a connection
        try:
            socket.create_connection(
                (launch.master_addr, launch.master_port), CONNECT_SECONDS
            ).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise TrainingError(
                    f"Rank 0 does not answer at {launch.master_addr}:{launch.master_port}. Has it started, and "
                    "is the port open between the hosts?"
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


def _call_the_roll(store: dist.Store, place: str, launch: Launch, until: float) -> tuple[str, str]:
    """Rank 0's part: announce who is seen until all have answered; returns (attempt, what is wrong
    or "").
    """
    announced, attempt, silent = {}, "", list(range(launch.world_size))
    while silent and time.monotonic() < until:
        seen = {
            r: json.loads(store.get(f"{place}/here/{r}"))
            for r in range(launch.world_size)
            if store.check([f"{place}/here/{r}"])
        }
        if seen != announced:
            announced, attempt = seen, f"attempt/{uuid.uuid4().hex}"
            numbers = {r: rank["number"] for r, rank in seen.items()}
            store.set(f"{place}/roll", json.dumps({"attempt": attempt, "numbers": numbers}))
        silent = [
            r for r in range(1, launch.world_size) if not store.check([f"{attempt}/present/{r}"])
        ]
        time.sleep(0.05 if silent else 0)
    if silent:
        wrong = _who_is_missing(silent, announced, launch)
    else:
        wrong = _who_differs(announced) or _who_shares_a_gpu(announced)
    store.set(f"{attempt}/verdict", wrong)
    return attempt, wrong


def _answer_the_roll(
    store: dist.Store, place: str, launch: Launch, until: float, number: str
) -> tuple[str, str]:
    """Another rank's part: answer every roll that it is on, until rank 0 gives its verdict."""
    attempt = ""
    while time.monotonic() < until + 5:  # rank 0 waits as long, and then says who is missing
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
        except RuntimeError:  # the store has gone, and with it rank 0, which has said why
            return attempt, "rank 0 has ended"
        time.sleep(0.05)
    raise TrainingError(
        f"Rank 0 has not arrived at {launch.master_addr}:{launch.master_port}: look at what it prints."
    )


def _who_is_missing(missing: list[int], seen: dict, launch: Launch) -> str:
    nodes = ", ".join(
        str(node) for node in sorted({rank // launch.local_world_size for rank in missing})
    )
    there = ", ".join(
        sorted({rank["host"] for number, rank in seen.items() if number not in missing})
    )
    first = f"rank {missing[0]}{' and more' if len(missing) > 1 else ''}, node {nodes}"
    return (
        f"{len(missing)} of {launch.world_size} ranks have not arrived ({first}). Here are {there}. Look at what the "
        f"others print, and whether they reach {launch.master_addr}:{launch.master_port}."
    )


def _who_differs(seen: dict) -> str:
    first = seen[0]
    for number, rank in seen.items():
        found = [
            f"{key} {value} there and {first['facts'].get(key)} on {first['host']}"
            for key, value in rank["facts"].items()
            if value != first["facts"].get(key)
        ]
        if found:
            return f"Rank {number} on {rank['host']} is not as rank 0: {'; '.join(found)}. Make them the same."
    return ""


def group_options(args, device: torch.device, world_size: int) -> dict[str, Any]:
    """How `dist.init_process_group` is to connect the ranks.

    FSDP that offloads to the CPU also reduces tensors in host memory, which NCCL cannot:
    GradScaler's flag of infinite gradients (torch/distributed/tensor/_dispatch.py,
    found_inf_reduce_handler). Only there gloo is added, because it needs a network interface that
    all hosts reach by name.

    DeepSpeed makes a second group of all ranks (deepspeed/utils/groups.py, _clone_world_group).
    Where the first is bound to a device, NCCL splits its communicator instead of setting up another
    one. torch 2.6.1 to 2.7.0 may hang then (pytorch issue 153960), and a single rank has nothing to
    split.
    Returns:
        The keyword arguments `backend`, and where it helps `device_id`.
    """
    if device.type == "cpu":
        return {"backend": "gloo"}
    if args.strategy == "fsdp" and args.fsdp.offload:
        return {"backend": "cpu:gloo,cuda:nccl"}
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:3])
    if args.ds_config_dict and world_size > 1 and not (2, 6, 0) < release < (2, 7, 1):
        return {"backend": "nccl", "device_id": device}
    return {"backend": "nccl"}


def _who_shares_a_gpu(seen: dict) -> str:
    """Slurm shows each task all GPUs of its node, or only its own, or the same one to all tasks;
    only the last is wrong.
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
        f"More than one rank has the same GPU ({'; '.join(shared)}), and NCCL needs one for each: start as many ranks on "
        "a node as it has GPUs, each with its own (srun --ntasks-per-node=N --gpus-per-node=N)."
    )


def identify_gpu(device: torch.device) -> str | None:
    """What distinguishes this process's GPU from the others of its host.

    Returns:
        Its UUID; None on a CPU, on AMD GPUs, which may all have the same, or where NCCL (2.30 or
        newer) is told that ranks may share a GPU. Slices of a GPU (MIG) may all report the UUID of
        the whole; a process has only one slice, and CUDA_VISIBLE_DEVICES names it.
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
    """Versions and this project's own code: ranks that differ in them may wait for each other
    without end.
    """
    digest = hashlib.sha256()
    for path in [PROJECT / "real_model_example.py", *sorted((PROJECT / "support").rglob("*.py"))]:
        digest.update(path.read_bytes())
    found = {
        name: versions()[name]
        for name in ("python", "torch", "transformers", "deepspeed", "cuda")
        if name in versions()
    }
    return {**found, "script": digest.hexdigest()[:12]}


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "peft", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def open_store(launch: Launch, attempt: str, timeout: float = 60) -> dist.Store:
    """A connection of its own to the store that rank 0 (or torchrun's agent) hosts; `attempt` as
    `meet` has it.
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
    """Make this process rank 0 of `world_size` in a group whose collectives return at once and move
    nothing.

    It is PyTorch's own, for tests: every strategy allocates as it would among real ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=world_size, timeout=timeout
    )


def describe_difference(values: list[Any], what: str) -> None:
    """Raise if the ranks do not all have the same value.

    Raises:
        TrainingError: names the first rank that differs.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise TrainingError(
                f"{what} differs between the nodes: rank 0 has {values[0]}, rank {rank} has {value}."
            )
