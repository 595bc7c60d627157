"""What --strategy auto and --batch_size auto may choose, the simplest first."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distributed_training.cli.parse import complete
from distributed_training.errors import UserError
from distributed_training.memory.estimate import MemoryEstimate, predict, supporting
from distributed_training.memory.fit import splits
from distributed_training.settings.output import OutputSettings
from distributed_training.settings.parallelism import ParallelismSettings
from distributed_training.settings.settings import AsGiven
from distributed_training.strategies.table import PREFERENCE
from distributed_training.workload.workload import Workload


@dataclass(frozen=True)
class Candidate:
    """The strategy and the micro-batches of a run that might fit."""

    strategy: str
    work: Workload

    def __str__(self) -> str:
        return f"{self.strategy} with micro-batches of {self.work.batch_size}"

    @property
    def flags(self) -> dict[str, object]:
        """The values of the flags that may be auto."""
        return {"strategy": self.strategy, "batch_size": self.work.batch_size}

    def estimate(self) -> MemoryEstimate:
        """Return the memory estimate of a rank."""
        return predict(self.work, self.strategy)


def candidates(
    parallelism: ParallelismSettings, as_given: AsGiven, work: Workload
) -> Iterator[Candidate]:
    """Yield what the run might choose: strategies in the order of the plan, large batches first.

    Args:
        as_given: the flags of the command line; others may exclude a strategy.
        work: the run; its micro-batch is the largest that may be chosen.
    Raises:
        UserError: the other flags, or this machine, allow none of the strategies.
    """
    to_choose = parallelism.to_choose
    names = PREFERENCE if "strategy" in to_choose else [parallelism.strategy]
    sizes = [*splits(work)] if "batch_size" in to_choose else [work]
    problem, number = UserError("The memory plan supports no strategy for these flags."), 0
    for name in names:
        try:
            _check(as_given, Candidate(name, work))
        except UserError as error:
            problem = error
        else:
            if name in supporting(work):
                number += 1
                yield from (Candidate(name, size) for size in sizes)
    if not number:
        raise problem


def _check(as_given: AsGiven, candidate: Candidate) -> None:
    """Check that the other flags and this machine allow the strategy of a candidate.

    Raises:
        UserError: they do not; a MissingRequirement if it is the machine.
    """
    strategy = complete(as_given, candidate.flags).settings.strategy
    strategy.check_requirements(candidate.work.accumulation)


def earlier_choice(output: OutputSettings, world_size: int) -> dict[str, object] | None:
    """Return the flags of the run that --resume continues, if it chose them for as many ranks."""
    if output.resume is None:
        return None
    # A checkpoint is a folder in <output_dir>/checkpoints.
    folder = Path(output.resume).resolve().parent.parent if output.resume else output.output_dir
    with contextlib.suppress(OSError, ValueError, KeyError):
        results = json.loads(Path(folder or "", "results.json").read_text())
        if results["automatic"] and results["world_size"] == world_size:
            return {name: results[name] for name in ("strategy", "batch_size")}
    return None
