"""The first failure of a run is written and printed once, and every rank exits."""

from __future__ import annotations

import concurrent.futures
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

from support import console as progress
from support.cluster.launch import Launch
from support.cluster.restart import REQUEST, Restart
from support.cluster.stop_signal import StopSignal
from support.cluster.watchdog import ROUND_SECONDS, Watchdog
from support.console import Console
from support.errors import (
    EXIT_FAILED,
    LESS_MEMORY,
    OutOfMemory,
    UserError,
    explain,
    print_traceback,
)
from support.files.atomic import TemporaryPaths
from support.process import exit_now

HOST_IS_FULL = (
    "It is the host's memory, not the GPU's: "
    "fewer ranks on a node, or a strategy that offloads less."
)
GRACE_SECONDS = 5  # for a rank to exit by itself after another one has failed
STORE_SECONDS = 2  # time limit of the store when an error is reported
END_SECONDS = 20  # time limit of what a failed rank does before it exits
LONGEST_MESSAGE = 2000  # characters of an error in the store, which accepts no large values
RESERVE_BYTES = 64 << 20
NO_ANSWER = (RuntimeError, MemoryError, concurrent.futures.TimeoutError)  # see `in_time`


class FailureMonitor:
    """Reports the first failure of a run, and ends this process."""

    def __init__(self, launch: Launch, console: Console, stop: StopSignal):
        self.launch, self.console, self.stop = launch, console, stop
        self.watchdog = Watchdog(launch, console, stop)
        self.temporary = TemporaryPaths()
        # Functions that record an error; each returns False if another rank has recorded one.
        self.on_failure: list[Callable[[UserError], bool]] = []
        # Lines for a user whose memory ran out: on what used it, and on what would fit.
        self.memory_facts: list[Callable[[], list[str]]] = []
        self.remedies: Callable[[], list[str]] = list
        self.flushes: list[Callable[[], None]] = []  # write files that other programs read
        self.restart: Restart | None = None  # after memory ran out (--auto_micro_batch)
        self._ending = threading.Event()  # this process is exiting
        # Address space to report that no memory is left. It is never written to: it has no pages.
        self._reserve = mmap.mmap(-1, RESERVE_BYTES, flags=mmap.MAP_PRIVATE)

    def watch(self, store: dist.Store | None, hang_seconds: int) -> None:
        """Start the watchdog, which ends this process when another rank has failed.

        Args:
            store, hang_seconds: see `Watchdog.start`.
        """
        self.watchdog.start(store, hang_seconds)
        exchange = self.watchdog.exchange_until
        threading.Thread(target=exchange, args=(self._ending,), daemon=True).start()
        if store is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    @property
    def store(self) -> dist.Store | None:
        """The store with the first error; None with a single process."""
        return self.watchdog.store

    def _watch(self) -> None:
        """End the process when another rank has failed: the main thread may wait for it."""
        found, error = False, None
        while not (found or self._ending.wait(ROUND_SECONDS)):
            try:
                found = self.watchdog.look()
            except Exception as problem:
                found, error = True, problem
        self._restart_if_agreed()
        # The main thread may have a more precise error, or the run may have completed.
        if self._ending.wait(GRACE_SECONDS):
            return
        if error is not None:
            self.end_failed(error, with_stacks=True)
        self._exit_at_latest(EXIT_FAILED)
        self._leave(EXIT_FAILED)

    def _exit_at_latest(self, code: int, line: str = "") -> None:
        """Exit after END_SECONDS, also if a thread blocks on a hung disk or a stopped terminal.

        Args:
            line: is printed then, unless the error was reported.
        """

        def give_up() -> None:
            if line and not self._ending.is_set():
                os.write(2, f"{line}\n".encode())
            os._exit(code)

        with contextlib.suppress(RuntimeError, MemoryError):  # this host cannot start a thread
            timer = threading.Timer(END_SECONDS, give_up)
            timer.daemon = True
            timer.start()

    def end_failed(self, error: BaseException, with_stacks: bool = False) -> NoReturn:
        """Record and report an error, and exit with its exit code.

        results.json is written first, by this thread, which needs no other thread and little
        memory. Only the rank that fails first reports: the errors of the others are consequences.

        Args:
            with_stacks: add a hang report.
        """
        self._reserve.close()
        shown = explain(error)
        self._restart_if_agreed(shown, error)
        self.stop.ignore()
        line = f"❌ {shown}{self._rank_label}"
        self._exit_at_latest(shown.exit_code, line)
        try:
            reports = self._record(shown, error) and self._is_first(str(shown))
            self._ending.set()
            if reports:
                if self.console.verbose:
                    print_traceback(error)
                progress.write(line, sys.stderr)
                for fact in self._about_memory(shown) if isinstance(shown, OutOfMemory) else ():
                    progress.write(f"   {fact}", sys.stderr)
                if with_stacks:
                    self.watchdog.dump(str(shown))
                    with contextlib.suppress(*NO_ANSWER):
                        in_time(lambda: self.watchdog.write_table(str(shown)))
            # The other ranks must read the error in the store, which this process may host.
            if self.launch.is_main and self.launch.world_size > 1:
                time.sleep(2 * ROUND_SECONDS)
        finally:
            self._leave(shown.exit_code)

    def end_together(self, engine: Any, code: int) -> NoReturn:
        """Exit with `code` at the same time as all other ranks, after everything is written.

        Ranks that exit one after the other make ZeRO-3 abort, and the interpreter's shutdown
        sometimes destroys the I/O threads of infinity while they run ("terminate called").

        Args:
            engine: its `destroy` method is called if it has one (DeepSpeed).
        """
        self.stop.ignore()
        try:
            dist.barrier()
            self._ending.set()
            if hasattr(engine, "destroy"):
                engine.destroy()
            # Groups of gloo need no end. In torch 2.6 it can block: the destructor holds Python's
            # lock and joins threads that wait for it.
            if dist.get_backend() == "nccl":
                dist.destroy_process_group()
        finally:
            self.flushes.clear()  # they were written
            self._leave(code)

    def _leave(self, code: int) -> NoReturn:
        self._ending.set()
        for flush in self.flushes:
            with contextlib.suppress(Exception):  # must not replace the error that ends the run
                flush()
        self.watchdog.close()
        self.temporary.clean_up()
        exit_now(code)  # not sys.exit: the destructor of a communicator with a lost peer can hang

    @property
    def _rank_label(self) -> str:
        place = f" [rank {self.launch.rank} on {socket.gethostname()}]"
        return place if self.launch.world_size > 1 else ""

    def _record(self, shown: UserError, error: BaseException) -> bool:
        """Call the functions in `on_failure`; return False if another rank has recorded one."""
        try:
            return all(record(shown) for record in self.on_failure)
        except MemoryError:
            free_variables(error)
        except OSError:  # the disk is full: an incomplete checkpoint may fill it
            self.temporary.clean_up()
        try:
            return all(record(shown) for record in self.on_failure)
        except (MemoryError, OSError) as problem:
            progress.write(f"ℹ️  results.json cannot be written: {problem!r}", sys.stderr)
            return True

    def _is_first(self, text: str) -> bool:
        """Write an error into the store; return whether it is the first, as without a store."""
        own = f"{self.launch.rank} {threading.get_ident()} {text[:LONGEST_MESSAGE]}"
        own = own.encode(errors="replace").decode()
        return self._first_entry(own) == own

    def _first_entry(self, own: str) -> str:
        """Return the first error in the store, which is `own` if there was none."""
        store = self.store
        with contextlib.suppress(*NO_ANSWER):
            if store is not None:
                return in_time(lambda: store.compare_set("failure", "", own)).decode()
        return own

    def _restart_if_agreed(
        self, shown: UserError | None = None, error: BaseException | None = None
    ) -> None:
        """Start again if memory ran out and that may help, or if another rank has decided so."""
        restart, store = self.restart, self.store
        if restart is None:
            return
        if restart.started:  # by another thread; this one must not end the process
            restart.execute(None)
        own, entry = f"{REQUEST} of rank {self.launch.rank}", ""
        out_of_memory = isinstance(shown, OutOfMemory) and not is_of_host(shown)
        if out_of_memory and restart.useful() and not self.stop.requested:
            free_variables(error)  # the activations
            entry = self._first_entry(own)
        elif store is not None:
            with contextlib.suppress(*NO_ANSWER):
                if in_time(lambda: store.check(["failure"])):
                    entry = in_time(lambda: store.get("failure")).decode()
        if entry.startswith(REQUEST):
            if entry == own:
                self.console.print(f"ℹ️  {shown} {restart.announcement}{self._rank_label}")
            self.watchdog.close()
            self.temporary.clean_up()
            restart.execute(store)

    def _about_memory(self, shown: OutOfMemory) -> list[str]:
        """Return lines on what used the memory that ran out, and on what would fit."""
        lines, remedies = [HOST_IS_FULL] if is_of_host(shown) else [], []
        for describe in self.memory_facts:
            with contextlib.suppress(Exception):  # there may be too little memory left
                lines += describe()
        if not is_of_host(shown):
            with contextlib.suppress(Exception):  # an architecture that the planner does not know
                remedies = self.remedies()
        return lines + (remedies or [LESS_MEMORY])


def in_time(call: Callable[[], Any]) -> Any:
    """Return the result of a call to the store, which may block.

    Raises:
        TimeoutError: (that of concurrent.futures) the call took longer than STORE_SECONDS.
        RuntimeError: the store has ended, or no thread can be started.
    """
    return concurrent.futures.ThreadPoolExecutor(1).submit(call).result(STORE_SECONDS)


def is_of_host(error: OutOfMemory) -> bool:
    """Return whether the host has no memory left, and not the GPU."""
    return error.on_host and torch.cuda.is_available()


def free_variables(error: BaseException | None) -> None:
    """Free the local variables in the traceback of an error and of its causes (activations)."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
