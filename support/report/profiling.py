"""Recordings for other tools: a trace of a few steps, and PyTorch's snapshot of GPU memory."""

from __future__ import annotations

from pathlib import Path

import torch

from support.cluster.context import DistContext
from support.errors import UserError
from support.files.user_files import create_folder

# Numbers of steps. The first steps are skipped because they differ from the later ones.
SKIPPED, RECORDED = 2, 3
SNAPSHOT_ENTRIES = 100_000  # allocations and releases that the snapshot keeps


class Trace:
    """The trace of --profile: PyTorch's profiler over steps 3 to 5, a file for each rank."""

    def __init__(self, folder: str, ctx: DistContext):
        self.path, self.ctx, self.written = Path(folder) / f"trace-rank{ctx.rank}.json", ctx, False
        create_folder("--profile", self.path.parent)
        # The profiler is off in the first skipped step and on in the second, because starting it
        # takes time.
        schedule = torch.profiler.schedule(wait=SKIPPED - 1, warmup=1, active=RECORDED, repeat=1)
        self._profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=self._write, profile_memory=True
        )
        self._profiler.start()
        self.end_step = self._profiler.step

    def _write(self, profiler) -> None:
        profiler.export_chrome_trace(str(self.path))
        self.written = True

    def stop(self) -> None:
        """Stop the profiler and print the folder; writes the trace of a run that ended early."""
        self._profiler.stop()
        first = SKIPPED + 1
        if self.written:
            text = f"trace of the steps from {first} on, for ui.perfetto.dev"
            self.ctx.console.print0(f"📁 {self.path.parent} ({text})")
        else:
            self.ctx.console.warn(
                f"--profile records from step {first} on, and this run had fewer: no trace was "
                "written."
            )


class MemorySnapshot:
    """The snapshot of --memory_snapshot: every allocation on the GPU with its stack.

    With several ranks each rank writes a file; also when memory runs out.

    Raises:
        UserError: there is no GPU.
    """

    def __init__(self, file: str, ctx: DistContext):
        if ctx.device.type != "cuda":
            raise UserError(
                "--memory_snapshot records the GPU's allocator, and there is no GPU: "
                "--profile_memory shows memory on a CPU, too."
            )
        path = Path(file)
        self.path = path.with_stem(f"{path.stem}-rank{ctx.rank}") if ctx.world_size > 1 else path
        create_folder("--memory_snapshot: the folder", path.parent)
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, stacks="python")
        ctx.failures.memory_facts.append(lambda: [self.write()])

    def write(self) -> str:
        """Write the file, and return a line that names it."""
        torch.cuda.memory._dump_snapshot(str(self.path))
        return f"📁 {self.path} (for pytorch.org/memory_viz)"
