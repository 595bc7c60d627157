"""The output folder of a run: its lock, and results.json from the start of the run to its end."""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from distributed_training import console
from distributed_training.checkpoints.folder import CheckpointFolder
from distributed_training.checkpoints.format import list_checkpoints
from distributed_training.errors import UserError, redact_value
from distributed_training.files import atomic
from distributed_training.files.user_files import create_folder
from distributed_training.ranks.context import DistContext
from distributed_training.run.results import facts_at_start
from distributed_training.settings.output import OutputSettings
from distributed_training.settings.settings import Settings
from distributed_training.train_state import TrainState

RESULTS = "results.json"


@dataclass
class RunFolder:
    """The output folder of a run: its lock, and results.json. All ranks call the methods.

    results.json is written at the start with the status "running", and again at the end. With
    --resume an earlier run's file is kept until this run has loaded its checkpoint (`begin`).
    """

    ctx: DistContext
    path: Path
    is_shared: bool  # all nodes see the folder; otherwise only rank 0 writes to it
    lock: IO[bytes] | None  # on rank 0: prevents a second run from using the folder
    facts: dict  # the content of this run's results.json
    found: dict | None  # results.json of an earlier run in the folder
    keeps_found: bool  # results.json is still that of the earlier run, which --resume continues

    @classmethod
    def open(cls, settings: Settings, ctx: DistContext) -> RunFolder:
        """Create and lock the folder; write results.json, unless --resume continues a run.

        If the run fails after this call, results.json says why.
        """
        model, strategy = Path(settings.model.model).name, settings.parallelism.strategy
        name, saves_best = f"{model}-{strategy}", settings.training.load_best_at_end
        path, is_shared, lock = new_output_dir(settings.output, name, saves_best, ctx)
        found = read_results(path / RESULTS) if ctx.is_main else None
        keeps_found = found is not None and settings.output.resume is not None
        facts = facts_at_start(settings, ctx)
        folder = cls(ctx, path, is_shared, lock, facts, found, keeps_found)
        if not keeps_found:
            folder.begin()
        # The other ranks wait for rank 0 here: if one fails, the file must be this run's.
        shared = (found, keeps_found, folder.facts["started_at"])
        found, keeps_found, folder.facts["started_at"] = ctx.broadcast_from_rank0(shared)
        folder = replace(folder, found=found, keeps_found=keeps_found)
        ctx.monitor.record_with(folder.fail)
        return folder

    def checkpoints(self, keep_last: int | None) -> CheckpointFolder:
        """Return the folder of the checkpoints, which may not exist; None keeps all of them."""
        return CheckpointFolder(self.path / "checkpoints", keep_last, self.is_shared)

    @property
    def earlier(self) -> dict | None:
        """results.json of the run that --resume continues, while the file is still that run's."""
        return self.found if self.keeps_found else None

    @property
    def was_complete(self) -> bool:
        """Whether the run that --resume continues had completed."""
        return self.earlier is not None and self.earlier["status"] == "completed"

    def was_complete_at(self, state: TrainState) -> bool:
        """Whether the earlier run had completed at this step: the last one, or its early stop."""
        if self.earlier is None or not self.was_complete:
            return False
        patience = self.earlier.get("stopped_early")  # a larger one lets the run continue
        stopped = state.patience and isinstance(patience, int) and state.patience <= patience
        return state.finished or bool(stopped and self.earlier.get("steps") == state.step)

    def record(self, **facts: object) -> None:
        """Set facts, which the next `begin`, `end` or `fail` writes."""
        self.facts.update(facts)

    def begin(self, **facts: object) -> None:
        """Set facts, and write this run's file in place of an earlier run's (rank 0)."""
        self.record(**facts)
        self.keeps_found = False
        if self.lock:
            atomic.remove_leftovers(self.path)
        self._write()

    def end(self, status: str, reason: str | None = None) -> None:
        """Write how the run ended, without an error: "completed" or "preempted"."""
        self.record(status=status, reason=reason)
        self._write()

    def _write(self) -> None:
        if self.ctx.is_main:
            atomic.write_text(self.path / RESULTS, as_json(self.facts))

    def fail(self, error: UserError) -> bool:
        """Write why the run failed, unless the file already says how it ended; for any rank.

        Returns:
            False if another rank has already written an error.
        """
        if self.keeps_found or not (self.ctx.is_main or self.is_shared):
            return True  # rank 0 records the first failure of another host
        file = self.path / RESULTS
        recorded = read_results(file) or {}
        is_this_run = recorded.get("started_at") == self.facts["started_at"]
        if is_this_run and recorded["status"] != "running":
            return recorded["status"] in ("completed", "preempted")
        self.record(status=error.status, reason=str(error), error_kind=error.kind)
        text = as_json(self.facts)
        try:
            atomic.write_text(file, text)
        except OSError:  # a full disk has no room for a second file
            atomic.overwrite(file, text)
        return True


def as_json(facts: dict) -> str:
    """Return the text of results.json without secrets; NaN and infinity, not in JSON, are null."""
    return json.dumps(redact_value(atomic.only_finite(facts)), indent=2) + "\n"


def read_results(path: Path) -> dict | None:
    """Return the results.json of an earlier run; None if there is none or it is damaged."""
    try:
        results = atomic.read_json(path)
        return results if isinstance(results["status"], str) else None
    except (FileNotFoundError, ValueError, TypeError, LookupError):
        return None


def new_output_dir(
    output: OutputSettings, default_name: str, saves_best: bool, ctx: DistContext
) -> tuple[Path, bool, IO[bytes] | None]:
    """Create the output folder, named by --output_dir or by rank 0, and lock it.

    Args:
        default_name: without --output_dir; rank 0 adds the time.
        saves_best: whether the best evaluation saves a checkpoint.

    Returns:
        The folder; whether all nodes see it; on rank 0 its lock file, or None on a file system
        without locks.
    Raises:
        UserError: the folder cannot be created, is in use by another run, has checkpoints that no
            flag allows to replace, or is not on a disk that all nodes share although the flags
            request checkpoints.
    """
    lock, started = None, time.strftime("%Y%m%d-%H%M%S")
    name = output.output_dir or f"runs/{default_name}-{started}"
    if ctx.is_main:
        while not output.output_dir and Path(name).exists():  # two runs started in one second
            name += "x"
        create_folder("--output_dir", Path(name))
        try:
            lock = atomic.lock(Path(name) / ".lock")
        except BlockingIOError:
            raise UserError(
                f"--output_dir {name} is in use by another run: wait, or name another folder."
            ) from None
        may_hold_a_run = output.overwrite or output.resume is not None
        if not may_hold_a_run and list_checkpoints(Path(name) / "checkpoints"):
            raise UserError(
                f"--output_dir {name} holds the checkpoints of another run: --resume continues it, "
                "--overwrite replaces it; or name another folder."
            )
    name, host = ctx.broadcast_from_rank0((name, platform.node()))
    folder = Path(name)
    blind: list[str] = []
    if ctx.nodes.number > 1:
        blind = hosts_that_do_not_share(folder, ctx)
        if ctx.launch.is_node_leader and ctx.launch.node and "SLURM_JOB_ID" not in os.environ:
            # Under Slurm all ranks have one log. Elsewhere each host has a terminal.
            console.write(
                f"ℹ️  Rank 0 is on {host}: it prints the training, and writes to {folder}."
            )
        if blind:
            settle_without_shared_disk(output, saves_best, f"{folder} on {host}", blind)
    return folder, not blind, lock


def hosts_that_do_not_share(folder: Path, ctx: DistContext) -> list[str]:
    """Return the hosts that do not see rank 0's output folder. All ranks call it."""
    # A new name: a host may have a folder of this name, of an earlier run.
    mark = folder / f"{atomic.PARTIAL}{secrets.token_hex(4)}-shared"
    if ctx.is_main:
        mark.touch()
    # The file exists before another host looks for it: NFS remembers for half a minute that a file
    # was missing.
    mark = folder / ctx.broadcast_from_rank0(mark.name)
    deadline = time.monotonic() + 10  # NFS shows a new file with a delay
    # Listing the folder makes NFS read it again; looking up a single file does not.
    while not (sees := folder.is_dir() and mark.name in os.listdir(folder)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    blind = {*ctx.all_gather("" if sees else platform.node())} - {""}
    if ctx.is_main:
        mark.unlink(missing_ok=True)
    return sorted(blind)


def settle_without_shared_disk(
    output: OutputSettings, saves_best: bool, place: str, blind: list[str]
) -> None:
    """Refuse a run that writes checkpoints, because each rank writes its part of one.

    At the start, so that the run does not fail hours later at its first save. Without checkpoints
    only rank 0 writes.

    Args:
        saves_best: whether the best evaluation saves a checkpoint.
        place: the output folder and its host.
        blind: the hosts that do not share it.
    """
    hosts = f"{', '.join(blind)} {'do' if len(blind) > 1 else 'does'} not share"
    flags = ["--save_every"] if output.save_every else []
    flags += ["--save_epochs"] if output.save_epochs else []
    flags += ["--load_best_at_end"] if saves_best else []
    flags += ["--resume"] if output.resume == "" else []
    if flags:
        raise UserError(
            f"--output_dir {place}: {hosts} this disk, and every rank writes its part of a "
            f"checkpoint. Name a folder that all nodes see, or leave out {' '.join(flags)}."
        )
    console.warn(
        f"--output_dir {place}: {hosts} this disk. Results and model are written there, and no "
        "checkpoint: a stop signal or an error loses the steps."
    )
