"""results.json: what a run was, how it ended, and what it measured."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from support.cli.arguments import global_batch
from support.cli.run_file import settings_of
from support.cluster.context import DistContext
from support.cluster.devices import cpu_fact
from support.cluster.tuning import available_cores
from support.errors import UserError
from support.files.atomic import (
    only_finite,
    overwrite,
    read_json,
    remove_leftovers,
    set_aside,
    write_text,
)
from support.redaction import redact, redact_value
from support.versions import code_digest, versions


def open_results(args, ctx: DistContext, folder: Path) -> Results:
    """Return the run's `Results` with the facts that are known before anything is loaded.

    Rank 0 writes the file. With --resume the file of an earlier run is kept until `Results.begin`,
    which is called when this run has loaded its checkpoint.
    """
    facts = {
        "schema_version": 1,
        "status": "running",
        "reason": None,
        "error_kind": None,
        "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": redact(shlex.join([Path(sys.executable).name, *sys.argv])),
        "flags": {name: redact_value(value) for name, value in settings_of(args).items()},
        "code_digest": code_digest(),
        "versions": versions(),
        "hardware": hardware(ctx.device),
        "strategy": args.strategy,
        "model": args.model,
        "world_size": ctx.real_world_size,
        "simulated_world_size": args.simulate_gpus,
        "device": ctx.device.type,
        "backend": ctx.backend,
        "launcher": ctx.launch.launcher,
        "precision": ctx.precision,
        "batch_size": args.batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_checkpointing": args.gradient_checkpointing,
        "global_batch_size": global_batch(args, ctx.world_size),
        "seed": args.seed,
    }
    results = Results(ctx, folder / "results.json", facts)
    if ctx.is_main:
        results.before, results.damage = read_results(results.path)
        earlier_file = results.before is not None or bool(results.damage)
        results.kept = args.resume is not None and earlier_file
        if not results.kept:
            # Before the other ranks continue: if one fails, the file must be this run's.
            results.begin()
    results.before, results.kept, facts["started_at"] = ctx.broadcast_from_rank0(
        (results.before, results.kept, facts["started_at"])
    )
    ctx.failures.on_failure.append(results.fail)
    return results


@dataclass
class Results:
    """results.json, written at the start with the status "running", and again at the end."""

    ctx: DistContext
    path: Path
    facts: dict  # the content of the file
    before: dict | None = None  # the earlier run's results.json, on every rank; None without one
    damage: str = ""  # why an earlier run's file cannot be read (rank 0); empty if it can
    kept: bool = False  # whether the file still is the earlier run's

    @property
    def was_complete(self) -> bool:
        """Whether the earlier run, whose file is kept, had completed."""
        return self.kept and self.before is not None and self.before["status"] == "completed"

    def begin(self) -> None:
        """Write this run's file in place of an earlier run's (rank 0); rename a damaged one."""
        self.kept = False
        if not self.ctx.is_main:
            return
        if self.ctx.lock:
            remove_leftovers(self.path.parent)
        if self.damage:
            new_path = set_aside(self.path, f"{self.path.name}.damaged")
            self.ctx.console.warn(
                f"{self.path} is damaged ({self.damage}): ignored, and renamed to {new_path.name}."
            )
            self.damage = ""
        self._write()

    def update(self, **facts) -> None:
        """Add or replace facts; they are written with the next status."""
        self.facts.update(facts)

    def complete(self) -> None:
        """Write the final results (rank 0)."""
        self.facts["status"] = "completed"
        if self.ctx.is_main:
            self._write()

    def nothing_left_to_do(self, steps: int, args) -> bool:
        """Whether --resume has nothing left to do, even if the newest checkpoint is an older one.

        This is so if the earlier run stopped early with the same --early_stopping_patience, or made
        all steps and --load_best_at_end keeps only the best weights.

        Args:
            steps: optimizer steps of the whole run.
        """
        if self.before is None or not self.was_complete or args.resume != "":
            return False
        patience = args.early_stopping_patience
        stops_early = bool(patience) and self.before.get("stopped_early") == patience
        return stops_early or (args.load_best_at_end and self.before["steps"] >= steps)

    def preempted(self, counters: dict) -> None:
        """Write the progress of a run that a signal stopped (rank 0)."""
        reason = "stopped by a signal; a checkpoint was saved"
        self.facts.update(status="preempted", reason=reason, **progress(counters))
        if self.ctx.is_main:
            self._write()

    def fail(self, error: UserError) -> bool:
        """Write why the run failed, unless the file already says how it ended; for any rank.

        An earlier run's file that is still kept is not changed.

        Returns:
            False if another rank has already written an error.
        """
        if self.kept:
            return True
        with locked(self.path.parent):
            recorded, _ = read_results(self.path)
            is_this_run = recorded and recorded.get("started_at") == self.facts["started_at"]
            if recorded and is_this_run and recorded["status"] != "running":
                return recorded["status"] in ("completed", "preempted")
            self.facts.update(status=error.status, reason=str(error), error_kind=error.kind)
            try:
                self._write()
            except OSError:  # a full disk; a rename needs space for a second file
                overwrite(self.path, self._text())
        return True

    def _text(self) -> str:
        return json.dumps(only_finite(self.facts), indent=2) + "\n"

    def _write(self) -> None:
        write_text(self.path, self._text())


@contextlib.contextmanager
def locked(folder: Path):
    """Hold a lock on a folder, so that one process writes at a time, if the disk supports locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_results(path: Path) -> tuple[dict | None, str]:
    """Read an earlier run's results.json.

    Returns:
        (results, ""); (None, "") if there is no file; (None, reason) if it cannot be read, or is
        not valid.
    """
    if not os.path.lexists(path):
        return None, ""
    try:
        results = read_json(path)
    except OSError as error:
        return None, error.strerror or str(error)
    except ValueError as error:
        return None, str(error)
    if not isinstance(results, dict) or not isinstance(results.get("status"), str):
        return None, "it has no status"
    if results["status"] == "completed" and type(results.get("steps")) is not int:
        return None, "it has no number of steps"
    return results, ""


def progress(counters: dict) -> dict:
    """Return the counters of a run under the keys of results.json."""
    return {
        "steps": counters["step"],
        "samples": counters["samples"],
        "tokens": counters["tokens"],
        "training_seconds": counters["training_seconds"],
        "train_loss_first": counters["first_loss"],
        "train_loss_last": counters["last_loss"],
    }


def hardware(device: torch.device) -> dict:
    """Describe this rank's machine: names, the cores it may use, and bytes of memory.

    The GPU keys are None without a GPU.
    """
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "host": platform.node(),
        "cpu": cpu_fact("model name") or platform.processor() or platform.machine(),
        "cores": available_cores(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": gpu.total_memory if gpu else None,
    }
