"""The thread that writes a checkpoint from a copy of the model states, while training continues.

The thread of each rank writes its files to a folder with a temporary name, and reports them in the
store of the run: it calls no collective, which the ranks would have to call in the same order as
those of a step. The thread of rank 0 waits for all reports, writes the rest with the manifest last,
and renames the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from distributed_training import console
from distributed_training.checkpoints import writing
from distributed_training.checkpoints.contents import WholeParts
from distributed_training.checkpoints.folder import CheckpointFolder
from distributed_training.checkpoints.saving import PieceWriter
from distributed_training.errors import FirstError, explain
from distributed_training.files import atomic
from distributed_training.files.json_types import JsonObject
from distributed_training.ranks.context import DistContext

NICE = 5  # added to the niceness of the thread, so that a core computes the step first
LOOK_SECONDS = 0.02  # between two looks for the reports of other ranks
# A process that ends after an error waits for its thread while this one makes progress within
# these seconds: at its disk, or that of a rank that has told of its progress; and with the other
# ranks, which may have been killed.
DISK_SECONDS, RANKS_SECONDS = 20, 5
TELL_SECONDS = 1  # between two messages of a rank that it makes progress

Value = TypeVar("Value")
Report = tuple[list, dict[str, JsonObject], str]  # a rank's pieces, files and error


class Place(NamedTuple):
    """Where a checkpoint is saved."""

    checkpoints: CheckpointFolder
    step: int
    number: int  # of the save in this process, from 0

    @property
    def final(self) -> Path:
        """The folder of the complete checkpoint."""
        return self.checkpoints.of_step(self.step)

    @property
    def unfinished(self) -> Path:
        """The folder while it is written."""
        return self.checkpoints.path / f"{atomic.PARTIAL}{self.final.name}"

    @property
    def folder_key(self) -> str:
        """The key in the store that rank 0 writes when the folder exists."""
        return f"saves/{self.number}/folder"

    def key_of(self, rank: int) -> str:
        """Return the key in the store of a rank's report."""
        return f"saves/{self.number}/{rank}"

    def progress_key(self, rank: int) -> str:
        """Return the key in the store of the number of a rank's messages until its report."""
        return f"saves/{self.number}/{rank}/progress"

    def error(self, reason: str) -> str:
        """Return the text of an error; "" without a reason."""
        return reason and f"The checkpoint {self.final} could not be written: {reason}"


class Taken(NamedTuple):
    """The states of this rank in host memory, or in files already."""

    writer: PieceWriter
    wait: Callable[[], object]  # until a GPU has copied them
    errors: FirstError  # of what was done so far
    manifest: JsonObject  # without the entries about files and pieces
    whole: WholeParts | None  # on rank 0


class Times(NamedTuple):
    """When the states were taken, and how long training waited."""

    started: float  # time.monotonic() at the start of the writing
    waited: float  # seconds, for the save before
    paused: float  # seconds, for both
    in_background: bool  # whether the files are written in the thread


class SaveThread:
    """A checkpoint that is being written by a thread of this rank, and on rank 0 completed.

    Attributes:
        failed: on rank 0, once it has ended: why there is no checkpoint, or "".
        seconds: that the writing took, on rank 0.
    """

    def __init__(
        self, place: Place, taken: Taken, times: Times, announced: bool, ctx: DistContext
    ) -> None:
        self.failed, self.seconds = "", 0.0
        self._place, self._taken, self._times, self._ctx = place, taken, times, ctx
        self._announced = announced
        self._afterwards: list[Callable[[], object]] = []
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._advances, self._limit = 0, DISK_SECONDS  # of seconds between two advances
        self._told = time.monotonic()  # when it told rank 0 of its progress
        threading.Thread(target=self._run, name="save", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether this rank's part is done; on rank 0 the checkpoint is complete, or has failed."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._ended.wait()

    def let_write(self) -> None:
        """Wait until it has ended, or makes no progress."""
        seen, since = -1, time.monotonic()
        while not self._ended.wait(LOOK_SECONDS):
            if self._advances != seen:
                seen, since = self._advances, time.monotonic()
            if time.monotonic() - since > self._limit:
                return

    def when_complete(self, action: Callable[[], object]) -> None:
        """Call `action` when the checkpoint is complete (rank 0): now, or in the thread.

        It is not called if there will be none.
        """
        with self._lock:
            if not self._ended.is_set():
                self._afterwards.append(action)
                return
        if not self.failed:
            action()

    # ------------------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        errors, writer = self._taken.errors, self._taken.writer
        try:
            _yield_to_training()
            self._wait_for_ranks(lambda: wait_for(self._ctx.store, self._place.folder_key))
            errors.attempt(self._taken.wait)
            errors.attempt(writer.write, self._wrote_block)
            own = (writer.pieces, writer.files, str(errors))
            if self._ctx.is_main:
                self._complete(own)
            else:
                # TCPStore closes the connection of a client whose value is larger than 8 MiB.
                report = zlib.compress(json.dumps(own).encode(), level=1)
                self._ctx.store.set(self._place.key_of(self._ctx.rank), report)
        except BaseException as error:  # training waits until this thread has ended
            self.failed = self.failed or self._place.error(str(explain(error)))
        finally:
            self._ended.set()

    def _advance(self) -> None:
        self._advances += 1

    def _wrote_block(self) -> None:
        self._advance()
        if not self._ctx.is_main and time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self._ctx.store.add(self._place.progress_key(self._ctx.rank), 1)

    def _complete(self, own: Report) -> None:
        """Wait for the other ranks, complete the checkpoint, and rename it; or set `failed`."""
        place, errors = self._place, self._taken.errors
        ranks = [own, *self._wait_for_ranks(self._reports)]
        self._ctx.store.delete_key(place.folder_key)
        failed = (f"{error} [rank {rank}]" for rank, (_, _, error) in enumerate(ranks) if error)
        reason = next(failed, "")
        if not reason:
            manifest, whole = self._taken.manifest, self._taken.whole
            manifest["pieces"] = [piece for pieces, _, _ in ranks for piece in pieces]
            manifest["files"] = {name: f for _, entry, _ in ranks for name, f in entry.items()}
            errors.attempt(writing.complete, place.unfinished, whole, manifest)
            errors.attempt(place.checkpoints.add, place.unfinished, place.final)
            reason = str(errors)
        atomic.remove(place.unfinished)  # it exists after an error only
        self.seconds = time.monotonic() - self._times.started
        if self._announced and not reason:
            self._announce()
        with self._lock:
            for action in [] if reason else self._afterwards:
                errors.attempt(action)
            self.failed = place.error(reason or str(errors))
            self._ended.set()

    def _wait_for_ranks(self, wait: Callable[[], Value]) -> Value:
        """Call `wait`, during which other ranks must make the progress."""
        self._limit = RANKS_SECONDS
        self._advance()
        found = wait()
        self._limit = DISK_SECONDS
        self._advance()
        return found

    def _reports(self) -> list[Report]:
        return [self._report_of(rank) for rank in range(1, self._ctx.real_world_size)]

    def _report_of(self, rank: int) -> Report:
        """Wait for a rank's pieces, files and error."""
        store, key = self._ctx.store, self._place.key_of(rank)
        progress_key, messages = self._place.progress_key(rank), 0
        while not store.check([key]):
            if (now := store.add(progress_key, 0)) != messages:
                messages, self._limit = now, DISK_SECONDS  # it may flush its file for a while
                self._advance()
            time.sleep(LOOK_SECONDS)
        self._limit = RANKS_SECONDS
        self._advance()
        pieces, entries, error = json.loads(zlib.decompress(store.get(key)))
        store.delete_key(key)
        store.delete_key(progress_key)
        return pieces, entries, error

    def _announce(self) -> None:
        times, shown = self._times, f"{self._times.paused:.1f} s"
        if times.waited >= 0.1:
            shown += f", {times.waited:.1f} s of it for the save before"
        if times.in_background:
            shown += f"; written in {self.seconds:.1f} s"
        console.print0(f"💾 {self._place.final} ({shown})")


def wait_for(store: dist.Store, key: str) -> None:
    """Wait for a key. If the rank that writes it is lost, FailureMonitor ends this process."""
    while not store.check([key]):
        time.sleep(LOOK_SECONDS)


def _yield_to_training() -> None:
    """Lower the priority of the calling thread: on Linux each thread has its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICE)
