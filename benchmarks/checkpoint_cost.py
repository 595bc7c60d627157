"""Measure the cost of checkpoints and of the export under each strategy.

    python -m benchmarks.checkpoint_cost [--model gpt2] [--every 50] [arguments for the timed run]

The costs are the seconds that training waits, the bytes written, the share of training time, and
the peak of host memory. Each strategy runs on two processes (or --ranks N), from random weights on
the embedded text. One run of 6 steps with a save after every second step gives the times. Two runs
on sequences of 64 tokens, whose activations are small, give the peaks of resident memory: one
without, and one with --resume and export. The share is that of one save in --every steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from benchmarks.bench import SCRIPT, TORCHRUN
from support.strategy import STRATEGIES
from support.units import GB, MB

SMALL = "--batch_size 1 --seq_length 64"


def train(strategy: str, args: argparse.Namespace, out: Path, flags: list) -> dict:
    """Run the script under torchrun and return its results.json.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    work = f"--strategy {strategy} --model {args.model} --from_scratch --dataset pydocs --no_eval"
    launch = [*TORCHRUN, f"--nproc_per_node={args.ranks}", SCRIPT]
    command = [*launch, *work.split(), "--output_dir", out, *flags]
    subprocess.run(command, check=True, capture_output=True)
    return json.loads((out / "results.json").read_text())


def measure(strategy: str, args: argparse.Namespace, more: list[str]) -> dict:
    """Measure one strategy.

    Args:
        more: arguments for the timed run.
    Returns:
        Seconds of a "save" and a "step" (medians) and of the "export"; "bytes" of a checkpoint; and
        the largest peak of resident memory of any rank in bytes: "plain", "resumed" and "exported".
    """
    saves = "--max_steps 6 --save_every 2 --keep_last 1 --no_export".split()
    no_saves = f"{SMALL} --max_steps 2 --no_export".split()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timed = train(strategy, args, folder / "timed", [*saves, *more])
        newest = max((folder / "timed" / "checkpoints").glob("step-*"))
        plain = train(strategy, args, folder / "plain", no_saves)
        resume = [*SMALL.split(), "--max_steps", "8", "--resume_force", "--resume", newest]
        resumed = train(strategy, args, folder / "resumed", resume)
        return {
            "save": statistics.median(timed["checkpoint_seconds"]),
            "step": timed["step_seconds"]["median"],
            "bytes": sum(path.stat().st_size for path in newest.rglob("*")),
            "export": resumed["export"]["seconds"],
            "plain": max(plain["memory"]["host_peak_bytes"]),
            "resumed": max(resumed["memory"]["host_peak_bytes"]),
            "exported": max(resumed["export"]["host_peak_bytes"]),
        }


def main() -> None:
    """Print the table of all strategies."""
    parser = argparse.ArgumentParser(
        description="What checkpoints and the export cost under each strategy."
    )
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--every", type=int, default=50, help="steps between two saves (default: %(default)s)"
    )
    args, more = parser.parse_known_args()
    print(
        f"| strategy | save, s | GB | step, s | share, saving every {args.every} steps | "
        "export, s | peak MB of a rank: plain / after --resume / after export |"
    )
    print("|---|---|---|---|---|---|---|")
    for strategy in STRATEGIES:
        costs = measure(strategy, args, more)
        share = costs["save"] / (costs["save"] + args.every * costs["step"])
        peaks = " / ".join(f"{costs[key] / MB:,.0f}" for key in ("plain", "resumed", "exported"))
        numbers = (
            f"{costs['save']:.1f} | {costs['bytes'] / GB:.2f} | {costs['step']:.1f} | "
            f"{100 * share:.1f} %"
        )
        print(f"| {strategy} | {numbers} | {costs['export']:.1f} | {peaks} |", flush=True)


if __name__ == "__main__":
    main()
