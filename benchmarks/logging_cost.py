#!/usr/bin/env python3
"""Measure what logging, metrics, the progress bar and the checkpoint hooks add to a step.

    python -m benchmarks.logging_cost

real_model_example.py trains the embedded model with a progress bar, metrics.jsonl and a test for a
due checkpoint. In every other step all these calls are replaced by functions that do nothing, so
that other load on the machine slows both kinds of step. The steps are short (one sequence of 32
tokens), because the cost of these calls does not depend on the model.
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


class Switch:
    """A switch that turns the hooks of a step on and off.

    Attributes:
        on: whether they run.
    """

    def __init__(self):
        self.on = True

    def disable(self, owner: type, name: str, instead=lambda *_, **__: None) -> None:
        """Replace a method while the switch is off."""
        method = getattr(owner, name)
        setattr(owner, name, lambda *a, **k: (method if self.on else instead)(*a, **k))


def train(steps: int, report: Path) -> None:
    """Run the script in this process, write the seconds of its steps to a file, and exit.

    The process exits in its last step: without all metrics the script could not complete the run.

    Args:
        steps: number of steps.
        report: a JSON file: [seconds with the hooks, seconds without them, seconds with …].
    """
    from support import progress
    from support.checkpoints.manager import CheckpointManager
    from support.report.metrics_log import MetricsLogger
    from support.train_state import TrainState

    progress.on_terminal = lambda: True
    switch, times, advance = Switch(), [], TrainState.advance
    for name in ("mark", "after_backward"):
        switch.disable(MetricsLogger, name)
    switch.disable(CheckpointManager, "after_step")
    # One entry for each step is what the next step expects.
    switch.disable(MetricsLogger, "end_step", lambda m, *_: m.timer.steps.append({"update": 0.0}))

    def record(state: TrainState) -> None:
        times.append(time.perf_counter())
        advance(state)
        switch.on = len(times) % 2 == 1
        if len(times) > steps:
            seconds = [after - before for before, after in itertools.pairwise(times)]
            report.write_text(json.dumps(seconds))
            os._exit(0)

    TrainState.advance = record
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--max_steps", str(steps + 2), "--output_dir", folder]
        sys.argv = [str(SCRIPT), *WORK.split(), *flags]
        runpy.run_path(str(SCRIPT), run_name="__main__")


def measure_cost(rounds: int, steps: int) -> list[float]:
    """Measure and print the difference between the median steps with and without the hooks.

    Args:
        rounds: number of runs.
        steps: steps of a run.
    Returns:
        The differences in seconds.
    """
    costs = []
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "seconds.json"
            command = [sys.executable, "-m", "benchmarks.logging_cost", "--steps", str(steps)]
            command += ["--report", str(report)]
            env = {**os.environ, "TMPDIR": folder}  # the process leaves files behind
            subprocess.run(command, env=env, cwd=PROJECT, check=True, capture_output=True)
            seconds = json.loads(report.read_text())[WARM_UP:]
        enabled, disabled = statistics.median(seconds[::2]), statistics.median(seconds[1::2])
        costs.append(enabled - disabled)
        print(
            f"round {number}: {1000 * enabled:.2f} ms a step, {1000 * disabled:.2f} ms without the "
            f"hooks, difference {1000 * costs[-1]:.2f} ms",
            flush=True,
        )
    return costs


def main() -> None:
    """Measure, or train if --report is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:
        train(args.steps, args.report)
    measure_cost(args.rounds, args.steps)


if __name__ == "__main__":
    main()
