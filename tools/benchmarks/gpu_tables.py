"""The tables of gpu_check.py's report: speed, memory, parts of a step, waiting calls."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

from distributed_training.units import GB
from tools.benchmarks import peers
from tools.benchmarks.gpu_report import UNREADABLE, Tables
from tools.benchmarks.runner import Check, Done

Ended = list[tuple[Check, Done]]  # checks whose runs have ended, in the order of the report

# Parts of a step, and what the names of their kernels contain; the first match counts.
KERNELS = {
    "attention": ("flash", "fmha", "attention", "sdpa", "flex"),
    "matrix products": ("gemm", "cutlass", "cublas", "nvjet", "xmma", "sm80_", "sm90_"),
    "elementwise": ("elementwise", "vectorized", "multi_tensor", "reduce", "norm", "triton"),
    "communication": ("nccl",),
}


def tables_of(ended: Ended) -> Tables:
    """Return the tables for which there are results."""
    builders: dict[str, Callable[[Ended], Tables]] = {
        "peers": peers_table,
        "runs": runs_table,
        "profile": profile_table,
        "memory": memory_table,
        "calls": calls_table,
    }
    tables: Tables = {}
    for kind, build in builders.items():
        rows = [(check, run) for check, run in ended if kind in check.tables and not run.problem]
        try:
            tables |= build(rows) if rows else {}
        except UNREADABLE as error:
            tables[kind] = [f"This table cannot be made from the results: {error!r}"]
    return tables


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def in_gb(size: float | None, digits: int = 2) -> str:
    """Return a number of bytes in GB; "—" for None."""
    return "—" if size is None else f"{size / GB:.{digits}f}"


# ------------------------------------------------------------------------------------------- speed


def measurements_of(run: Done) -> list[peers.Run]:
    """Return what peers.py measured, whose program wrote to the folder of a run."""
    [file] = run.folder.parent.glob("measurements*.json")
    return peers.load_runs(file)[0]


def peers_table(ended: Ended) -> Tables:
    """Compare this project with transformers.Trainer; their runs follow each other."""
    measured = [run for _, done in ended for run in measurements_of(done)]
    skip, tables = peers.FIRST_STEPS[measured[0].setting.gpu], []
    for setting in dict.fromkeys(run.setting for run in measured):
        way = "compiled" if setting.compile else "eager"
        title = f"{setting.model}, {setting.precision}, {way}"
        case = peers.Case(title, setting, ("ours", "Trainer"))
        tables.append((case, peers.rows_of(case, measured, skip)))
    return {"Speed next to transformers.Trainer": peers.table(tables)}


def runs_table(ended: Ended) -> Tables:
    """Show speed, memory and the phases of a step, of this project's own measurements."""
    heads = ["run", "tokens/s", "MFU", "peak in GB", "planned", "off", "outside the allocator"]
    phases = ["data", "forward", "backward", "update"]
    rows = []
    for check, run in ended:
        results = run.results
        memory = results["memory"]
        peak, planned = memory["peak_bytes"][0], (memory["predicted_bytes"] or {}).get("peak")
        unseen = (memory["device_used"][0] or {}).get("unseen")
        seconds = results["step_phases_seconds"] or {}
        # On a CPU the peak is that of the process.
        compared = planned and results["device"] == "cuda"
        mfu, off = results["mfu"], f"{planned / peak - 1:+.1%}" if compared else "—"
        row = [check.name, f"{results['tokens_per_second']:,.0f}", f"{mfu:.1%}" if mfu else "—"]
        row += [in_gb(peak), in_gb(planned), off, in_gb(unseen)]
        rows.append(row + [f"{1000 * seconds[p]:.1f}" if p in seconds else "—" for p in phases])
    return {"Speed by strategy": table(heads + [f"{phase}, ms" for phase in phases], rows)}


# ------------------------------------------------------------------------------- parts of a step


def profile_table(ended: Ended) -> Tables:
    """Show the shares of the parts of a profiled step."""
    [(check, run)] = ended
    shares = shares_of(trace_of(run))
    rows = [[part, f"{share:.1%}"] for part, share in shares.items()]
    return {f"Parts of the time of a step: {check.name}": table(["part", "share"], rows)}


def trace_of(run: Done) -> Path:
    """Return the file of the trace of a run with --profile; it may not exist."""
    return run.folder / "trace" / "trace-rank0.json"


@functools.cache
def shares_of(trace: Path) -> dict[str, float]:
    """Return `kernel_shares` of the file of a trace."""
    return kernel_shares(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])


def kernel_shares(events: list[dict]) -> dict[str, float]:
    """Return the shares of the parts of a step in its time on the GPU; {} without kernels.

    Args:
        events: of a trace of PyTorch's profiler. Kernels of the head are those inside the
            annotation "head" of distributed_training/model/loss.py.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    heads = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "gpu_user_annotation" and event["name"] == "head"
    ]
    if len(heads) > 1:
        # Whole steps, from one head to another: a trace begins and ends within a step.
        first, last = min(heads)[0], max(heads)[0]
        kernels = [kernel for kernel in kernels if first <= kernel["ts"] < last]
    if not kernels:
        return {}
    seconds = dict.fromkeys(["head", *KERNELS, "other"], 0.0)
    for kernel in kernels:
        name = kernel["name"].lower()
        in_head = any(start <= kernel["ts"] < end for start, end in heads)
        part = next((p for p, words in KERNELS.items() if any(w in name for w in words)), "other")
        seconds["head" if in_head else part] += kernel["dur"]
    busy, end = 0.0, 0.0  # kernels of several streams may overlap
    for kernel in sorted(kernels, key=lambda kernel: kernel["ts"]):
        finish = kernel["ts"] + kernel["dur"]
        busy += max(0.0, finish - max(end, kernel["ts"]))
        end = max(end, finish)
    total = end - min(kernel["ts"] for kernel in kernels)
    return {part: value / total for part, value in seconds.items()} | {"idle": 1 - busy / total}


# ------------------------------------------------------------------------------------------ memory


def step_peak(results: dict) -> int:
    """Return the peak memory of the measured step of rank 0 in bytes."""
    return max(phase["peak"] for phase in results["memory"]["step_bytes_by_rank"][0].values())


def memory_table(ended: Ended) -> Tables:
    """Compare the peaks of a step with the memory estimate, and host memory with its estimate."""
    heads = ["run", "step's peak, planned", "measured", "off", "reserved"]
    heads += ["host, planned", "process in host memory"]
    rows = []
    for check, run in ended:
        memory = run.results["memory"]
        planned, peak = memory["predicted_bytes"]["peak"], step_peak(run.results)
        row = [check.name, in_gb(planned, 3), in_gb(peak, 3), f"{planned / peak - 1:+.1%}"]
        host = memory["predicted_bytes"].get("host"), memory["host_peak_bytes"][0]
        rows.append([*row, in_gb(memory["reserved_bytes"][0], 3), *map(in_gb, host)])
    return {"Memory in GB, planned and measured": table(heads, rows)}


# --------------------------------------------------------------------------------- waiting calls


def calls_per_step(record: dict) -> float:
    """Return how many calls of a step wait for the GPU, of synchronizing_calls.py's file."""
    return sum(call["count"] for call in record["calls"]) / record["steps"]


def calls_table(ended: Ended) -> Tables:
    """List the calls in a step for which the host waits for the GPU."""
    rows = []
    for check, run in ended:
        record = json.loads((run.folder / "calls.json").read_text(encoding="utf-8"))
        for call in record["calls"]:
            number = f"{call['count'] / record['steps']:g}"
            rows.append([check.name, number, call["call"], call["project"]])
    return {"Calls that wait for the GPU": table(["run", "calls a step", "call", "from"], rows)}
