"""The first failure of a run is written and printed once, and every rank exits."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from support import progress
from support.cluster.hang import HangReport
from support.cluster.launch import Launch
from support.cluster.restart import REQUEST, Restart
from support.cluster.stop_signal import StopSignal
from support.cluster.watchdog import ROUND_SECONDS, Watchdog, in_time
from support.console import Console
from support.errors import EXIT_FAILED, LESS_MEMORY, OutOfMemory, TrainingError, UserError, explain
from support.files.atomic import TemporaryPaths
from support.process import exit_now
from support.redaction import print_traceback

HOST_IS_FULL = (
    "It is the host's memory, not the GPU's: "
    "fewer ranks on a node, or a strategy that offloads less."
)
GRACE_SECONDS = 5  # for a rank to exit by itself after another one has failed
STORE_SECONDS = 2  # time limit of the store when an error is reported
END_SECONDS = 20  # time limit of what a failed rank does before it exits
LONGEST_MESSAGE = 2000  # characters of an error in the store
RESERVE_BYTES = 64 << 20


class FailureMonitor:
    """Reports the first failure of a run, and ends this process.

    Args:
        stop: handler of the stop signals, which are ignored while the process exits.
    """

    def __init__(self, launch: Launch, console: Console, stop: StopSignal):
        self.launch, self.console, self.stop = launch, console, stop
        self.temporary = TemporaryPaths()
        # Functions that record an error; each returns False if another rank has recorded one.
        self.on_failure: list[Callable[[UserError], bool]] = []
        # Lines for a user whose memory ran out: on what used it, and on what would fit.
        self.memory_facts: list[Callable[[], list[str]]] = []
        self.remedies: Callable[[], list[str]] = list
        self.flushes: list[Callable[[], None]] = []  # write files that other programs read
        self.store: dist.Store | None = None  # has the first error; None with a single process
        self.hang = HangReport(launch, console, stop)
        self.restart: Restart | None = None  # after memory ran out (--auto_micro_batch)
        self._ending = threading.Event()  # this process is exiting
        self._reported_elsewhere = False  # another rank reports the first error
        # Address space that is released to report that no memory is left. Nothing is written to
        # it, so it uses no pages.
        self._reserve = mmap.mmap(-1, RESERVE_BYTES, flags=mmap.MAP_PRIVATE)

    def watch(self, stores: list[dist.Store], hang_seconds: int) -> None:
        """Start the watchdog, which ends this process when another rank has failed.

        Args:
            stores: two connections that no other thread uses; none for a single process.
            hang_seconds: see `HangReport.start`.
        """
        self.hang.start(hang_seconds)
        self.store = stores[0] if stores else None
        watchdog = Watchdog(self.launch, self.hang, stores[1] if stores else None)
        exchange = watchdog.exchange_until
        threading.Thread(target=exchange, args=(self._ending,), daemon=True).start()
        if stores:
            threading.Thread(target=self._watch, args=(watchdog,), daemon=True).start()

    def _watch(self, watchdog: Watchdog) -> None:
        """End the process when another rank has failed; runs in a thread.

        The main thread may be blocked in a collective that never completes.
        """
        while not self._ending.wait(ROUND_SECONDS):
            failure_text = watchdog.look()
            if failure_text is None:
                continue
            self._reported_elsewhere = failure_text == ""
            self._restart_if_agreed()
            # The store also exits when the run completes, and the main thread may have a more
            # precise error.
            if watchdog.lost and self._ending.wait(GRACE_SECONDS):
                return
            self._end_at_latest(EXIT_FAILED)
            if failure_text:
                self._report(TrainingError(failure_text))
                self.hang.dump(failure_text)
                self.hang.lost = failure_text  # the other thread adds the table
            if not watchdog.lost and self._ending.wait(GRACE_SECONDS):
                return
            self._flush()
            self.temporary.clean_up()
            exit_now(EXIT_FAILED)

    def end_failed(self, error: BaseException) -> NoReturn:
        """Record and report an error, and exit with its exit code.

        results.json is written first, by this thread, which needs no other thread and little
        memory. Only the rank that fails first reports its error: the errors of the other ranks are
        consequences.
        """
        self._reserve.close()
        user_error = explain(error)
        self._restart_if_agreed(user_error, error)
        self.stop.ignore()
        self._end_at_latest(user_error.exit_code, f"❌ {user_error}{self._rank_label}")
        try:
            self._report(user_error, error)
            # The other ranks must read the error in the store, which this process may host.
            if self.launch.is_main and self.launch.world_size > 1:
                time.sleep(2 * ROUND_SECONDS)
            self._flush()
            self._ending.set()
            self.hang.close()
            self.temporary.clean_up()
        finally:  # not sys.exit: the destructor of a communicator with a broken peer can hang
            exit_now(user_error.exit_code)

    def _restart_if_agreed(
        self, shown: UserError | None = None, error: BaseException | None = None
    ) -> None:
        """Start again if memory ran out and that may help, or if another rank has decided so.

        Args:
            shown, error: the error of this rank as the user sees it, and its exception.
        """
        if self.restart is None:
            return
        if self.restart.started:
            # Another thread waits for the other ranks, and one of them has left: this thread lost
            # its connection to that rank, and must not end the process.
            self.restart.execute(None)
        request, entry = f"{REQUEST} of rank {self.launch.rank}", ""
        may_help = isinstance(shown, OutOfMemory) and not is_of_host(shown)
        if may_help and self.restart.useful() and not self.stop.requested:
            free_variables(error)  # the activations
            entry = self._first_entry(request)
        elif (store := self.store) is not None:
            with contextlib.suppress(Exception):  # it has exited, or does not answer
                if in_time(lambda: store.check(["failure"]), STORE_SECONDS):
                    entry = in_time(lambda: store.get("failure"), STORE_SECONDS).decode()
        if not entry.startswith(REQUEST):
            return
        if entry == request and shown is not None:
            flags = " ".join(f"--{name} {value}" for name, value in self.restart.values.items())
            flags = flags.partition(" --output_dir")[0]
            again = f"All ranks start again with {flags}."
            self.console.print(f"ℹ️  {shown} {again}{self._rank_label}")
        self.hang.close()
        self.temporary.clean_up()
        self.restart.execute(self.store)

    @property
    def _rank_label(self) -> str:
        place = f" [rank {self.launch.rank} on {socket.gethostname()}]"
        return place if self.launch.world_size > 1 else ""

    def _flush(self) -> None:
        for flush in self.flushes:
            with contextlib.suppress(Exception):  # must not replace the error that ends the run
                flush()

    def _report(self, shown: UserError, error: BaseException | None = None) -> None:
        """Record an error in results.json, then print it, unless another rank has reported one.

        The first rank to write its error into the store reports it. If the store does not answer,
        it is the rank that changes the status in results.json.
        """
        if not self._record(shown, error) or self._reported_elsewhere:
            return
        # The store accepts no large values.
        text = str(shown)[:LONGEST_MESSAGE].encode(errors="replace").decode()
        entry = f"{self.launch.rank} {threading.get_ident()}: {text}"
        if self._first_entry(entry) != entry:
            return
        if error is not None and self.console.verbose:
            print_traceback(error)
        progress.write(f"❌ {shown}{self._rank_label}", sys.stderr)
        if isinstance(shown, OutOfMemory):
            self._ending.set()  # `_about_memory` may take longer than GRACE_SECONDS
            for line in self._about_memory(is_of_host(shown)):
                progress.write(f"   {line}", sys.stderr)

    def _record(self, shown: UserError, error: BaseException | None) -> bool:
        """Call the functions in `on_failure`; return False if another rank has recorded one."""
        for _ in range(2):
            try:
                return all(record(shown) for record in self.on_failure)
            except MemoryError:
                free_variables(error)
            except OSError:  # the disk is full: an incomplete checkpoint may fill it
                self.temporary.clean_up()
        return True

    def _first_entry(self, entry: str) -> str:
        """Write `entry` into the store if it is the first; return the first one."""
        if (store := self.store) is None:
            return entry
        try:
            return in_time(lambda: store.compare_set("failure", "", entry), STORE_SECONDS).decode()
        except Exception:  # the store has exited or does not answer, or no thread can be started
            return entry

    def _about_memory(self, of_host: bool) -> list[str]:
        """Return lines on what used the memory that ran out, and on what would fit."""
        lines, remedies = [HOST_IS_FULL] if of_host else [], []
        for describe in self.memory_facts:
            with contextlib.suppress(Exception):  # there may be too little memory left
                lines += describe()
        if not of_host:
            with contextlib.suppress(Exception):  # an architecture that the planner does not know
                remedies = self.remedies()
        return lines + (remedies or [LESS_MEMORY])

    def end_together(self, engine: Any, code: int) -> NoReturn:
        """Exit with `code` at the same time as all other ranks, after everything is written.

        Ranks that exit one after the other make ZeRO-3 abort. The interpreter's shutdown is
        skipped, because it sometimes destroys the I/O threads of infinity's NVMe handles while they
        run ("terminate called").

        Args:
            engine: its `destroy` method is called if it has one (DeepSpeed).
        """
        self.stop.ignore()
        try:
            dist.barrier()
            self._ending.set()
            self.hang.close()
            if hasattr(engine, "destroy"):
                engine.destroy()
            # Groups of gloo need no end. In torch 2.6 it can block: the destructor holds Python's
            # lock and joins threads that wait for it.
            if dist.get_backend() == "nccl":
                dist.destroy_process_group()
        finally:
            self.temporary.clean_up()
            exit_now(code)

    def _end_at_latest(self, code: int, line: str = "") -> None:
        """Exit after END_SECONDS, even if the main thread blocks (hung disk, stopped terminal).

        Args:
            line: printed first, unless it was printed before.
        """

        def end() -> None:
            if line and not self._ending.is_set():
                os.write(2, f"{line}\n".encode())
            os._exit(code)

        timer = threading.Timer(END_SECONDS, end)
        timer.daemon = True
        with contextlib.suppress(RuntimeError, MemoryError):  # this host cannot start a thread
            timer.start()


def is_of_host(error: OutOfMemory) -> bool:
    """Return whether the host has no memory left, and not the GPU."""
    return error.on_host and torch.cuda.is_available()


def free_variables(error: BaseException | None) -> None:
    """Free the local variables in the traceback of an error and of its causes (activations)."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
