"""The end of a process: every rank exits together with the others.

The first error is written to results.json and printed by the rank that fails, and every rank exits.
With --auto_micro_batch all ranks may start again instead (restart.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from distributed_training import console
from distributed_training.errors import (
    EXIT_FAILED,
    EXIT_PREEMPTED,
    OutOfMemory,
    Stopped,
    TrainingError,
    UserError,
    explain,
)
from distributed_training.files.atomic import remove_temporary_folders
from distributed_training.process import exit_now, print_traceback
from distributed_training.ranks.first_failure import RESTART, FirstFailure
from distributed_training.ranks.memory_advice import MemoryAdvice
from distributed_training.ranks.rank_states import ENDED
from distributed_training.ranks.stop import StopSignal
from distributed_training.ranks.watchdog import ROUND_SECONDS, Watchdog
from distributed_training.train_state import TrainState

if TYPE_CHECKING:
    from distributed_training.ranks.restart import Restart

GRACE_SECONDS = 5  # for a rank to exit by itself after another one has failed
END_SECONDS = 20  # time limit of what a failed rank does before it exits
ANSWER_SECONDS = 5  # for a rank to publish its next state
CLOSE_SECONDS = 60  # time limit for closing DeepSpeed and NCCL when all ranks are done


class FailureMonitor:
    """The end of this process: it reports the first failure of the run, and all ranks end together.

    A process has one. It is created when the program starts, and each part of the run registers
    with it what only that part knows.
    """

    def __init__(self, stop: StopSignal):
        self.stop = stop
        self.rank, self.ranks, self.is_watching = 0, 1, False  # until `watch`
        self.watchdog = Watchdog(self.rank, self.ranks)
        self._recorder: Callable[[UserError], bool] = lambda _: True
        self._complete: Callable[[], None] = lambda: None
        self._memory_advice = MemoryAdvice()
        self._restart: Restart | None = None
        self._restarting = False
        self._ending = threading.Event()  # this process is exiting

    # ---------------------------------------------------------------- what other parts register

    def record_with(self, recorder: Callable[[UserError], bool]) -> None:
        """Let `recorder` write an error; it returns False if another rank has written one."""
        self._recorder = recorder

    def complete_first(self, complete: Callable[[], None]) -> None:
        """Call `complete` before this process exits: it waits while a checkpoint is written."""
        self._complete = complete

    def explain_memory_with(self, describe: Callable[[], list[str]]) -> None:
        """Print also these lines, on what uses the memory, if memory runs out."""
        self._memory_advice.explain_with(describe)

    def advise_with(self, remedies: Callable[[], list[str]]) -> None:
        """Print these lines, on what would fit, if memory runs out."""
        self._memory_advice.advise_with(remedies)

    def report_hangs(self, folder: Path, doing: Callable[[], str]) -> None:
        """Write hang reports to a run's output folder; `doing` returns the phase of the run."""
        self.watchdog.report_to(folder, doing)

    def training_starts(self, state: TrainState, restart: Restart | None = None) -> None:
        """From now on steps must not hang; `restart` is used if memory runs out."""
        self.watchdog.expect_steps(state)
        self._restart = restart

    def training_ends(self) -> None:
        """From now on no step is expected, and nothing restarts."""
        self.watchdog.expect_steps(None)
        self._restart = None

    @property
    def first(self) -> FirstFailure:
        """The first failure of all ranks."""
        return FirstFailure(self.watchdog.states.store)

    def watch(self, rank: int, ranks: int, store: dist.Store, hang_seconds: int) -> None:
        """Start the watchdog (see `Watchdog.start`), and handle stop signals."""
        self.rank, self.ranks, self.watchdog = rank, ranks, Watchdog(rank, ranks, store)
        self.stop.install()
        self.watchdog.start(hang_seconds)
        threading.Thread(target=self._watch, daemon=True).start()
        self.is_watching = True

    def _watch(self) -> None:
        """End the process when another rank has failed: the main thread may wait for it."""
        found, error = False, None
        while not (found or error):
            if self._ending.wait(ROUND_SECONDS):
                return
            try:
                found = self.watchdog.look()
            except Exception as problem:
                error = problem
        self._restart_if_agreed()
        # The main thread may have a more precise error, or the run may have completed.
        if self._ending.wait(GRACE_SECONDS):
            return
        self._restart_if_agreed()  # a rank may have agreed on it meanwhile, and waits for it
        if error is not None:
            self.end_failed(error)
        code = self.first.exit_code
        self._exit_at_latest(code)
        self._record(self.first.error(TrainingError("Another rank failed.")))
        self._leave(code)

    # ----------------------------------------------------------------------- the end of this rank

    def end_failed(self, error: BaseException) -> NoReturn:
        """Record and report an error, and exit with its exit code.

        results.json is written first, by this thread, which needs no other thread and little
        memory. Only the rank that fails first reports: the errors of the others are consequences.
        """
        if isinstance(error, KeyboardInterrupt):  # a second Ctrl-C ends the run at once
            self._complete = lambda: None
        # A library may convert the exception of the signal, or report that its compiler was killed.
        shown = Stopped.by(self.stop.name) if self.stop.ended_start else explain(error)
        if isinstance(shown, OutOfMemory) and shown.on_host:
            free_variables(error)  # the activations: the report below needs memory
        if self._restarts(shown):
            self.stop.only_record()
            threading.Event().wait()  # for the watchdog's thread to replace the program
        self.stop.ignore()
        # Before any use of the store, which may not answer.
        self._exit_at_latest(shown.exit_code, f"{shown.mark} {shown}{self._place}")
        if isinstance(shown, Stopped):
            shown = self._unless_a_rank_is_lost(shown)
        line, code = f"{shown.mark} {shown}{self._place}", shown.exit_code
        try:
            own = f"{code} on rank {self.rank}, thread {threading.get_ident()}: {shown}"
            first = self._record(self.first.error(shown)) and self.first.claim(own)
            self._ending.set()
            if not first and code in (EXIT_FAILED, EXIT_PREEMPTED):
                code = self.first.exit_code
            if first:
                if console.verbose:
                    print_traceback(error)
                console.write(line, sys.stderr)
                for fact in self._memory_advice.lines() if isinstance(shown, OutOfMemory) else ():
                    console.write(f"   {fact}", sys.stderr)
            # The other ranks must read the error in the store, which this process may host.
            if self.rank == 0 and self.ranks > 1:
                time.sleep(2 * ROUND_SECONDS)
        finally:
            self._leave(code)

    def end_together(self, model: nn.Module | None, code: int) -> NoReturn:
        """Exit with `code` at the same time as all other ranks, after everything is written.

        Ranks that exit one after the other make ZeRO-3 abort, and the interpreter's shutdown
        sometimes destroys the I/O threads of infinity while they run ("terminate called").

        Args:
            model: its `destroy` method is called if it has one (DeepSpeed's engine).
        """
        self.stop.ignore()
        try:
            dist.barrier()
            self._ending.set()
            # The watchdog no longer watches, and NCCL or the I/O threads may block.
            self._exit_at_latest(code, seconds=CLOSE_SECONDS)
            if destroy := getattr(model, "destroy", None):
                destroy()
            # Groups of gloo need no end. In torch 2.6 it can block: the destructor holds Python's
            # lock and joins threads that wait for it.
            if dist.get_backend() == "nccl":
                dist.destroy_process_group()
        finally:
            self._leave(code)

    def _leave(self, code: int) -> NoReturn:
        self._ending.set()
        self._complete()
        self.watchdog.files.close()
        remove_temporary_folders()
        exit_now(code)  # not sys.exit: the destructor of a communicator with a lost peer can hang

    def _exit_at_latest(self, code: int, line: str = "", seconds: float = END_SECONDS) -> None:
        """Exit after `seconds`, also if a thread blocks on a hung disk, terminal or store.

        Args:
            line: is printed then, unless the error was reported.
        """

        def give_up() -> None:
            if line and not self._ending.is_set():
                os.write(2, f"{line}\n".encode())
            self._complete()
            os._exit(code)

        with contextlib.suppress(RuntimeError, MemoryError):  # this host cannot start a thread
            timer = threading.Timer(seconds, give_up)
            timer.daemon = True
            timer.start()

    @property
    def _place(self) -> str:
        return f" [rank {self.rank} on {socket.gethostname()}]" if self.ranks > 1 else ""

    # ------------------------------------------------------------------------- the first failure

    def _record(self, shown: UserError) -> bool:
        """Write the error to results.json; return False if another rank has recorded one."""
        failed = ""
        for _ in range(2):
            try:
                return self._recorder(shown)
            except (MemoryError, OSError) as problem:
                failed = repr(problem)
                remove_temporary_folders()  # the disk may be full
        console.write(f"ℹ️  results.json cannot be written: {failed}", sys.stderr)
        return True

    def _unless_a_rank_is_lost(self, stopped: Stopped) -> UserError:
        """Return `stopped`, or an error: launchers signal all ranks when one was killed, too."""
        try:
            lost = self.watchdog.states.silent_ranks(ANSWER_SECONDS)
        except RuntimeError:  # the store has ended
            lost = [0]
        if not lost or self.first.read():
            return stopped
        return TrainingError(f"Rank {lost[0]} {ENDED} ({self.stop.name} ended this rank.)")

    # ------------------------------------------------------------------------------- the restart

    def _restarts(self, shown: UserError) -> bool:
        """Return whether all ranks restart: memory ran out and that may help, here or elsewhere."""
        if self._restart is None:
            return False
        # On a GPU a smaller micro-batch does not help if the host's memory ran out.
        out_of_memory = isinstance(shown, OutOfMemory) and not (
            shown.on_host and torch.cuda.is_available()
        )
        helps = out_of_memory and self._restart.useful() and not self.stop.requested
        if helps and self.first.claim(f"{RESTART} of rank {self.rank}"):
            flags = [f"--{name} {value}" for name, value in self._restart.values.items()]
            again = f"All ranks start again with {' '.join(flags[:2])}."  # not --output_dir
            console.write(f"ℹ️  {shown} {again}{self._place}")
        return self._restarting or self.first.is_restart

    def _restart_if_agreed(self) -> None:
        if self._restart and self.first.is_restart:
            self._restarting = True
            self.watchdog.files.close()
            remove_temporary_folders()
            self._restart.wait_for_ranks(self.watchdog.states.store, self.rank, self.ranks)
            if self.stop.requested:
                self._end_stopped()
            self._restart.replace_program()

    def _end_stopped(self) -> NoReturn:
        """Exit instead of a restart; the launcher ends the other ranks."""
        stopped = Stopped.by(self.stop.name)
        self._record(stopped)
        if self.rank == 0:
            console.write(f"{stopped.mark} {stopped}", sys.stderr)
        self._leave(stopped.exit_code)


def free_variables(error: BaseException | None) -> None:
    """Free the local variables in the traceback of an error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
