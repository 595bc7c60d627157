"""Measure saves: how long training waits for one, run time and memory, next to another build.

    python -m tools.benchmarks.saves                                       # the embedded model
    python -m tools.benchmarks.saves --before ../older --model gpt2 --seq_length 256

Two CPU processes, or two GPUs, train and save every --save_every steps. --before names a checkout
of the build to compare with. Under fsdp the peer is torch.distributed.checkpoint's `async_save`
(dcp_driver.py), which writes no hashes. The runs of a round follow each other, each build first in
every second round, so that a change of the machine meets all of them. A ratio is formed within its
round. The pause of a run is the mean over its saves. "Later" leaves out the first save, which
allocates the copy.
"""

import argparse
import itertools
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from distributed_training import PROJECT
from distributed_training.text_tables import text_table
from distributed_training.units import GB

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "offload", "fsdp")
PEER = "async_save"
RANKS = 2


class Case(NamedTuple):
    """What one run has shown."""

    pauses: list[float]  # seconds that training waited for each save
    loop: float  # seconds of all steps, saves, and the wait for the last one
    memory: int  # bytes of the ranks' peaks of resident memory, summed
    cpu: float  # seconds of all processes and threads, from start to end

    @property
    def pause(self) -> float:
        """The mean pause in seconds."""
        return statistics.mean(self.pauses)

    @property
    def later(self) -> float:
        """The mean pause in seconds without the first save."""
        return statistics.mean(self.pauses[1:] or self.pauses)


Round = dict[str, Case]  # by build: "before", "now", or PEER


def main() -> None:
    """Run all cases, and print their table."""
    args = read_arguments()
    rounds: dict[str, list[Round]] = {}
    for number, strategy in itertools.product(range(args.rounds), args.strategies):
        found = measure(args, strategy, number)
        rounds.setdefault(strategy, []).append(found)
        shown = ", ".join(f"{build}: {in_words(case)}" for build, case in found.items())
        print(f"round {number + 1}, {strategy}: {shown}", file=sys.stderr, flush=True)
    header = (
        "strategy,build,pause s,ratio,first s,later s,ratio,run s,ratio,CPU s,ratio,peak GB".split(
            ","
        )
    )
    rows = [row for strategy, found in rounds.items() for row in rows_of(strategy, found)]
    print(text_table(rows, header))
    print(f"\n{args.model}: median (smallest–largest) of {args.rounds} rounds; ratios to the first")
    tokens = f"{RANKS} × {args.batch_size} × {args.seq_length} tokens"
    print(f"build. {args.max_steps} steps of {tokens}, a save every {args.save_every}.")
    print("Run: steps, saves, and the wait for the last save. CPU: all processes, with the start.")


def in_words(case: Case) -> str:
    """Return what a run has shown, on one line."""
    pauses = " ".join(f"{pause:.3f}" for pause in case.pauses)
    times = f"pauses {pauses} s, run {case.loop:.1f} s, CPU {case.cpu:.1f} s"
    return f"{times}, {case.memory / GB:.2f} GB"


def measure(args: argparse.Namespace, strategy: str, number: int) -> Round:
    """Run a strategy with each build, and under fsdp the peer."""
    builds = {"before": args.before, "now": PROJECT} if args.before else {"now": PROJECT}
    found = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for build in [*builds][:: -1 if number % 2 else 1]:
            found[build] = run(args, strategy, builds[build], Path(folder, build))
        if strategy == "fsdp":
            config = next(Path(folder, "now/checkpoints").glob("step-*/model/config.json"))
            found[PEER] = run_peer(args, config, Path(folder, PEER))
    return {build: found[build] for build in (*builds, PEER) if build in found}


def run(args: argparse.Namespace, strategy: str, project: Path, folder: Path) -> Case:
    """Train with a build of this project."""
    flags = [f"--{name}={getattr(args, name)}" for name in SHARED]
    flags += ["--model", args.model, "--from_scratch", "--strategy", strategy, "--keep_last", "1"]
    flags += ["--dataset", args.dataset, "--dropout", "0", "--no_eval", "--no_export"]
    program = [str(project / "real_model_example.py"), *flags, "--output_dir", str(folder)]
    _, cpu = launch(program, project)
    results = json.loads((folder / "results.json").read_text())
    pauses = results["checkpoint_seconds"]
    waited = (results.get("saves") or {}).get("wait_seconds", sum(pauses))
    loop = results["training_seconds"] + waited
    memory = sum(results["memory"]["host_peak_bytes"])
    return Case(pauses, loop, memory, cpu)


def run_peer(args: argparse.Namespace, config: Path, folder: Path) -> Case:
    """Train with dcp_driver.py."""
    flags = [f"--{name}={getattr(args, name)}" for name in SHARED]
    driver = str(PROJECT / "tools/benchmarks/dcp_driver.py")
    out, cpu = launch([driver, *flags, "--config", str(config), "--folder", str(folder)], PROJECT)
    found = json.loads(next(line for line in out.splitlines() if line.startswith('{"pauses"')))
    loop = sum(found["steps"]) + sum(found["pauses"]) + found["last_wait"]
    return Case(found["pauses"], loop, sum(found["peaks"]), cpu)


SHARED = ("seq_length", "batch_size", "max_steps", "save_every", "precision")


def launch(program: list[str], project: Path) -> tuple[str, float]:
    """Run a program on all ranks, with its build's package; return its output and its CPU time."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    command = [sys.executable, *torchrun, *program]
    cores = str(max(1, len(os.sched_getaffinity(0)) // RANKS))
    env = {**os.environ, "OMP_NUM_THREADS": cores, "PYTHONPATH": str(project)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=env, cwd=project, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
    time.sleep(1)  # for the disk to become idle
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rows_of(strategy: str, rounds: list[Round]) -> list[list[str]]:
    """Return the rows of a strategy, one for each build."""
    first = next(iter(rounds[0]))
    rows = []
    for build in rounds[0]:
        cases = [found[build] for found in rounds]
        references = [found[first] for found in rounds]
        pairs = list(zip(cases, references, strict=True))
        rows.append(
            [
                strategy,
                build,
                spread(case.pause for case in cases),
                spread(case.pause / reference.pause for case, reference in pairs),
                spread(case.pauses[0] for case in cases),
                spread(case.later for case in cases),
                spread(case.later / reference.later for case, reference in pairs),
                spread(case.loop for case in cases),
                spread(case.loop / reference.loop for case, reference in pairs),
                spread(case.cpu for case in cases),
                spread(case.cpu / reference.cpu for case, reference in pairs),
                spread(case.memory / GB for case in cases),
            ]
        )
    return rows


def spread(values: Iterable[float]) -> str:
    """Return the median, the smallest and the largest of some values."""
    found = sorted(values)
    shown = f"{statistics.median(found):.3g}"
    return shown if len(found) == 1 else f"{shown} ({found[0]:.3g}–{found[-1]:.3g})"


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure how long training waits for a save.")
    add = parser.add_argument
    add("--before", type=Path, help="a checkout of the build to compare with")
    add("--model", default="tiny-gpt2", help="GPT-2 of any size, or its folder (default: embedded)")
    add("--dataset", default="pydocs", help="of the run (default: pydocs)")
    add("--strategies", default=",".join(STRATEGIES), type=lambda text: text.split(","))
    add("--rounds", type=int, default=3)
    add("--precision", choices=("fp32", "bf16"), default="bf16")
    for name, default in (("seq_length", 256), ("batch_size", 4), ("max_steps", 9)):
        add(f"--{name}", type=int, default=default)
    add("--save_every", type=int, default=2)
    add("--folder", help="for the runs, on the disk to measure (default: TMPDIR)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
