"""Scores of two models on tasks of the Language Model Evaluation Harness (lm-eval)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from distributed_training import console
from distributed_training.errors import UserError
from distributed_training.trained.load import usable_device
from distributed_training.trained.source import Source

Key = tuple[str, str]  # task, metric
# Beginnings of the names of metrics of which a smaller value is better, if lm-eval does not say so.
SMALLER = ("perplexity", "bits_per_byte", "brier", "ter")


class Scores(NamedTuple):
    """What lm-eval wrote about a model."""

    values: dict[Key, dict[tuple[str, int], float]]  # of each item: (filter, number) -> value
    larger_is_better: dict[Key, bool]  # without the metrics of which lm-eval does not say it

    def smaller_is_better(self, key: Key) -> bool:
        """Return whether a smaller value of a metric is better."""
        return not self.larger_is_better.get(key, not key[1].startswith(SMALLER))


def scores_of(source: Source, tasks: str, include: Path | None) -> Scores:
    """Run lm-eval on a model, and return the value of each item.

    Args:
        tasks: names of tasks, as lm-eval takes them.
        include: a folder with tasks of the user's own.
    Raises:
        UserError: lm-eval is not installed, or failed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-eval: pip install lm-eval")
    arguments = f"pretrained={source.folder},dtype=float32"
    arguments += f",peft={source.adapters}" if source.adapters else ""
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments]
    command += ["--tasks", tasks, "--device", str(usable_device()), "--log_samples"]
    command += ["--include_path", str(include)] if include else []
    command += ["--apply_chat_template"] if source.is_chat else []
    with TemporaryDirectory() as folder, console.timer(f"lm-eval: {source.name}"):
        command += ["--output_path", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise UserError(f"lm-eval failed with exit code {done.returncode}: {lines[-1][:300]}")
        return read_scores(Path(folder))


def read_scores(folder: Path) -> Scores:
    """Return what the files below a folder of lm-eval's output say.

    samples_TASK_TIME.jsonl have the values of the items, and results_TIME.json has
    `higher_is_better`: for each task and metric true, false, or null if it is not known.
    """
    found = Scores({}, {})
    for file in sorted(folder.rglob("samples_*.jsonl")):
        task = file.stem.removeprefix("samples_").rpartition("_")[0]
        # Not splitlines(): lm-eval does not escape a document's line separators, as U+2028.
        for line in filter(None, file.read_text(encoding="utf-8").split("\n")):
            sample = json.loads(line)
            for metric, value in _values(sample):
                item = (sample.get("filter", ""), sample["doc_id"])
                found.values.setdefault((task, metric), {})[item] = value
    for file in folder.rglob("results_*.json"):
        directions = json.loads(file.read_text(encoding="utf-8")).get("higher_is_better") or {}
        for task, metrics in directions.items():
            known = {(task, name): value for name, value in metrics.items() if value is not None}
            found.larger_is_better.update(known)
    return found


def _values(sample: dict) -> Iterator[tuple[str, float]]:
    """Yield the metrics of an item that are numbers: others are no mean of items."""
    for metric in sample.get("metrics", []):
        value = sample.get(metric)
        if isinstance(value, int | float):
            # lm-eval computes a perplexity of the mean; an item has the logarithm, at most 0.
            is_log = metric == "perplexity" and value <= 0
            yield "log-likelihood" if is_log else metric, float(value)


def paired(before: Scores, after: Scores) -> Iterator[tuple[Key, np.ndarray, np.ndarray]]:
    """Yield (task, metric) and the values of both models, [items], of the items that both have."""
    values = before.values, after.values
    for key in sorted(before.values.keys() & after.values.keys()):
        items = sorted(before.values[key].keys() & after.values[key].keys())
        first, second = (np.array([of[key][item] for item in items]) for of in values)
        yield key, first, second
