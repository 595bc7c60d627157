"""Recordings for other tools: a trace of a few steps, and PyTorch's snapshot of GPU memory."""

from __future__ import annotations

from pathlib import Path

import torch

from support.cluster.context import DistContext
from support.errors import UserError
from support.files import folders

# Numbers of steps. The first steps are skipped because they differ from the later ones.
SKIPPED, RECORDED = 2, 3
SNAPSHOT_ENTRIES = 100_000  # allocations and releases that the snapshot keeps


class Trace:
    """The trace of --profile: PyTorch's profiler over steps 3 to 5, a file for each rank.

    Args:
        folder: where the files are written; it is created if it does not exist.
    """

    def __init__(self, folder: str, ctx: DistContext):
        self.path, self.ctx, self.written = Path(folder) / f"trace-rank{ctx.rank}.json", ctx, False
        # The profiler is off in the first skipped step and on in the second, because starting it
        # takes time.
        schedule = torch.profiler.schedule(wait=SKIPPED - 1, warmup=1, active=RECORDED, repeat=1)
        self._profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=self._write, profile_memory=True
        )
        folders.create("--profile", self.path.parent)
        self._profiler.start()

    def _write(self, profiler) -> None:
        profiler.export_chrome_trace(str(self.path))
        self.written = True

    def end_step(self) -> None:
        """Tell the profiler that an optimizer step has ended."""
        self._profiler.step()

    def stop(self) -> None:
        """Stop the profiler and print the folder; writes the trace of a run that ended early."""
        self._profiler.stop()
        if self.written:
            self.ctx.console.print0(
                f"📁 {self.path.parent} (trace of the steps from {SKIPPED + 1} on, "
                "for ui.perfetto.dev)"
            )
        else:
            self.ctx.console.warn(
                f"--profile records from step {SKIPPED + 1} on, and this run had fewer: "
                "no trace was written."
            )


class MemorySnapshot:
    """The snapshot of --memory_snapshot: every allocation on the GPU with its stack.

    The file is also written when memory runs out. With several ranks each rank writes a file.

    Args:
        file: path of the file; its folder is created if it does not exist.
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
        path = path if ctx.world_size == 1 else path.with_stem(f"{path.stem}-rank{ctx.rank}")
        self.path = path
        folders.create("--memory_snapshot: the folder", path.parent)
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, stacks="python")
        ctx.failures.memory_facts.append(lambda: [self.write()])

    def write(self) -> str:
        """Write the file, and return a line that names it."""
        torch.cuda.memory._dump_snapshot(str(self.path))
        return f"📁 {self.path} (for pytorch.org/memory_viz)"
