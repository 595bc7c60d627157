"""Saves checkpoints while training continues: a copy of the model states, which a thread writes.

Training waits for the copy only, and for the save before if that is not complete. Without memory
for a copy, and for states on disk, training waits until the files are written. Only the
first save has a collective: the ranks meet again in the next step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from distributed_training import console
from distributed_training.checkpoints import writing
from distributed_training.checkpoints.contents import Contents, WholeParts
from distributed_training.checkpoints.folder import CheckpointFolder
from distributed_training.checkpoints.host_copy import HostCopy, elements_of_files, room_for_copies
from distributed_training.checkpoints.save_thread import Place, SaveThread, Taken, Times, wait_for
from distributed_training.checkpoints.saving import PieceWriter, write_shards
from distributed_training.errors import FirstError, OutOfMemory, TrainingError, explain
from distributed_training.files.json_types import JsonObject
from distributed_training.ranks.context import DistContext
from distributed_training.units import GB


class Saver:
    """Owner of the copy, and of the one thread that writes; of a run that saves.

    All ranks call the methods without "rank 0" in their description.

    Attributes:
        count: the saves that were started.
        wait_seconds: that training waited for all of them, with `wait`.
        write_seconds: that writing took, of the saves that have ended; without a copy it is a part
            of `wait_seconds`.
    """

    def __init__(self, folder: CheckpointFolder, contents: Contents, ctx: DistContext):
        self.folder, self.contents, self.ctx = folder, contents, ctx
        self.count, self.wait_seconds, self.write_seconds = 0, 0.0, 0.0
        self._copy: HostCopy | None = None
        self._may_copy = True  # until the copy did not fit
        self._description: tuple[str | None, dict[str, bytes]] | None = None  # kind of data, files
        self._thread: SaveThread | None = None  # until a method has taken note of its end
        ctx.monitor.complete_first(self._let_write)

    def save(self, step: int, manifest: JsonObject, background: bool, announced: bool) -> None:
        """Start to save the checkpoint of a step, after the end of the save before.

        Args:
            manifest: see `Contents.manifest`; the entries about files and pieces are added.
            background: allocate memory for the copy if there is none yet.
            announced: print its path when it is complete, and the time that it took.
        Raises:
            TrainingError: the save before cannot be written. Rank 0 raises it, which ends the
                other ranks, and nothing unfinished remains.
        """
        started = time.monotonic()
        self._raise_if(self._end_of_thread())
        waited = time.monotonic() - started
        place, errors = Place(self.folder, step, self.count), FirstError()
        self.count += 1
        if self.ctx.is_main:
            errors.attempt(writing.new_folder, place.unfinished)
            self.ctx.store.set(place.folder_key, "")  # for the threads of the other ranks
        taking = time.monotonic()
        taken = self._take(place, manifest, background, errors)
        now = time.monotonic()
        in_background = self._copy is not None
        times = Times(now if in_background else taking, waited, now - started, in_background)
        self.wait_seconds += times.paused
        self._thread = SaveThread(place, taken, times, announced, self.ctx)

    def wait(self) -> None:
        """Wait until the last save is complete.

        Raises:
            TrainingError: it cannot be written. All ranks raise it.
        """
        if self._thread is None:
            return
        started = time.monotonic()
        failed = self._end_of_thread()
        if not self.ctx.is_main:
            self._raise_if(failed)  # its thread could not report: rank 0 would wait for that
        failed = self.ctx.broadcast_from_rank0(failed)
        self.wait_seconds += time.monotonic() - started
        self._raise_if(failed)

    def check(self) -> None:
        """Raise the TrainingError of a save that has failed (rank 0), without waiting for it."""
        if self._thread is not None and self._thread.has_ended:
            self._raise_if(self._thread.failed)

    def when_complete(self, action: Callable[[], object]) -> None:
        """Call `action` when the last save is complete (rank 0): now, or in its thread."""
        if self._thread is None:
            action()
        else:
            self._thread.when_complete(action)

    def _let_write(self) -> None:
        """Wait for this rank's part of a save while it makes progress: the process is ending.

        Another rank may have failed. Rank 0 completes the checkpoint if all others write theirs.
        """
        if self._thread is not None:
            self._thread.let_write()

    def _end_of_thread(self) -> str:
        """Wait for this rank's thread; return on rank 0 why the save has failed, or ""."""
        thread = self._thread
        if thread is None:
            return ""
        thread.wait()
        self._thread = None
        self.write_seconds += thread.seconds
        return thread.failed

    def _raise_if(self, failed: str) -> None:
        if failed:
            raise TrainingError(failed)

    def _take(
        self, place: Place, manifest: JsonObject, background: bool, errors: FirstError
    ) -> Taken:
        """Copy the states of this rank for the thread, or write them if there is no room."""
        state, whole = self.contents.shards, None
        if self.ctx.is_main:
            # Training continues to change the counters and positions.
            manifest = json.loads(json.dumps(manifest))
            whole = errors.attempt(self._whole_parts, place)
        if self._copy is None and background and self._may_copy:
            self._copy = self._create_copy()
            self._may_copy = self._copy is not None
        if self._copy is not None:
            writer = self._copy.fill(place.unfinished, state, self.ctx)
            return Taken(writer, self._copy.wait, errors, manifest, whole)
        writer = PieceWriter(place.unfinished, self.ctx.rank)
        wait_for(self.ctx.store, place.folder_key)
        errors.attempt(write_shards, writer, state, self.ctx.world_size)
        if errors.error is not None and isinstance(explain(errors.error), OutOfMemory):
            raise errors.error  # its report has remedies; it ends the other ranks
        return Taken(writer, lambda: None, errors, manifest, whole)

    def _create_copy(self) -> HostCopy | None:
        """Allocate the copy if all nodes have memory for it; says so if not."""
        if self.contents.shards.on_disk:
            return None
        elements = elements_of_files(self.contents.shards, self.ctx)
        fits, free = room_for_copies(4 * sum(elements), self.ctx)
        ranks = self.ctx.all_gather((fits, 4 * sum(elements), free))
        if all(fits for fits, _, _ in ranks):
            return HostCopy(elements, self.ctx.device)
        size, free = next((size, free) for fits, size, free in ranks if not fits)
        console.warn(
            f"Training waits until each checkpoint is written: a copy of the model states needs "
            f"{size / GB:.1f} GB of host memory for each rank, and a node with "
            f"{self.ctx.ranks_per_node} has {free / GB:.1f} GB free."
        )
        return None

    def _whole_parts(self, place: Place) -> WholeParts:
        """Return what rank 0 writes besides the pieces."""
        kind = self.contents.kind  # of a stream it is known later
        if self._description is None or self._description[0] != kind:
            self._description = (kind, self.contents.describe(place.unfinished))
        return self.contents.whole_parts(self._description[1])
