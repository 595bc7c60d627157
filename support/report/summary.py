"""The measured part of results.json, combined over the ranks, and the lines that show it."""

from __future__ import annotations

import platform
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from support.cli.arguments import Arguments
from support.cli.ds_config import nvme_folder
from support.cluster.context import DistContext
from support.console import text_table
from support.errors import TrainingError
from support.memory import fit
from support.memory import measure as memory
from support.model.resolve import ModelSpec
from support.report.metrics_log import MetricsLogger
from support.report.peak_flops import flops_per_token, peak_flops
from support.tables import OPTIMIZERS
from support.train_state import TrainState
from support.units import GB, human_bytes, perplexity_of

# Keys that are null where nothing was trained (--eval_only) or evaluated.
KEYS_OF_TRAINING = """
    seconds_to_first_step communication_bytes_per_step communication_per_step step_seconds
    step_phases_seconds samples_per_second tokens_per_second tokens_per_second_per_gpu mfu
""".split()


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


def summarize(
    args: Arguments,
    ctx: DistContext,
    spec: ModelSpec,
    metrics: MetricsLogger,
    state: TrainState,
    eval_loss: float | None,
) -> dict:
    """Return the measured part of results.json; all ranks call it together.

    Throughput and times are means over the ranks, memory is listed by rank.

    Raises:
        TrainingError: a memory simulation updated no weights, so Adam's states were not measured.
    """
    metrics.flush()
    best = state.best or {"loss": None, "step": None}
    return {
        **dict.fromkeys(KEYS_OF_TRAINING),
        **progress(state.counters()),
        "eval_loss": eval_loss,
        "perplexity": None if eval_loss is None else perplexity_of(eval_loss),
        "best_eval_loss": best["loss"],
        "best_step": best["step"],
        "stopped_early": state.patience if state.stopped_early else None,
        **_speed(args, ctx, spec, metrics),
        **_communication(ctx, metrics),
        "memory": _memory(args, ctx, spec, metrics),
    }


def _speed(args: Arguments, ctx: DistContext, spec: ModelSpec, metrics: MetricsLogger) -> dict:
    speed = _mean_over_ranks(ctx.all_gather(metrics.speed()))
    if metrics.meter.first_step_at:
        process_started = psutil.Process().create_time()
        speed["seconds_to_first_step"] = metrics.meter.first_step_at - process_started
    if speed.get("tokens_per_second"):
        per_rank = speed["tokens_per_second_per_gpu"] = speed["tokens_per_second"] / ctx.world_size
        if peak := peak_flops(ctx.device, ctx.precision):
            config, matmul = spec.text_config, (spec.matmul_parameters, spec.trainable_matmul)
            shape = config.num_hidden_layers, config.hidden_size, args.seq_length
            speed["mfu"] = per_rank * flops_per_token(*matmul, *shape) / peak
    return speed


def _communication(ctx: DistContext, metrics: MetricsLogger) -> dict:
    meter = metrics.meter
    traffic = meter.traffic.per_step(meter.warmup_steps)
    sent = ctx.all_gather(sum(collective["sent_bytes"] for collective in traffic.values()))
    if meter.step == meter.first_step:
        return {}
    return {
        "communication_bytes_per_step": statistics.mean(sent),
        "communication_per_step": traffic,
    }


def _memory(args: Arguments, ctx: DistContext, spec: ModelSpec, metrics: MetricsLogger) -> dict:
    meter, on_nvme = metrics.meter, nvme_folder(args.ds_config_dict)
    of_this_rank = memory.of_this_rank(
        meter.memory_by_phase, meter.step_memory, on_nvme, ctx.launch.is_node_leader
    )
    found = memory.over_ranks(ctx.all_gather(of_this_rank))
    found["predicted_bytes"] = fit.predicted_bytes(args, ctx, spec)
    # With --eval_only no step is measured, so the placement is not known.
    on_disk = (found["placement"] or {}).get("optimizer") == "nvme"
    has_states = OPTIMIZERS[args.optim].state_bytes and not on_disk
    if ctx.simulated and has_states and not found["moments_bytes"]:
        raise TrainingError(
            "The simulated steps updated no weights, so Adam's states are missing in the measured "
            "memory."
        )
    return found


def _mean_over_ranks(values: list[dict]) -> dict:
    """Return the mean of each number over the ranks, also inside nested dicts."""
    columns = {key: [value[key] for value in values] for key in values[0]}
    return {
        key: _mean_over_ranks(column) if isinstance(column[0], dict) else statistics.mean(column)
        for key, column in columns.items()
    }


# ----------------------------------------------------------------------------------- printed lines


def say_setup(ctx: DistContext) -> None:
    """Print the "Distributed Setup" lines, once, if the run has several ranks."""
    gpu = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else "none (CPU)"
    if ctx.world_size > 1:
        ctx.console.print0(
            "=== Distributed Setup ===\n"
            f"Rank: {ctx.rank}/{ctx.world_size}\n"
            f"Local Rank: {ctx.launch.local_rank}\n"
            f"World Size: {ctx.world_size}\n"
            f"Backend: {ctx.backend}\nGPU: {gpu}\n========================="
        )


def say_files(ctx: DistContext, results: Path) -> None:
    """Print the path of results.json, and the command that makes a page of it.

    With several nodes the host's name is added, because the path may exist on that host only.
    """
    ctx.console.print0(f"📁 {results}" + (f" on {platform.node()}" if ctx.nodes > 1 else ""))
    if not ctx.simulated:
        folder = shlex.quote(str(results.parent))
        ctx.console.print0(f"📊 A page with its curves: python scripts/report.py {folder}")


def say_results(ctx: DistContext, facts: dict, args: Arguments) -> None:
    """Print the results at the end of a run, from the content of results.json."""
    print0, memory, on_gpu = ctx.console.print0, facts["memory"], ctx.device.type == "cuda"
    if args.profile_memory or ctx.simulated:
        for line in memory_profile(memory, on_gpu):
            print0(line)
    if ctx.simulated:
        print0(f"✅ Memory simulation complete: rank 0 of {ctx.world_size}. Nothing was trained.")
        return
    print0("✅ Evaluation Complete!" if args.eval_only else "✅ Training Complete!")
    names = {"allocated": "allocated", "reserved": "reserved", "peak": "peak"}
    names = names if on_gpu else {"allocated": "resident", "peak": "peak"}
    sizes = [f"{max(memory[f'{k}_bytes']) / GB:.2f} GB {name}" for k, name in names.items()]
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


def memory_profile(memory: dict, on_gpu: bool) -> Iterator[str]:
    """Yield the lines of --profile_memory: ranks, phases, kinds of state, host and NVMe.

    They show the rank with the most, and in brackets the one with the least if it differs.
    """
    on_device = ["device_allocated", "device_reserved", "device_peak"] if on_gpu else []
    for rank in range(len(memory["peak_bytes"])):
        yield f"{'GPU' if on_gpu else 'Process'} {rank} Memory:"
        for name in ("Allocated", "Reserved", "Peak"):
            yield f"  {name}: {_most([memory[f'{name.lower()}_bytes'][rank]])}"
    kinds = [*on_device, "host_resident"]
    phases = memory["phases_bytes"].items()
    rows = [[phase, *(_most(values[kind]) for kind in kinds)] for phase, values in phases]
    yield "\n" + text_table(rows, ["memory after", *kinds])
    by_rank = memory["step_bytes_by_rank"]
    rows = [
        [phase, *(_most([rank[phase][key] for rank in by_rank]) for key in ("live", "peak"))]
        for phase in by_rank[0] or ()
    ]
    yield "\n" + text_table(rows, ("live tensors of the last step", "at its end", "at its peak"))
    places = (memory["categories_bytes_by_rank"], memory["device_categories_bytes_by_rank"])
    rows = [
        [kind, *(_most([rank[kind] for rank in place]) for place in places)]
        for kind in places[0][0] or ()
    ]
    yield "\n" + text_table(rows, ("live tensors by kind", "all", "on the device"))
    host, pinned = _most(memory["host_peak_bytes"]), _most(memory["pinned_bytes"])
    yield f"\nHost: {host} at its peak, {pinned} pinned"
    if memory["nvme_bytes"]:
        written = human_bytes(memory["nvme_written_bytes_per_step"])
        stored = human_bytes(memory["nvme_bytes"])
        yield f"NVMe: {stored} held, {written} written in a step, by all ranks"
    if memory["device_used"][0]:
        used, unseen = (
            _most([r[key] for r in memory["device_used"]]) for key in ("used", "unseen")
        )
        yield (
            f"The device itself: {used} in use, of it {unseen} that PyTorch does not see "
            "(CUDA context, libraries, NCCL, other processes)"
        )


def _most(values: list[int | None]) -> str:
    """Format the most bytes and, if they differ, the least: "1.25 GB" or "1.25 GB (1.10 GB)"."""
    known = [value for value in values if value is not None]
    if not known:
        return "—"
    most, least = human_bytes(max(known)), human_bytes(min(known))
    return most if most == least else f"{most} ({least})"
