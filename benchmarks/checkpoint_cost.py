#!/usr/bin/env python3
"""What a checkpoint costs: seconds that training waits, bytes written, and the share of training time.

    python benchmarks/checkpoint_cost.py [--model gpt2] [--every 50] [arguments for the script]

Runs each strategy on two processes (or --ranks N) for 6 steps with a save after every second, from random weights
on the embedded text, and prints a table. The share is that of one save in --every steps of the same length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
STRATEGIES = ("dp", "zero1", "zero2", "zero3", "offload", "infinity", "fsdp")


def measure(strategy: str, args, more: list[str]) -> dict:
    """Run once; returns seconds of a save, seconds of a step and bytes of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={args.ranks}", "--master_port=29631",
             PROJECT / "real_model_example.py", "--strategy", strategy, "--model", args.model, "--from_scratch", "--dataset",
             "pydocs", "--no_eval", "--max_steps", "6", "--save_every", "2", "--keep_last", "1", "--output_dir", out, *more],
            check=True, capture_output=True,
        )  # fmt: skip
        results = json.loads((out / "results.json").read_text())
        newest = max((out / "checkpoints").glob("step-*"))
        size = sum(path.stat().st_size for path in newest.iterdir())
    return {
        "save": statistics.median(results["checkpoint_seconds"]),
        "step": results["step_seconds"]["median"],
        "bytes": size,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What a checkpoint costs under each strategy.")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=50, help="steps between two saves (default: %(default)s)")
    args, more = parser.parse_known_args()
    print(f"| strategy | seconds of a save | GB | seconds of a step | share of the time, saving every {args.every} steps |")
    print("|---|---|---|---|---|")
    for strategy in STRATEGIES:
        found = measure(strategy, args, more)
        share = found["save"] / (found["save"] + args.every * found["step"])
        size = found["bytes"] / 2**30
        print(f"| {strategy} | {found['save']:.1f} | {size:.2f} | {found['step']:.1f} | {100 * share:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
