"""results.json: its facts at the start of a run, and the file of an earlier run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from support.cli.arguments import Arguments, global_batch
from support.cli.run_file import settings_of
from support.cluster.context import DistContext
from support.cluster.devices import cpu_fact
from support.cluster.tuning import available_cores
from support.files.atomic import read_json
from support.redaction import redact, redact_value
from support.versions import code_digest, versions


def facts_at_start(args: Arguments, ctx: DistContext) -> dict:
    """Return the content of results.json before anything is loaded."""
    return {
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


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, so that one process writes at a time, if the disk supports locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
