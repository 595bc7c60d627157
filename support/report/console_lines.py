"""The lines that a run prints about its set-up and its results."""

from __future__ import annotations

import platform
from collections.abc import Iterator
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
    """Print the results at the end of a run."""
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


def say_memory(ctx: DistContext, memory: dict) -> None:
    """Print one line with the largest memory values of any rank."""
    allocated, peak = (max(memory[f"{key}_bytes"]) / GB for key in ("allocated", "peak"))
    if ctx.device.type == "cuda":
        reserved = max(memory["reserved_bytes"]) / GB
        ctx.console.print0(
            f"GPU Memory: {allocated:.2f} GB allocated | {reserved:.2f} GB reserved | "
            f"{peak:.2f} GB peak"
        )
    else:
        ctx.console.print0(f"Process Memory: {allocated:.2f} GB resident | {peak:.2f} GB peak")


def say_memory_profile(ctx: DistContext, memory: dict) -> None:
    """Print the lines of --profile_memory: device, phases, kinds of state, host and NVMe.

    With several ranks these show the largest value, and the smallest in brackets if it differs.
    """
    on_gpu = ctx.device.type == "cuda"
    for line in (
        *_lines_by_rank(memory, on_gpu),
        *_lines_by_phase(memory, on_gpu),
        *_lines_of_live_tensors(memory),
        *_lines_outside_of_pytorch(memory),
    ):
        ctx.console.print0(line)


def _lines_by_rank(memory: dict, on_gpu: bool) -> Iterator[str]:
    for rank in range(len(memory["peak_bytes"])):
        yield f"{'GPU' if on_gpu else 'Process'} {rank} Memory:"
        for name in ("Allocated", "Reserved", "Peak"):
            value = memory[f"{name.lower()}_bytes"][rank]
            yield f"  {name}: " + ("—" if value is None else f"{value / GB:.2f} GB")


def _lines_by_phase(memory: dict, on_gpu: bool) -> Iterator[str]:
    yield (
        "Memory after each phase "
        "(of the rank that holds most, and of the one that holds least in brackets):"
    )
    columns = {"host": "host_resident"}
    if on_gpu:
        columns = {name: f"device_{name}" for name in ("allocated", "reserved", "peak")} | columns
    for phase, values in memory["phases_bytes"].items():
        cells = [f"{name} {most_and_least(values[key])}" for name, key in columns.items()]
        yield f"  {phase:20}" + " | ".join(cells)


def _lines_of_live_tensors(memory: dict) -> Iterator[str]:
    by_rank = memory["step_bytes_by_rank"]
    if by_rank[0]:
        yield "Live tensors in the last step:"
        for phase in by_rank[0]:
            live, peak = (
                most_and_least([rank[phase][key] for rank in by_rank]) for key in ("live", "peak")
            )
            yield f"  {phase:20}at its end {live} | at its peak {peak}"
    yield (
        "Live tensors by kind in the last step "
        "(end of backward; activations and logits: end of forward):"
    )
    for kind in memory["categories_bytes"] or ():
        total = [rank[kind] for rank in memory["categories_bytes_by_rank"]]
        on_device = [rank[kind] for rank in memory["device_categories_bytes_by_rank"]]
        if total[0] is not None:
            line = f"  {kind:20}{most_and_least(total)}"
            if on_device != total:
                line += f" | of it on the device {most_and_least(on_device)}"
            yield line


def _lines_outside_of_pytorch(memory: dict) -> Iterator[str]:
    host, pinned = (most_and_least(memory[key]) for key in ("host_peak_bytes", "pinned_bytes"))
    yield f"Host: {host} at its peak, {pinned} pinned"
    if memory["nvme_bytes"]:
        stored = human_bytes(memory["nvme_bytes"])
        written = human_bytes(memory["nvme_written_bytes_per_step"])
        yield f"NVMe: {stored} held, {written} written in a step, by all ranks"
    if memory["device_used"][0]:
        used, unseen = (
            most_and_least([rank[key] for rank in memory["device_used"]])
            for key in ("used", "unseen")
        )
        yield (
            f"The device itself: {used} in use, of it {unseen} that PyTorch does not see "
            "(CUDA context, libraries, NCCL, other processes)"
        )


def most_and_least(values: list[int]) -> str:
    """Format the most bytes and, if they differ, the least: "1.25 GB" or "1.25 GB (1.10 GB)"."""
    most, least = human_bytes(max(values)), human_bytes(min(values))
    return most if most == least else f"{most} ({least})"


def say_throughput(ctx: DistContext, facts: dict) -> None:
    """Print the throughput on one line; MFU is N/A if the device's peak rate is not known."""
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
