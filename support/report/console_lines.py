"""The lines that a run prints about its set-up and its results."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator
from pathlib import Path

import torch

from support.cli.arguments import Arguments
from support.cluster.context import DistContext
from support.units import GB, human_bytes


def say_setup(ctx: DistContext) -> None:
    """Print the "Distributed Setup" lines, once, if the run has several ranks."""
    if ctx.world_size == 1:
        return
    gpu = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else "none (CPU)"
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
    """Print the results at the end of a run.

    Args:
        facts: the content of results.json.
    """
    print0, memory, on_gpu = ctx.console.print0, facts["memory"], ctx.device.type == "cuda"
    if args.profile_memory or ctx.simulated:
        for line in memory_profile(memory, on_gpu):
            print0(line)
    if ctx.simulated:
        print0(f"✅ Memory simulation complete: rank 0 of {ctx.world_size}. Nothing was trained.")
        return
    print0("✅ Evaluation Complete!" if args.eval_only else "✅ Training Complete!")
    largest = {
        name: f"{max(memory[f'{name}_bytes']) / GB:.2f} GB"
        for name in (("allocated", "reserved", "peak") if on_gpu else ("allocated", "peak"))
    }
    if on_gpu:
        print0("GPU Memory: " + " | ".join(f"{size} {name}" for name, size in largest.items()))
    else:
        print0(f"Process Memory: {largest['allocated']} resident | {largest['peak']} peak")
    if facts["samples_per_second"]:
        print0(throughput(facts, on_gpu))


def throughput(facts: dict, on_gpu: bool) -> str:
    """Return a line on the throughput, without MFU on a CPU, which has no known peak rate."""
    mfu = "N/A" if facts["mfu"] is None else f"{100 * facts['mfu']:.1f}%"
    return (
        f"Throughput: {facts['samples_per_second']:,.1f} samples/sec | "
        f"{facts['tokens_per_second']:,.0f} tokens/sec | "
        f"{facts['tokens_per_second_per_gpu']:,.0f} tokens/sec/{'GPU' if on_gpu else 'process'} "
        + (f"| MFU {mfu} " if on_gpu else "")
        + f"(first {facts['warmup_steps_excluded']} of {facts['steps']} steps left out)"
    )


def memory_profile(memory: dict, on_gpu: bool) -> Iterator[str]:
    """Yield the lines of --profile_memory: device, phases, kinds of state, host and NVMe.

    With several ranks these show the largest value, and the smallest in brackets if it differs.

    Args:
        memory: the entry of results.json.
    """
    for rank in range(len(memory["peak_bytes"])):
        yield f"{'GPU' if on_gpu else 'Process'} {rank} Memory:"
        for name in ("Allocated", "Reserved", "Peak"):
            value = memory[f"{name.lower()}_bytes"][rank]
            yield f"  {name}: " + ("—" if value is None else f"{value / GB:.2f} GB")
    yield "Memory after each phase, of the rank with the most (with the least in brackets):"
    kinds = ("device_allocated", "device_reserved", "device_peak") if on_gpu else ()
    for phase, values in memory["phases_bytes"].items():
        cells = [
            f"{kind.removeprefix('device_').removesuffix('_resident')} {_most(values[kind])}"
            for kind in (*kinds, "host_resident")
        ]
        yield f"  {phase:20}" + " | ".join(cells)
    yield from _lines_of_live_tensors(memory)
    host, pinned = _most(memory["host_peak_bytes"]), _most(memory["pinned_bytes"])
    yield f"Host: {host} at its peak, {pinned} pinned"
    if memory["nvme_bytes"]:
        written = human_bytes(memory["nvme_written_bytes_per_step"])
        stored = human_bytes(memory["nvme_bytes"])
        yield f"NVMe: {stored} held, {written} written in a step, by all ranks"
    if memory["device_used"][0]:
        used, unseen = (
            _most([rank[key] for rank in memory["device_used"]]) for key in ("used", "unseen")
        )
        yield (
            f"The device itself: {used} in use, of it {unseen} that PyTorch does not see "
            "(CUDA context, libraries, NCCL, other processes)"
        )


def _lines_of_live_tensors(memory: dict) -> Iterator[str]:
    by_rank = memory["step_bytes_by_rank"]
    if by_rank[0]:
        yield "Live tensors in the last step:"
        for phase in by_rank[0]:
            live, peak = (_most([rank[phase][key] for rank in by_rank]) for key in ("live", "peak"))
            yield f"  {phase:20}at its end {live} | at its peak {peak}"
    yield (
        "Live tensors by kind in the last step "
        "(end of backward; activations and logits: end of forward):"
    )
    for kind in memory["categories_bytes"] or ():
        total = [rank[kind] for rank in memory["categories_bytes_by_rank"]]
        on_device = [rank[kind] for rank in memory["device_categories_bytes_by_rank"]]
        if total[0] is not None:
            line = f"  {kind:20}{_most(total)}"
            if on_device != total:
                line += f" | of it on the device {_most(on_device)}"
            yield line


def _most(values: list[int]) -> str:
    """Format the most bytes and, if they differ, the least: "1.25 GB" or "1.25 GB (1.10 GB)"."""
    most, least = human_bytes(max(values)), human_bytes(min(values))
    return most if most == least else f"{most} ({least})"
