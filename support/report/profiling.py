"""Recordings for other tools: a trace of a few steps, and PyTorch's snapshot of a GPU's memory."""

from __future__ import annotations

from pathlib import Path

import torch

from support.cluster.context import Run
from support.errors import UserError

SKIPPED, RECORDED = 2, 3  # steps: the first are unlike the others


class Trace:
    """--profile: torch's profiler over steps 3 to 5, a file for each rank that ui.perfetto.dev
    opens.
    """

    def __init__(self, folder: str, run: Run):
        self.path, self.run, self.written = Path(folder) / f"trace-rank{run.rank}.json", run, False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--profile {folder} cannot be created: {error.strerror}.") from error
        # The first skipped step without, the second with the profiler on, whose start takes time.
        schedule = torch.profiler.schedule(wait=SKIPPED - 1, warmup=1, active=RECORDED, repeat=1)
        self._profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=self._write, profile_memory=True
        )
        self._profiler.start()

    def _write(self, profiler) -> None:
        profiler.export_chrome_trace(str(self.path))
        self.written = True

    def end_step(self) -> None:
        """An optimizer step is over."""
        self._profiler.step()

    def stop(self) -> None:
        """Write what was recorded, if the run was shorter than the schedule."""
        self._profiler.stop()
        if self.written:
            self.run.say(
                f"📁 {self.path.parent} (trace of the steps from {SKIPPED + 1} on, for ui.perfetto.dev)"
            )
        else:
            self.run.warn(
                f"--profile records from step {SKIPPED + 1} on, and this run had fewer: no trace was written."
            )


SNAPSHOT_ENTRIES = 100_000  # allocations and releases that are remembered


def record_memory(file: str, run: Run) -> None:
    """--memory_snapshot: record every allocation on a GPU with its stack, for
    pytorch.org/memory_viz.

    The file is written at the end of the run, or when memory runs out; a run on several ranks
    writes one for each.
    """
    if run.device.type != "cuda":
        raise UserError(
            "--memory_snapshot records the GPU's allocator, and there is no GPU: --profile_memory shows memory on "
            "a CPU, too."
        )
    path = Path(file)
    path = path if run.world_size == 1 else path.with_stem(f"{path.stem}-rank{run.rank}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--memory_snapshot {file}: its folder cannot be created: {error.strerror}."
        ) from error
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, stacks="python")

    def write() -> list[str]:
        torch.cuda.memory._dump_snapshot(str(path))
        return [f"📁 {path} (for pytorch.org/memory_viz)"]

    run.memory_facts.append(write)
    run.at_end.append(lambda: run.say(write()[0]))
