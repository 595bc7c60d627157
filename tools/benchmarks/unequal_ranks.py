"""Measure --rank_shares on ranks of unequal speed: equal shares, fixed ones, and auto.

    python -m tools.benchmarks.unequal_ranks                       # speeds 2 : 1
    python -m tools.benchmarks.unequal_ranks --speeds 4,2,1 --strategies dp,fsdp

The ranks are CPU processes with one thread: the first on one core, the others on a second one. A
rank of speed 1 : 2 is stopped (SIGSTOP) for half of each period of 20 ms, as a CPU quota does it.
The cases of a round follow each other, so that a change of the machine meets all of them. The time
of a case is the median step after the choice of auto; a speed-up is formed within its round.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from distributed_training import PROJECT
from distributed_training.rank_shares import divide
from distributed_training.records.metrics_file import FILE
from distributed_training.records.metrics_reader import read_metrics
from distributed_training.text_tables import text_table

SCRIPT = PROJECT / "real_model_example.py"
PERIOD = 0.02  # seconds, of a quota
STEPS, SETTLED = 30, 13  # of a run; the first step that counts, after the choice of auto
WORK = f"""
    --precision fp32 --dropout 0 --seq_length 256 --batch_size 6 --max_steps {STEPS}
    --no_eval --no_export --no_save --num_samples 400
    """.split()
CASES = ("equal", "fixed", "auto")


def main() -> None:
    """Run all cases, and print their table."""
    args = read_arguments()
    rounds: dict[str, list[dict[str, Case]]] = {}
    for number, strategy in itertools.product(range(args.rounds), args.strategies):
        of_round = {case: run(strategy, case, args.speeds) for case in CASES}
        rounds.setdefault(strategy, []).append(of_round)
        times = ", ".join(f"{case} {found.seconds:.3f} s" for case, found in of_round.items())
        print(f"round {number + 1}, {strategy}: {times}", file=sys.stderr, flush=True)
    rows = [row_of(strategy, found) for strategy, found in rounds.items()]
    header = ["strategy", "equal: step", "fixed: speed-up", "auto: speed-up", "auto", "losses"]
    print(text_table(rows, header))
    speeds = ",".join(f"{speed:g}" for speed in args.speeds)
    print(f"\nSpeeds {speeds}; ideal speed-up {ideal(args.speeds):.2f}. {STEPS} steps, median")
    print(f"(smallest–largest) of {args.rounds} rounds; losses: largest relative difference.")
    if args.figure:
        draw(rounds, ideal(args.speeds), args.figure)


class Case:
    """What one run has shown."""

    def __init__(self, folder: Path) -> None:
        records = [record for record in read_metrics(folder / FILE)[0] if "loss" in record]
        self.losses = [record["loss"] for record in records]
        settled = [record["seconds"] for record in records if record["step"] >= SETTLED]
        self.seconds = statistics.median(settled)
        self.sequences = json.loads((folder / "results.json").read_text())["rank_sequences"]


def ideal(speeds: list[float]) -> float:
    """Return the speed-up of whole sequences if only computing took time."""
    chosen = divide(6 * len(speeds), speeds, at_least=1)
    after = max(count / speed for count, speed in zip(chosen, speeds, strict=True))
    return 6 / min(speeds) / after


def run(strategy: str, case: str, speeds: list[float]) -> Case:
    """Run a case on throttled ranks."""
    shares = {"equal": [], "fixed": [",".join(map(str, speeds))], "auto": ["auto"]}[case]
    flags = ["--strategy", strategy, *WORK, *(["--rank_shares", *shares] if shares else [])]
    # The first rank has a core of its own.
    pinned = 'exec taskset -c $((LOCAL_RANK > 0)) "$0" "$@"'
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={len(speeds)}"]
    with tempfile.TemporaryDirectory() as folder:
        program = ["bash", "-c", pinned, sys.executable, str(SCRIPT), *flags, "--output_dir"]
        command = [sys.executable, *torchrun, "--no_python", *program, f"{folder}/run"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(f"{folder}/log", "w+") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
            try:
                with throttled(process.pid, speeds):
                    code = process.wait()
            finally:  # also after Ctrl+C; torchrun ends its ranks
                process.terminate()
                process.wait()
            if code:
                log.seek(0)
                sys.exit(f"{shlex.join(command)}\n{log.read()[-3000:]}")
        return Case(Path(folder, "run"))


@contextlib.contextmanager
def throttled(launcher: int, speeds: list[float]) -> Iterator[None]:
    """Stop each rank that the launcher starts for a part of each period, by its speed."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=throttle, args=(launcher, rank, speed / max(speeds), ended.is_set))
        for rank, speed in enumerate(speeds)
        if speed < max(speeds)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def throttle(launcher: int, rank: int, share: float, has_ended: Callable[[], bool]) -> None:
    """Let a rank run for a share of each period, from its start to its end."""
    process = None
    while process is None and not has_ended():
        time.sleep(0.1)
        process = find_rank(launcher, rank)
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        while process and not has_ended() and process.is_running():
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep((1 - share) * PERIOD)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(share * PERIOD)


def find_rank(launcher: int, rank: int) -> psutil.Process | None:
    """Return the process of a rank, or None if it has not started."""
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if SCRIPT.name in " ".join(process.cmdline()) and (
                process.environ().get("RANK") == str(rank)
            ):
                return process
    return None


def row_of(strategy: str, rounds: list[dict[str, Case]]) -> list[str]:
    """Return the row of a strategy."""
    speed_ups = {case: speed_up(rounds, case) for case in CASES}
    differences = [
        abs(other / equal - 1)
        for found in rounds
        for case in CASES
        for other, equal in zip(found[case].losses, found["equal"].losses, strict=True)
    ]
    chosen = " ".join(sorted({":".join(map(str, f["auto"].sequences)) for f in rounds}))
    seconds = statistics.median(found["equal"].seconds for found in rounds)
    texts = [spread(speed_ups[case]) for case in ("fixed", "auto")]
    return [strategy, f"{seconds:.3f} s", *texts, chosen, f"{max(differences):.1e}"]


def speed_up(rounds: list[dict[str, Case]], case: str) -> list[float]:
    """Return the time of equal shares / that of a case, for each round."""
    return [found["equal"].seconds / found[case].seconds for found in rounds]


def spread(values: list[float]) -> str:
    """1.32 (1.30–1.34)"""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def draw(rounds: dict[str, list[dict[str, Case]]], best: float, path: Path) -> None:
    """Draw the speed-ups as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot(ylabel="speed-up over equal shares")
    for offset, case, color in ((-0.2, "fixed", "#56B4E9"), (0.2, "auto", "#D55E00")):
        values = [speed_up(found, case) for found in rounds.values()]
        heights = [statistics.median(of_case) for of_case in values]
        errors = [
            [height - min(v) for height, v in zip(heights, values, strict=True)],
            [max(v) - height for height, v in zip(heights, values, strict=True)],
        ]
        places = [number + offset for number in range(len(values))]
        label = f"--rank_shares {'auto' if case == 'auto' else 'given'}"
        axes.bar(places, heights, 0.38, yerr=errors, color=color, label=label)
    axes.axhline(
        best, color="black", linestyle="--", linewidth=1, label="if only computing took time"
    )
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xticks(range(len(rounds)), [*rounds])
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=100)


def read_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])

    def words(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--speeds", type=lambda text: [*map(float, words(text))], default=[2, 1])
    parser.add_argument("--strategies", type=words, default=words("dp,zero2,zero3,fsdp"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--figure", type=Path, help="draw the speed-ups to this PNG file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
