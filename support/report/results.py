"""The output folder of a run with its lock, and the start of its results.json."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from support.checkpoints.format import list_checkpoints
from support.cli.arguments import Arguments, global_batch
from support.cli.run_file import settings_of
from support.cluster.context import DistContext
from support.cluster.devices import cpu_fact
from support.cluster.tuning import available_cores
from support.errors import UserError, redact, redact_value
from support.files import folders
from support.files.atomic import lock
from support.process import code_digest, versions


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


def new_output_dir(args: Arguments, ctx: DistContext) -> Path:
    """Create the output folder, named by --output_dir or by rank 0, and lock it.

    Raises:
        UserError: the folder cannot be created, is in use by another run, has checkpoints that no
            flag allows to replace, or is not on a disk that all nodes share although the run writes
            checkpoints or the export.
    """
    started = time.strftime("%Y%m%d-%H%M%S")
    name = args.output_dir or f"runs/{Path(args.model).name}-{args.strategy}-{started}"
    if ctx.is_main:
        while not args.output_dir and Path(name).exists():  # two runs started in the same second
            name += "x"
        folders.create("--output_dir", Path(name))
        ctx.lock = lock_folder(Path(name))
        may_hold_a_run = args.overwrite or args.resume is not None
        if not may_hold_a_run and list_checkpoints(Path(name) / "checkpoints"):
            raise UserError(
                f"--output_dir {name} holds the checkpoints of another run: --resume continues it, "
                "--overwrite replaces it; or name another folder."
            )
    folder = Path(ctx.broadcast_from_rank0(name))
    if ctx.nodes > 1 and not (args.no_save and args.no_export):
        check_all_see(folder, ctx, args)
    return folder


def check_all_see(folder: Path, ctx: DistContext, args: Arguments) -> None:
    """Check that every rank sees the output folder, because each writes its part of a checkpoint.

    All ranks call it at the start, so that the run does not fail hours later at its first save.
    """
    deadline = time.monotonic() + 10  # NFS shows a new folder with a delay
    while not (folder / ".lock").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts = ctx.all_gather("" if (folder / ".lock").exists() else platform.node())
    if hosts_without_folder := sorted({*hosts} - {""}):
        missing = [f"--{flag}" for flag in ("no_save", "no_export") if not getattr(args, flag)]
        raise UserError(
            f"--output_dir {folder} is on no disk that {', '.join(hosts_without_folder)} shares "
            f"with rank 0: name one that all nodes see, or add {' '.join(missing)}."
        )


def lock_folder(folder: Path):
    """Lock an output folder against other runs until this process ends.

    Returns:
        The open file that holds the lock; None on a file system without locks.
    """
    try:
        return lock(folder / ".lock")
    except BlockingIOError:
        raise UserError(
            f"--output_dir {folder} is in use by another run: wait for it, or name another folder."
        ) from None
