"""The measured part of results.json, combined over the ranks, and the lines that show it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import psutil
import torch

from support.cli.arguments import Arguments
from support.cli.ds_config import nvme_folder
from support.cluster.context import DistContext
from support.memory import fit
from support.memory import measure as memory
from support.model.resolve import ModelSpec
from support.report.step_meter import StepMeter
from support.text_tables import text_table
from support.units import GB, human_bytes

# Keys that are null where nothing was trained (--eval_only).
KEYS_OF_TRAINING = """
    seconds_to_first_step communication_bytes_per_step communication_per_step step_seconds
    step_phases_seconds samples_per_second tokens_per_second tokens_per_second_per_gpu mfu
""".split()


def measured(
    args: Arguments,
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
    if found["tokens_per_second"]:
        per_gpu = found["tokens_per_second_per_gpu"] = found["tokens_per_second"] / ctx.world_size
        on_gpu = ctx.device.type == "cuda"
        found["mfu"] = _share_of_peak(per_gpu, args, ctx, spec) if on_gpu else None
    traffic = meter.traffic.per_step(meter.warmup_steps)
    sent = ctx.all_gather(sum(collective["sent_bytes"] for collective in traffic.values()))
    if meter.step > meter.first_step:
        found["communication_bytes_per_step"] = statistics.mean(sent)
        found["communication_per_step"] = traffic
    return found | {"memory": _memory(args, ctx, spec, meter)}


def _share_of_peak(rate: float, args: Arguments, ctx: DistContext, spec: ModelSpec) -> float | None:
    """Return the MFU of a rate in tokens per second per GPU; None if the peak is not known."""
    from support.report.peak_flops import flops_per_token, peak_flops

    config, matmul = spec.text_config, (spec.matmul_parameters, spec.trainable_matmul)
    shape = config.num_hidden_layers, config.hidden_size, args.seq_length
    peak = peak_flops(ctx.device, ctx.precision)
    return rate * flops_per_token(*matmul, *shape) / peak if peak else None


def _memory(args: Arguments, ctx: DistContext, spec: ModelSpec, meter: StepMeter) -> dict:
    of_this_rank = memory.of_this_rank(
        meter.memory, meter.step_memory, nvme_folder(args.ds_config_dict), ctx.launch.is_node_leader
    )
    found = memory.over_ranks(ctx.all_gather(of_this_rank))
    return found | {"predicted_bytes": fit.predicted_bytes(args, ctx, spec)}


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


def say_results(ctx: DistContext, facts: dict, args: Arguments) -> None:
    """Print the results at the end of a run, from the content of results.json."""
    print0, used, on_gpu = ctx.console.print0, facts["memory"], ctx.device.type == "cuda"
    if args.profile_memory or ctx.simulated:
        for line in memory_profile(used, on_gpu):
            print0(line)
    if ctx.simulated:
        print0(f"✅ Memory simulation complete: rank 0 of {ctx.world_size}. Nothing was trained.")
        return
    print0("✅ Evaluation Complete!" if args.eval_only else "✅ Training Complete!")
    names = {"allocated": "allocated", "reserved": "reserved", "peak": "peak"}
    names = names if on_gpu else {"allocated": "resident", "peak": "peak"}
    sizes = [f"{max(used[f'{key}_bytes']) / GB:.2f} GB {name}" for key, name in names.items()]
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


def memory_profile(used: dict, on_gpu: bool) -> Iterator[str]:
    """Yield the lines of --profile_memory; the tables show the rank with the most."""
    for rank in range(len(used["peak_bytes"])):
        yield f"{'GPU' if on_gpu else 'Process'} {rank} Memory:"
        for name in ("Allocated", "Reserved", "Peak"):
            yield f"  {name}: {_most([used[f'{name.lower()}_bytes'][rank]])}"
    kinds = ["device_allocated", "device_peak", "host_resident"][0 if on_gpu else 2 :]
    phases = used["phases_bytes"].items()
    rows = [[phase, *(_most(values[kind]) for kind in kinds)] for phase, values in phases]
    yield "\n" + text_table(rows, ["memory after", *kinds])
    places = (used["categories_bytes_by_rank"], used["device_categories_bytes_by_rank"])
    rows = [
        [kind, *(_most([rank[kind] for rank in place]) for place in places)]
        for kind in used["categories_bytes"] or ()
    ]
    yield "\n" + text_table(rows, ["live tensors by kind", "all", "on the device"])
    host, pinned = _most(used["host_peak_bytes"]), _most(used["pinned_bytes"])
    yield f"\nHost: {host} at its peak, {pinned} pinned"
    if used["nvme_bytes"]:
        written = human_bytes(used["nvme_written_bytes_per_step"])
        yield f"NVMe: {human_bytes(used['nvme_bytes'])} stored, {written} written in a step"


def _most(values: list[int | None]) -> str:
    known = [value for value in values if value is not None]
    return human_bytes(max(known)) if known else "—"
