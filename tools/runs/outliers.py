"""Steps whose loss or gradient norm stands out from the steps before them."""

from __future__ import annotations

import shlex
import statistics
from pathlib import Path
from typing import NamedTuple

from distributed_training.files.json_types import JsonObject
from distributed_training.run.signatures import signature_at

NEAR = 3  # records before a step whose median is its level
WINDOW, FEWEST = 16, 8  # records before a step that have its spread, at most and at least
MOST = 10  # steps that are named


class Limit(NamedTuple):
    """From where on a value stands out: both must be exceeded."""

    deviations: float  # (value - level) / spread
    ratio: float  # value / level


# Few steps of a run without bad data exceed them: 1 to 4 of 150 with the embedded model, 6 seeds.
LIMITS = {"loss": Limit(5.0, 1.1), "grad_norm": Limit(8.0, 2.0)}
# Flags of a run's command, with their values, that are not in that of its replay.
LEFT_OUT = (
    "--resume",
    "--resume_from_checkpoint",
    "--resume_force",
    "--overwrite",
    "--overwrite_output_dir",
    "--output_dir",  # the folder may have been moved since
)
NAMES = {"loss": "loss", "grad_norm": "norm of the gradient"}


class Outlier(NamedTuple):
    """A value that stands out."""

    step: int
    key: str  # of metrics.jsonl
    value: float
    level: float  # median of the NEAR records before it

    @property
    def text(self) -> str:
        """What stands out, for a user."""
        name = NAMES[self.key]
        return f"step {self.step}: {name} {self.value:.4g}, before it {self.level:.4g}"


def outliers_of(records: list[JsonObject]) -> list[Outlier]:
    """Return the values of metrics.jsonl that stand out, the largest deviation first.

    The level of a value is the median of the NEAR records before it: a running median follows the
    fall of the loss, and no other outlier (Tukey, Exploratory Data Analysis, 1977). The spread is
    1.4826 times the median absolute deviation of value - level in up to WINDOW records before, for
    a normal distribution its standard deviation (Rousseeuw and Croux, 1993). Of the values
    themselves it would have the fall in it, and hide a spike while the loss falls.
    """
    found: list[tuple[float, Outlier]] = []
    for key, limit in LIMITS.items():
        values: list[float] = []
        changes: list[float] = []  # from the level
        for record in records:
            value = record.get(key)
            if not isinstance(value, float | int):
                continue
            level = statistics.median(values[-NEAR:] or [value])
            change = value - level
            if len(values) >= FEWEST:
                spread = spread_of(changes[-WINDOW:])
                if change / limit.deviations > spread and value > limit.ratio * level:
                    deviations = change / spread if spread else float("inf")
                    found.append((deviations, Outlier(record["step"], key, value, level)))
            values.append(value)
            changes.append(change)
    return [outlier for _, outlier in sorted(found, key=lambda each: -each[0])]


def spread_of(values: list[float]) -> float:
    """Return 1.4826 times the median absolute deviation of values."""
    median = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - median) for value in values)


def replay_command(results: JsonObject, folder: Path, step: int) -> str:
    """Return the command that repeats a step of a run on the number of ranks that it had then.

    Args:
        results: the content of results.json.
        folder: the output folder of the run.
    """
    words = shlex.split(results.get("command") or "python real_model_example.py")
    told = signature_at(results, step).get("told") or {}
    if (ranks := told.get("ranks") or results.get("world_size") or 1) > 1:
        words[:1] = ["torchrun", f"--nproc_per_node={ranks}"]
    kept, is_dropped = [], False
    for word in words:
        if word.startswith("--"):
            is_dropped = word.partition("=")[0] in LEFT_OUT
        if not is_dropped:
            kept.append(word)
    return shlex.join([*kept, "--output_dir", str(folder), "--replay", str(step)])
