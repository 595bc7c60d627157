"""Measure the peak host memory of each rank while a pretrained model loads, by strategy.

    python -m benchmarks.loading_memory [--model gpt2] [--ranks 2] [--precision fp32]
                                        [--from_scratch] [--strategies dp zero3 fsdp]

The ranks' memory is sampled from outside, through /proc (Linux only), until the line "Model
loaded". The result is two figures per rank, in MB above the same run of the embedded model of 4M
parameters (17 MB), so that the memory of the libraries is left out:

    anonymous   memory that the process itself filled (RssAnon): counts against a memory limit
    resident    the same plus mapped pages of the weights file (RSS); the kernel can drop those
                pages at any time
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from benchmarks.bench import SCRIPT, TORCHRUN
from support.strategy import STRATEGIES


def memory_of(pid: int) -> tuple[int, int]:
    """Return the (anonymous, resident) bytes of a process.

    Raises:
        OSError: the process has ended.
        KeyError: the process is ending and has no memory any more.
    """
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if ":" in line
    )
    return tuple(int(status[key].split()[0]) * 1024 for key in ("RssAnon", "VmRSS"))


def ranks_of(launcher: subprocess.Popen) -> dict[int, int]:
    """Return {rank: pid} of the script's processes among the launcher's descendants."""
    pids = {}
    for child in psutil.Process(launcher.pid).children(recursive=True):
        try:
            if str(SCRIPT) in child.cmdline() and "RANK" in (env := child.environ()):
                pids[int(env["RANK"])] = child.pid
        except psutil.Error:
            continue
    return pids


def watch(
    launcher: subprocess.Popen, started: threading.Event, loaded: threading.Event
) -> dict[int, tuple[int, int]]:
    """Sample the memory of each rank every 5 ms between two events.

    Args:
        started: set when all ranks have imported their libraries.
        loaded: set when the model is loaded.
    Returns:
        {rank: peaks of (anonymous, resident) bytes}, above the rank's memory at `started`.
    """
    started.wait()
    initial = {rank: (pid, memory_of(pid)) for rank, pid in ranks_of(launcher).items()}
    peaks = dict.fromkeys(initial, (0, 0))
    while not loaded.is_set() and launcher.poll() is None:
        for rank, (pid, base) in initial.items():
            try:
                current = memory_of(pid)
            except (OSError, KeyError):
                continue
            peaks[rank] = tuple(
                max(peak, value - start)
                for peak, value, start in zip(peaks[rank], current, base, strict=True)
            )
        time.sleep(0.005)
    return peaks


def measure(strategy: str, model: list[str], args: argparse.Namespace) -> dict:
    """Run a strategy with these model arguments and return the peaks of each rank; see `watch`.

    The program exits if the run fails.
    """
    work = "--dataset pydocs --max_steps 1 --seq_length 32 --batch_size 1 --num_samples 2 --no_eval"
    flags = [*model, "--strategy", strategy, "--precision", args.precision, *work.split()]
    with tempfile.TemporaryDirectory() as folder:
        launch = [*TORCHRUN, f"--nproc_per_node={args.ranks}", SCRIPT]
        return run([*launch, *flags, "--output_dir", folder])


def run(command: list) -> dict[int, tuple[int, int]]:
    """Run a command that starts the ranks and return the peaks of each rank; see `watch`.

    The program exits if the command fails.
    """
    started, loaded, peaks = threading.Event(), threading.Event(), {}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # A file: the ranks would block on a pipe that is not read while they run.
    with tempfile.TemporaryFile("w+") as errors:
        launcher = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        watcher = threading.Thread(target=lambda: peaks.update(watch(launcher, started, loaded)))
        watcher.start()
        for line in launcher.stdout:
            if "World Size" in line:  # every rank has imported its libraries and joined the group
                started.set()
            if "Model loaded" in line:
                loaded.set()
        code = launcher.wait()
        started.set()
        watcher.join()
        if code != 0:
            errors.seek(0)
            sys.exit(f"❌ {' '.join(map(str, command))} failed:\n{errors.read()}")
    return peaks


def main() -> None:
    """Print the table of all strategies."""
    parser = argparse.ArgumentParser(
        description="Peak host memory of each rank while a pretrained model loads."
    )
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--from_scratch", action="store_true")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    args = parser.parse_args()
    columns = " | ".join(f"rank {rank}: anonymous / resident MB" for rank in range(args.ranks))
    print(f"| strategy | {columns} |")
    print("|---" * (args.ranks + 1) + "|")
    model = ["--model", args.model] + ["--from_scratch"] * args.from_scratch
    for strategy in args.strategies:
        libraries, peaks = measure(strategy, [], args), measure(strategy, model, args)
        cells = []
        for rank in sorted(peaks):
            pairs = zip(peaks[rank], libraries[rank], strict=True)
            cells.append(" / ".join(f"{(peak - base) / 1e6:.0f}" for peak, base in pairs))
        print(f"| {strategy} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
