"""The output folder of a run, the content of results.json, and the lines that show it."""

import json
import os
import platform
import secrets
import shlex
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from support import console
from support.checkpoints.format import list_checkpoints
from support.cli.flags import shown_flags
from support.cluster.context import DistContext
from support.cluster.tuning import available_cores, cpu_fact
from support.errors import TrainingError, UserError, redact, redact_value
from support.files import atomic
from support.files.user_files import create_folder
from support.memory import measure
from support.model.resolve import ModelSpec
from support.optimizers import OPTIMIZERS
from support.process import code_digest, versions
from support.report.step_meter import StepMeter
from support.settings.settings import Settings
from support.units import AMPERE, GB

RULE = 60 * "="  # a line of the console

# Keys that are null where nothing was trained (--eval_only).
KEYS_OF_TRAINING = """
    seconds_to_first_step communication_bytes_per_step communication_per_step step_seconds
    step_phases_seconds samples_per_second tokens_per_second tokens_per_second_per_gpu mfu
""".split()


def new_output_dir(settings: Settings, ctx: DistContext) -> tuple[Path, Any]:
    """Create the output folder, named by --output_dir or by rank 0, and lock it.

    Returns:
        The folder; on rank 0 its lock file, or None on a file system without locks.
    Raises:
        UserError: the folder cannot be created, is in use by another run, has checkpoints that no
            flag allows to replace, or is not on a disk that all nodes share although the flags
            request checkpoints.
    """
    lock, started = None, time.strftime("%Y%m%d-%H%M%S")
    name = (
        settings.output.output_dir
        or f"runs/{Path(settings.model.model).name}-{settings.parallelism.strategy}-{started}"
    )
    if ctx.is_main:
        while (
            not settings.output.output_dir and Path(name).exists()
        ):  # two runs started in the same second
            name += "x"
        create_folder("--output_dir", Path(name))
        try:
            lock = atomic.lock(Path(name) / ".lock")
        except BlockingIOError:
            raise UserError(
                f"--output_dir {name} is in use by another run: wait, or name another folder."
            ) from None
        may_hold_a_run = settings.output.overwrite or settings.output.resume is not None
        if not may_hold_a_run and list_checkpoints(Path(name) / "checkpoints"):
            raise UserError(
                f"--output_dir {name} holds the checkpoints of another run: --resume continues it, "
                "--overwrite replaces it; or name another folder."
            )
    name, host = ctx.broadcast_from_rank0((name, platform.node()))
    folder = Path(name)
    if ctx.nodes > 1:
        blind = hosts_that_do_not_share(folder, ctx)
        ctx.shares_output = not blind
        if ctx.launch.is_node_leader and ctx.launch.node and "SLURM_JOB_ID" not in os.environ:
            # Under Slurm all ranks have one log. Elsewhere each host has a terminal.
            console.write(
                f"ℹ️  Rank 0 is on {host}: it prints the training, and writes to {folder}."
            )
        if blind:
            settle_without_shared_disk(settings, f"{folder} on {host}", blind)
    return folder, lock


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


def settle_without_shared_disk(settings: Settings, place: str, blind: list[str]) -> None:
    """Refuse a run that writes checkpoints, because each rank writes its part of one.

    At the start, so that the run does not fail hours later at its first save. Without checkpoints
    only rank 0 writes.

    Args:
        place: the output folder and its host.
        blind: the hosts that do not share it.
    """
    hosts = f"{', '.join(blind)} {'do' if len(blind) > 1 else 'does'} not share"
    saving = "save_every", "save_epochs", "load_best_at_end"
    flags = [f"--{flag}" for flag in saving if settings.flags()[flag]]
    if settings.output.resume == "":
        flags.append("--resume")
    if flags:
        raise UserError(
            f"--output_dir {place}: {hosts} this disk, and every rank writes its part of a "
            f"checkpoint. Name a folder that all nodes see, or leave out {' '.join(flags)}."
        )
    console.warn(
        f"--output_dir {place}: {hosts} this disk. Results and model are written there, and no "
        "checkpoint: a stop signal or an error loses the steps."
    )


# ---------------------------------------------------------------------------- content of results


def hardware(device: torch.device) -> dict:
    """Describe this rank's machine; the GPU keys are None without a GPU."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "host": platform.node(),
        "cpu": cpu_fact("model name") or platform.processor() or platform.machine(),
        "cores": available_cores(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": gpu.total_memory if gpu else None,
    }


def facts_at_start(settings: Settings, ctx: DistContext) -> dict:
    """Return the content of results.json before anything is loaded."""
    return {
        "schema_version": 1,
        "status": "running",
        "reason": None,
        "error_kind": None,
        "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Before the quoting, which may divide a secret.
        "command": shlex.join(map(redact, [Path(sys.executable).name, *sys.argv])),
        "flags": shown_flags(settings.flags()),
        "code_digest": code_digest(),
        "versions": versions(),
        "hardware": hardware(ctx.device),
        "strategy": settings.parallelism.strategy,
        "model": settings.model.model,
        "world_size": ctx.real_world_size,
        "simulated_world_size": settings.debug.simulate_gpus,
        "device": ctx.device.type,
        "backend": ctx.backend,
        "launcher": ctx.launch.launcher,
        "precision": ctx.precision,
        "tf32": ctx.capability >= AMPERE and torch.get_float32_matmul_precision() != "highest",
        "batch_size": settings.training.batch_size,
        "gradient_accumulation_steps": settings.training.gradient_accumulation_steps,
        "gradient_checkpointing": settings.model.gradient_checkpointing,
        "global_batch_size": settings.training.global_batch(ctx.world_size),
        "seed": settings.training.seed,
    }


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


def measured(
    settings: Settings,
    ctx: DistContext,
    spec: ModelSpec,
    meter: StepMeter,
    work: list[tuple[int, int]],
) -> dict:
    """Return the speed of this rank, and the communication and memory of all ranks.

    Args:
        work: sequences and tokens of each step, over all ranks.
    """
    found = dict.fromkeys(KEYS_OF_TRAINING) | meter.speed(work)
    if meter.first_step_at:
        found["seconds_to_first_step"] = meter.first_step_at - psutil.Process().create_time()
    if rate := found["tokens_per_second"]:
        found["tokens_per_second_per_gpu"] = rate / ctx.world_size
        found["mfu"] = _share_of_peak(rate / ctx.world_size, settings, ctx, spec)
    traffic = meter.traffic.per_step(meter.warmup_steps)
    sent = ctx.all_gather(sum(collective["sent_bytes"] for collective in traffic.values()))
    if meter.step > meter.first_step:
        found["communication_bytes_per_step"] = statistics.mean(sent)
        found["communication_per_step"] = traffic
    return found | {"memory": _memory(settings, ctx, spec, meter)}


def _share_of_peak(
    rate: float, settings: Settings, ctx: DistContext, spec: ModelSpec
) -> float | None:
    """Return the MFU of a rate in tokens per second per GPU; None if the peak is not known."""
    if ctx.device.type != "cuda":
        return None
    from support.report.peak_flops import flops_per_token, peak_flops

    peak = peak_flops(ctx.device, ctx.precision)
    if peak is None:
        return None
    config, matmul = spec.text_config, (spec.matmul_parameters, spec.trainable_matmul)
    shape = config.num_hidden_layers, config.hidden_size, spec.seq_length
    return rate * flops_per_token(*matmul, *shape) / peak


def _memory(settings: Settings, ctx: DistContext, spec: ModelSpec, meter: StepMeter) -> dict:
    from support.memory import fit

    nvme = meter.step_memory.objects.strategy.nvme_folder
    own = measure.of_this_rank(meter.memory, meter.step_memory, nvme, ctx.launch.is_node_leader)
    found = measure.over_ranks(ctx.all_gather(own))
    # With --eval_only no step is measured, so the placement is not known.
    on_disk = (found["placement"] or {}).get("optimizer") == "nvme"
    has_states = OPTIMIZERS[settings.training.optim].state_bytes and not on_disk
    if ctx.simulated and has_states and not found["moments_bytes"]:
        raise TrainingError(
            "The simulated steps updated no weights, so Adam's states are missing in the measured "
            "memory."
        )
    estimate = fit.estimate_of(settings, ctx, spec)
    return found | {"predicted_bytes": estimate and estimate.sizes()}


# ----------------------------------------------------------------------------------- printed lines


def say_setup(ctx: DistContext) -> None:
    """Print the "Distributed Setup" lines, once, if the run has several ranks."""
    if ctx.world_size > 1:
        gpu = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else "none (CPU)"
        console.print0(
            "=== Distributed Setup ===\n"
            f"Rank: {ctx.rank}/{ctx.world_size}\n"
            f"Local Rank: {ctx.launch.local_rank}\n"
            f"World Size: {ctx.world_size}\n"
            f"Backend: {ctx.backend.upper()}\nGPU: {gpu}\n========================="
        )


def say_settings(settings: Settings, ctx: DistContext) -> None:
    """Print where the run trains, and the settings that decide how long it takes."""
    on_gpu, assigned = ctx.device.type == "cuda", os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if not on_gpu and settings.training.device == "auto" and assigned not in ("", "0"):
        console.warn(f"Slurm assigned GPUs to this node ({assigned}), and none is visible here.")
    details = f"threads: {torch.get_num_threads()}"
    if on_gpu:
        details = torch.cuda.get_device_name(ctx.device)
    parts = [f"Batch size: {settings.training.batch_size}"]
    if not settings.training.eval_only:
        until = (
            [f"Epochs: {settings.training.epochs or 1}"]
            if settings.training.epochs or not settings.training.max_steps
            else []
        )
        until += [f"Steps: {settings.training.max_steps}"] if settings.training.max_steps else []
        parts = [*until, *parts, f"LR: {settings.training.lr:g}"]
    if (
        whole := settings.training.global_batch(ctx.world_size)
    ) > settings.training.batch_size and not settings.training.eval_only:
        factors = f"{settings.training.batch_size} × {ctx.world_size} ranks"
        factors += f" × {settings.training.gradient_accumulation_steps} micro-batches"
        parts.append(f"Global batch: {factors} = {whole}")
    console.print0(
        f"Device: {ctx.device} ({details}), Precision: {ctx.precision}\n{', '.join(parts)}"
    )


def say_results(ctx: DistContext, facts: dict, settings: Settings) -> None:
    """Print the results at the end of a run, from the content of results.json."""
    print0, used, on_gpu = console.print0, facts["memory"], ctx.device.type == "cuda"
    if settings.debug.profile_memory or ctx.simulated:
        from support.report.memory_profile import lines_of

        print0("\n".join(lines_of(used, on_gpu)))
    if ctx.simulated:
        print0(f"✅ Memory simulation complete: rank 0 of {ctx.world_size}. Nothing was trained.")
        return
    print0(RULE)
    print0("✅ Evaluation Complete!" if settings.training.eval_only else "✅ Training Complete!")
    names = {"allocated": "resident", "peak": "peak"}
    if on_gpu:
        names = {kind: kind for kind in ("allocated", "reserved", "peak")}
    sizes = [f"{max(used[f'{kind}_bytes']) / GB:.2f} GB {name}" for kind, name in names.items()]
    print0(f"{'GPU' if on_gpu else 'Process'} Memory: {' | '.join(sizes)}")
    if facts["samples_per_second"]:
        mfu = "N/A" if facts["mfu"] is None else f"{100 * facts['mfu']:.1f}%"
        print0(
            f"Throughput: {facts['samples_per_second']:,.1f} samples/sec | "
            f"{facts['tokens_per_second']:,.0f} tokens/sec | "
            f"{facts['tokens_per_second_per_gpu']:,.0f} tokens/sec/"
            + (f"GPU | MFU {mfu} " if on_gpu else "process ")
            + f"(first {facts['warmup_steps_excluded']} of {facts['steps']} steps left out)"
        )
