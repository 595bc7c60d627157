"""What --strategy auto and --batch_size auto may choose, the simplest first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.cli.parse import read_command_line
from support.errors import UserError
from support.memory.estimate import MemoryEstimate, predict, supporting
from support.settings.output import OutputSettings
from support.settings.parallelism import ParallelismSettings
from support.strategies.table import OFFLOADING, ON_DEVICE
from support.workload.workload import Workload


class Candidate(NamedTuple):
    """The flags of a run that might fit."""

    strategy: str
    batch_size: int

    def __str__(self) -> str:
        return f"{self.strategy} with micro-batches of {self.batch_size}"

    def workload(self, work: Workload) -> Workload:
        """Return the workload in these micro-batches, with the same global batch."""
        accumulation = work.accumulation * work.batch_size // self.batch_size
        return dataclasses.replace(work, batch_size=self.batch_size, accumulation=accumulation)

    def estimate(self, work: Workload) -> MemoryEstimate:
        """Return the memory estimate of the workload in these micro-batches."""
        return predict(self.workload(work), self.strategy)


def candidates(
    argv: list[str], parallelism: ParallelismSettings, work: Workload
) -> Iterator[Candidate]:
    """Yield what the run might choose, in the order in which `fit.recommend` tries it.

    Strategies that offload come last. Of the others, one that fits the whole batch comes before a
    simpler one that has to divide it.

    Args:
        argv: the command line, whose other flags may exclude a strategy.
        work: the run; its micro-batch is the largest that may be chosen.
    """
    whole = work.batch_size
    sizes = [whole]
    if "batch_size" in parallelism.automatic:
        sizes = [size for size in range(whole, 0, -1) if whole % size == 0]
    for group in (ON_DEVICE, OFFLOADING):
        names = group if "strategy" in parallelism.automatic else [parallelism.strategy]
        names = [name for name in names if name in group and name in supporting(work)]
        names = [name for name in names if is_valid(argv, Candidate(name, whole))]
        yield from (Candidate(name, whole) for name in names)
        yield from (Candidate(name, size) for name in names for size in sizes[1:])


def is_valid(argv: list[str], candidate: Candidate) -> bool:
    """Return whether the other flags allow the strategy of a candidate."""
    with contextlib.suppress(UserError):
        read_command_line(argv, chosen=candidate._asdict())
        return True
    return False


def earlier_choice(output: OutputSettings, world_size: int) -> Candidate | None:
    """Return the choice of the run that --resume continues, if it had as many ranks."""
    if output.resume is None:
        return None
    # A checkpoint is a folder in <output_dir>/checkpoints.
    folder = Path(output.resume).resolve().parent.parent if output.resume else output.output_dir
    with contextlib.suppress(OSError, ValueError, KeyError):
        results = json.loads(Path(folder or "", "results.json").read_text())
        if results["automatic"] and results["world_size"] == world_size:
            chosen = results["automatic"]
            return Candidate(chosen["strategy"], chosen["batch_size"])
    return None
