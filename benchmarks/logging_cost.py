#!/usr/bin/env python3
"""Measure what logging, metrics, the progress bar and the checkpoint hooks add to a step.

    python -m benchmarks.logging_cost

real_model_example.py trains the embedded model twice in each round: as it is, with a progress bar,
metrics.jsonl and a test for a due checkpoint, and with all these calls replaced by functions that
do nothing. The steps are as short as possible (one sequence of 32 tokens), because the cost of
these calls does not depend on the model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.bench import PROJECT, SCRIPT

WARM_UP = 50  # first steps that are left out
WORK = "--batch_size 1 --seq_length 32 --precision fp32 --no_eval --no_export --save_every 1000000"


def train(enabled: bool, steps: int, report: Path) -> None:
    """Run the script in this process, write the seconds of its steps to a file, and exit.

    The process exits in its last step: without metrics the script could not complete the run.

    Args:
        enabled: False replaces the hooks of a step by functions that do nothing.
        steps: number of steps.
        report: a JSON file.
    """
    from support import progress
    from support.checkpoints.manager import CheckpointManager
    from support.report.metrics_log import MetricsLogger
    from support.train_state import TrainState

    progress.on_terminal = lambda: True
    if not enabled:
        for name in ("mark", "after_backward", "end_step"):
            setattr(MetricsLogger, name, lambda *_, **__: None)
        CheckpointManager.after_step = lambda *_: None
    advance, times = TrainState.advance, []

    def record(state: TrainState) -> None:
        times.append(time.perf_counter())
        advance(state)
        if len(times) == steps:
            seconds = [after - before for before, after in itertools.pairwise(times)]
            report.write_text(json.dumps(seconds[WARM_UP:]))
            os._exit(0)

    TrainState.advance = record
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--max_steps", str(steps + 1), "--output_dir", folder]
        sys.argv = [str(SCRIPT), *WORK.split(), *flags]
        runpy.run_path(str(SCRIPT), run_name="__main__")


def measure(enabled: bool, steps: int) -> float:
    """Return the median step of a run in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", "benchmarks.logging_cost", "--steps", str(steps)]
        command += ["--train", "with" if enabled else "without", "--report", str(report)]
        env = {**os.environ, "TMPDIR": folder}  # the process leaves files behind
        subprocess.run(command, env=env, cwd=PROJECT, check=True, capture_output=True)
        return statistics.median(json.loads(report.read_text()))


def measure_cost(rounds: int, steps: int) -> list[float]:
    """Measure and print the difference between the median steps of the two runs of each round.

    Args:
        rounds: number of rounds.
        steps: steps of a run.
    Returns:
        The differences in seconds.
    """
    costs = []
    for number in range(1, rounds + 1):
        enabled, disabled = measure(True, steps), measure(False, steps)
        costs.append(enabled - disabled)
        print(
            f"round {number}: {1000 * enabled:.2f} ms a step, {1000 * disabled:.2f} ms without the "
            f"hooks, difference {1000 * costs[-1]:.2f} ms",
            flush=True,
        )
    return costs


def main() -> None:
    """Print the median step with and without the hooks, and the difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", choices=["with", "without"], help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train == "with", args.steps, args.report)
    measure_cost(args.rounds, args.steps)


if __name__ == "__main__":
    main()
