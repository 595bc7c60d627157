"""The content of results.json: facts at the start, counters, and what a run has measured."""

from __future__ import annotations

import platform
import shlex
import statistics
import sys
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from distributed_training import process
from distributed_training.cli.flags import shown_flags
from distributed_training.errors import TrainingError, redact
from distributed_training.hardware import AMPERE, cpu_fact
from distributed_training.memory import measure
from distributed_training.model.spec import ModelSpec
from distributed_training.optimizers import OPTIMIZERS
from distributed_training.ranks import tuning
from distributed_training.ranks.context import DistContext
from distributed_training.run.memory_plan import MemoryPlan
from distributed_training.run.step_meter import StepMeter
from distributed_training.settings.settings import Settings
from distributed_training.train_state import TrainState

# Keys that are null where nothing was trained (--eval_only).
KEYS_OF_TRAINING = """
    seconds_to_first_step communication_bytes_per_step communication_per_step step_seconds
    step_phases_seconds samples_per_second tokens_per_second tokens_per_second_per_gpu mfu
""".split()


def hardware(device: torch.device) -> dict:
    """Describe this rank's machine; the GPU keys are None without a GPU."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "host": platform.node(),
        "cpu": cpu_fact("model name") or platform.processor() or platform.machine(),
        "cores": tuning.available_cores(),
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
        "code_digest": process.code_digest(),
        "versions": process.versions(),
        "hardware": hardware(ctx.device),
        "strategy": settings.parallelism.strategy,
        "automatic": settings.parallelism.choice,
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


def progress(state: TrainState) -> dict:
    """Return the counters of a run."""
    return {
        "steps": state.step,
        "samples": state.samples,
        "tokens": state.tokens,
        "training_seconds": state.training_seconds,
        "train_loss_first": state.first_loss,
        "train_loss_last": state.last_loss,
        "rank_sequences": state.ranks.at(state.step + 1),
        "skipped_steps": state.skipped_steps,
    }


def measured(
    ctx: DistContext,
    spec: ModelSpec,
    meter: StepMeter,
    work: list[tuple[int, int]],
    optim: str,
    plan: MemoryPlan,
) -> dict:
    """Return the speed of this rank, and the communication and memory of all ranks.

    Args:
        work: sequences and tokens of each step, over all ranks.
        optim: --optim.
        plan: the memory plan.
    """
    found = dict.fromkeys(KEYS_OF_TRAINING) | meter.speed(work)
    found["seconds_to_first_step"] = meter.seconds_to_first_step
    if rate := found["tokens_per_second"]:
        found["tokens_per_second_per_gpu"] = rate / ctx.world_size
        found["mfu"] = _share_of_peak(rate / ctx.world_size, ctx, spec)
    traffic = meter.traffic.per_step(meter.warmup_steps)
    sent = ctx.all_gather(sum(collective["sent_bytes"] for collective in traffic.values()))
    if meter.step > meter.first_step:
        found["communication_bytes_per_step"] = statistics.mean(sent)
        found["communication_per_step"] = traffic
    return found | {"memory": _memory(ctx, meter, optim, plan)}


def _share_of_peak(rate: float, ctx: DistContext, spec: ModelSpec) -> float | None:
    """Return the MFU of a rate in tokens per second per GPU; None if the peak is not known."""
    if ctx.device.type != "cuda":
        return None
    from distributed_training.workload.peak_flops import flops_per_token, peak_flops

    peak = peak_flops(ctx.device, ctx.precision)
    if peak is None:
        return None
    counts, config = spec.counts, spec.text_config
    layers, hidden = config.num_hidden_layers, config.hidden_size
    flops = flops_per_token(counts.matmul, counts.trainable_matmul, layers, hidden, spec.seq_length)
    return rate * flops / peak


def _memory(ctx: DistContext, meter: StepMeter, optim: str, plan: MemoryPlan) -> dict:
    nvme = meter.step_memory.objects.strategy.nvme_folder
    own = measure.of_this_rank(meter.memory, meter.step_memory, nvme, ctx.launch.is_node_leader)
    found = measure.over_ranks(ctx.all_gather(own))
    # With --eval_only no step is measured, so the placement is not known.
    on_disk = (found["placement"] or {}).get("optimizer") == "nvme"
    has_states = OPTIMIZERS[optim].has_moments and not on_disk
    if ctx.simulated and has_states and not found["moments_bytes"]:
        raise TrainingError(
            "The simulated steps updated no weights, so Adam's states are missing in the measured "
            "memory."
        )
    return found | {"predicted_bytes": plan.predicted_bytes()}
