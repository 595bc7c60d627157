"""Recordings for other tools: a trace of a few steps, and PyTorch's snapshot of GPU memory."""

from collections.abc import Callable
from pathlib import Path

import torch

from distributed_training import console
from distributed_training.errors import UserError, explain
from distributed_training.files.user_files import create_folder
from distributed_training.ranks.context import DistContext

FIRST, RECORDED = 3, 3  # the first step of a trace, and the number of its steps
SNAPSHOT_ENTRIES = 100_000  # allocations and releases that the snapshot keeps


def start_trace(folder: str, ctx: DistContext) -> tuple[torch.profiler.profile, Callable[[], None]]:
    """Start PyTorch's profiler (--profile), which writes a file for each rank after its last step.

    Returns:
        The profiler, whose `step` is called after each step, and a function for the end of the run.
    """
    path = Path(folder) / f"trace-rank{ctx.rank}.json"
    create_folder("--profile", path.parent)

    def write(profiler: torch.profiler.profile) -> None:
        try:
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError, ValueError) as error:  # a full disk, or a cut file
            console.warn(f"--profile: {path} cannot be written: {explain(error)}")
            return
        console.print0(f"📁 {path.parent} (trace from step {FIRST} on, for ui.perfetto.dev)")

    # The profiler starts one step early, because starting it takes time.
    schedule = torch.profiler.schedule(wait=FIRST - 2, warmup=1, active=RECORDED, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write, profile_memory=True)
    profiler.start()
    ctx.monitor.watchdog.traffic.trace()

    def stop() -> None:
        profiler.stop()
        if profiler.step_num < FIRST:
            console.warn("--profile: the run was too short for a trace.")

    return profiler, stop


def record_memory(file: str, ctx: DistContext) -> Callable[[], None]:
    """Record every allocation on the GPU with its stack (--memory_snapshot).

    Returns:
        A function that writes the file, one for each rank, and prints its name. The file is also
        written when memory runs out.
    Raises:
        UserError: there is no GPU.
    """
    if ctx.device.type != "cuda":
        raise UserError(
            "--memory_snapshot records the GPU's allocator, and there is no GPU: "
            "--profile_memory shows memory on a CPU, too."
        )
    path = Path(file)
    path = path.with_stem(f"{path.stem}-rank{ctx.rank}") if ctx.world_size > 1 else path
    create_folder("--memory_snapshot: the folder", path.parent)
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, stacks="python")

    def write() -> str:
        torch.cuda.memory._dump_snapshot(str(path))
        return f"📁 {path} (for pytorch.org/memory_viz)"

    ctx.monitor.explain_memory_with(lambda: [write()])
    return lambda: console.print0(write())
