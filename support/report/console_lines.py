"""The lines that a run prints about its set-up and its results."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from support.cluster.context import DistContext
from support.units import GB, human_bytes


def say_setup(ctx: DistContext) -> None:
    """Print the "Distributed Setup" lines, once, if the run has several ranks."""
    if ctx.world_size == 1:
        return
    gpu = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else "none (CPU)"
    ctx.console.print0(
        "=== Distributed Setup ===\n"
        f"Rank: {ctx.rank}/{ctx.world_size - 1}\n"
        f"Local Rank: {ctx.launch.local_rank}\n"
        f"World Size: {ctx.world_size}\n"
        f"Backend: {ctx.backend}\nGPU: {gpu}\n========================="
    )


def place_of(path: Path, ctx: DistContext) -> str:
    """Return a path as the console shows it.

    With several nodes it includes the host's name, because the path may exist on that host only.
    """
    return f"{path} on {platform.node()}" if ctx.nodes > 1 else str(path)


def say_results(ctx: DistContext, facts: dict, args) -> None:
    """Print the results at the end of a run.

    Args:
        facts: the content of results.json.
    """
    if args.profile_memory or ctx.simulated:
        say_memory_profile(ctx, facts["memory"])
    if ctx.simulated:
        ctx.console.print0(
            f"✅ Memory simulation complete: rank 0 of {ctx.world_size}. Nothing was trained."
        )
        return
    ctx.console.print0("✅ Evaluation Complete!" if args.eval_only else "✅ Training Complete!")
    say_memory(ctx, facts["memory"])
    say_throughput(ctx, facts)


def say_memory(ctx: DistContext, memory_by_rank: dict) -> None:
    """Print one line with the largest memory values of any rank.

    Args:
        memory_by_rank: "memory" of results.json.
    """
    allocated, peak = (
        max(memory_by_rank["allocated_bytes"]) / GB,
        max(memory_by_rank["peak_bytes"]) / GB,
    )
    if ctx.device.type == "cuda":
        reserved = max(memory_by_rank["reserved_bytes"]) / GB
        ctx.console.print0(
            f"GPU Memory: {allocated:.2f} GB allocated | {reserved:.2f} GB reserved | "
            f"{peak:.2f} GB peak"
        )
    else:
        ctx.console.print0(f"Process Memory: {allocated:.2f} GB resident | {peak:.2f} GB peak")


def say_memory_profile(ctx: DistContext, found: dict) -> None:
    """Print the lines of --profile_memory: device, phases, kinds of state, host and NVMe.

    With several ranks these show the largest value, and the smallest in brackets if it differs.

    Args:
        found: "memory" of results.json.
    """
    kind = "GPU" if ctx.device.type == "cuda" else "Process"
    names = (("Allocated", "allocated"), ("Reserved", "reserved"), ("Peak", "peak"))
    for rank in range(len(found["peak_bytes"])):
        ctx.console.print0(f"{kind} {rank} Memory:")
        for name, key in names:
            value = found[f"{key}_bytes"][rank]
            ctx.console.print0(
                f"  {name}: " + (f"{value / GB:.2f} GB" if value is not None else "—")
            )
    ctx.console.print0(
        "Memory after each phase "
        "(of the rank that holds most, and of the one that holds least in brackets):"
    )
    for phase, values in found["phases_bytes"].items():
        shown_columns = PHASE_COLUMNS if ctx.device.type == "cuda" else PHASE_COLUMNS[-1:]
        columns = [f"{name} {most_and_least(values[key])}" for name, key in shown_columns]
        ctx.console.print0(f"  {phase:20}" + " | ".join(columns))
    if found["step_bytes_by_rank"][0]:
        ctx.console.print0("Live tensors in the last step:")
        for phase in found["step_bytes_by_rank"][0]:
            steps = [step[phase] for step in found["step_bytes_by_rank"]]
            live, peak = ([step[key] for step in steps] for key in ("live", "peak"))
            ctx.console.print0(
                f"  {phase:20}at its end {most_and_least(live)} | "
                f"at its peak {most_and_least(peak)}"
            )
    ctx.console.print0(
        "Live tensors by kind in the last step "
        "(end of backward; activations and logits: end of forward):"
    )
    for name in found["categories_bytes"] or ():
        total, on_device = (
            [rank[name] for rank in found[key]]
            for key in ("categories_bytes_by_rank", CATEGORIES_ON_DEVICE)
        )
        if total[0] is not None:
            device_text = (
                "" if total == on_device else f" | of it on the device {most_and_least(on_device)}"
            )
            ctx.console.print0(f"  {name:20}{most_and_least(total)}{device_text}")
    host, pinned = (most_and_least(found[key]) for key in ("host_peak_bytes", "pinned_bytes"))
    ctx.console.print0(f"Host: {host} at its peak, {pinned} pinned")
    if found["nvme_bytes"]:
        stored, written = (
            human_bytes(found[key]) for key in ("nvme_bytes", "nvme_written_bytes_per_step")
        )
        ctx.console.print0(f"NVMe: {stored} held, {written} written in a step, by all ranks")
    if found["device_used"][0]:
        used, unseen = ([rank[key] for rank in found["device_used"]] for key in ("used", "unseen"))
        ctx.console.print0(
            f"The device itself: {most_and_least(used)} in use, of it {most_and_least(unseen)} "
            "that PyTorch does not see (CUDA context, libraries, NCCL, other processes)"
        )


PHASE_COLUMNS = (
    ("allocated", "device_allocated"),
    ("reserved", "device_reserved"),
    ("peak", "device_peak"),
    ("host", "host_resident"),
)
CATEGORIES_ON_DEVICE = "device_categories_bytes_by_rank"


def most_and_least(values: list[int]) -> str:
    """Format the most bytes and, if they differ, the least: "1.25 GB" or "1.25 GB (1.10 GB)"."""
    most, least = human_bytes(max(values)), human_bytes(min(values))
    return most if most == least else f"{most} ({least})"


def say_throughput(ctx: DistContext, facts: dict) -> None:
    """Print the throughput on one line; MFU is N/A if the device's peak rate is not known.

    Args:
        facts: the content of results.json.
    """
    if not facts.get("samples_per_second"):
        return
    mfu = "N/A" if facts["mfu"] is None else f"{100 * facts['mfu']:.1f}%"
    per_gpu = "tokens/sec/GPU" if ctx.device.type == "cuda" else "tokens/sec/process"
    ctx.console.print0(
        f"Throughput: {facts['samples_per_second']:,.1f} samples/sec | "
        f"{facts['tokens_per_second']:,.0f} tokens/sec | "
        f"{facts['tokens_per_second_per_gpu']:,.0f} {per_gpu} | MFU {mfu} "
        f"(first {facts['warmup_steps_excluded']} of {facts['steps']} steps left out)"
    )
