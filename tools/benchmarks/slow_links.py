#!/usr/bin/env python3
"""Measure steps over slow links next to what plan_memory.py --bandwidth forecasts; needs root.

    python -m tools.benchmarks.slow_links --model FOLDER --links 1000
    python -m tools.benchmarks.slow_links --model FOLDER --links 100

With GPT-2 and one core for each rank these take about 5 and 10 minutes.

Two network namespaces are joined by a cable (veth) whose ends tc's token bucket filter limits.
One process trains in each, on a core of its own (with one core, both share it). For each link:

- --check measures the bandwidth of all-reduce.
- The script trains with each accumulation, on both ranks. The measured time is the mean of the
  steps without the warm-up, which is the first of the default 4.

Once for each accumulation it trains on one rank, whose rate plan_memory.py gets with --results.
Weights are random and the text is that of pydocs: the model folder needs a config.json and a
tokenizer only. --reduce_dtype passes the flag to runs and plans; "default" leaves it out.

Namespaces, cable and processes end with the program, also after Ctrl+C or SIGTERM.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from distributed_training.hardware import cpu_fact
from distributed_training.ranks.tuning import available_cores
from distributed_training.text_tables import text_table
from tools.benchmarks.runner import PROJECT, SCRIPT

PLAN = PROJECT / "scripts" / "plan_memory.py"
NETWORK = "10.213.77"  # of the addresses in the namespaces, which nothing else sees
BURST = "256kb"  # that the filter sends at once
NO_EXTRAS = ["--no_eval", "--no_export", "--no_save"]


class Measured(NamedTuple):
    """A run over a link, and its forecast; times in seconds."""

    link: int  # Mbit/s
    reduce_dtype: str
    accumulation: int
    bandwidth: float  # GB/s, as --check reports it
    alone: float  # a step of one rank
    forecast: float
    measured: float


# ------------------------------------------------------------------------------------------- hosts


class Hosts:
    """Two network namespaces, each held by a process that sleeps in it, and a cable between."""

    def __init__(self) -> None:
        self.holders: list[subprocess.Popen] = []

    def __enter__(self) -> "Hosts":
        try:
            for name in ("node1", "node2"):
                setup = f"hostname {name} && echo && exec sleep infinity"
                holder = subprocess.Popen(
                    ["unshare", "--net", "--uts", "sh", "-c", setup], stdout=subprocess.PIPE
                )
                self.holders.append(holder)
                if not (holder.stdout and holder.stdout.readline()):
                    raise RuntimeError("namespaces cannot be created: run as root")
            ends = [f"eth0 netns {holder.pid}" for holder in self.holders]
            run(f"ip link add {ends[0]} type veth peer name {ends[1]}".split())
            for rank in (0, 1):
                self.enter(rank, f"ip addr add {NETWORK}.{rank + 1}/24 dev eth0")
                self.enter(rank, "ip link set eth0 up")
                self.enter(rank, "ip link set lo up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        for holder in self.holders:  # the last process of a namespace removes its end of the cable
            end(holder)

    def on(self, rank: int, command: list[str]) -> list[str]:
        """Return the command that runs a command on a host."""
        return ["nsenter", f"--target={self.holders[rank].pid}", "--net", "--uts", *command]

    def enter(self, rank: int, command: str) -> None:
        """Run a command on a host."""
        run(self.on(rank, command.split()))

    @contextlib.contextmanager
    def limited(self, mbit: int) -> Iterator[None]:
        """Limit both directions of the cable to a rate in Mbit/s."""
        for rank in (0, 1):
            limit = f"tbf rate {mbit}mbit burst {BURST} latency 300ms"
            self.enter(rank, f"tc qdisc replace dev eth0 root {limit}")
        yield


def run(command: list[str]) -> str:
    """Run a command, and return its standard output.

    Raises:
        RuntimeError: it failed; its output is in the message.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def end(process: subprocess.Popen) -> None:
    """End a process, if it has not ended."""
    process.kill()
    process.wait()


def on_ranks(hosts: Hosts, ranks: int, args: list[str]) -> str:
    """Run the script with one rank on each of the first hosts; return the output of rank 0.

    Raises:
        RuntimeError: a rank failed; its output is in the message.
    """
    cores = sorted(os.sched_getaffinity(0))
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": f"{NETWORK}.1", "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "eth0", "LOCAL_WORLD_SIZE": 1}
    processes, logs = [], []
    with contextlib.ExitStack() as stack:
        for rank in range(ranks):
            own = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0}
            env = os.environ | {name: str(value) for name, value in (shared | own).items()}
            core = ["taskset", "-c", str(cores[rank % len(cores)])]
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                hosts.on(rank, [*core, sys.executable, str(SCRIPT), *args]),
                stdout=log,
                stderr=log,
                env=env,
                cwd=PROJECT,
            )
            stack.callback(end, process)
            processes.append(process)
            logs.append(log)
        codes = [process.wait() for process in processes]
        outputs = []
        for log in logs:
            log.seek(0)
            outputs.append(log.read())
        if any(codes):
            raise RuntimeError("a rank failed:\n" + "\n".join(output[-3000:] for output in outputs))
        return outputs[0]


# ------------------------------------------------------------------------------------ measurements


def check_bandwidth(hosts: Hosts) -> float:
    """Return the GB/s of all-reduce between the two hosts, as --check measures it."""
    found = re.search(r"all-reduce ([\d.e-]+)", on_ranks(hosts, 2, ["--check"]))
    if not found:
        raise RuntimeError("--check reported no bandwidth of all-reduce")
    return float(found[1])


def step_seconds(folder: Path) -> float:
    """Return the mean time of a step of a run, without its first; the planner's rate is a mean."""
    results = json.loads((folder / "results.json").read_text())
    return results["global_batch_size"] / results["samples_per_second"]


def forecast(run_file: Path, alone: Path, bandwidth: float) -> float:
    """Return the seconds of a step on two ranks as plan_memory.py forecasts them."""
    words = ["--config", str(run_file), "--gpus", "2", "--results", str(alone), "--json"]
    words += ["--max_steps", "1000", "--bandwidth", str(bandwidth), "--precision", "fp32"]
    return 3.6 * json.loads(run([sys.executable, str(PLAN), *words]))["cost"]["hours"]


def write_run_file(path: Path, args: argparse.Namespace, accumulation: int, dtype: str) -> None:
    """Write the run file of a training."""
    values = {"model": args.model, "strategy": args.strategy, "precision": "fp32"}
    values |= {"from_scratch": True, "dataset": "pydocs", "seq_length": args.seq_length}
    values |= {"batch_size": 1, "gradient_accumulation_steps": accumulation}
    values |= {"max_steps": args.steps}
    if dtype != "default":
        values["reduce_dtype"] = dtype
    path.write_text(json.dumps(values))  # which is YAML


def measure(args: argparse.Namespace, folder: Path) -> Iterator[Measured]:
    """Yield the runs, in their order."""
    with Hosts() as hosts:
        cases = list(itertools.product(args.reduce_dtype, args.accumulation))
        for dtype, accumulation in cases:
            write_run_file(folder / f"{dtype}-{accumulation}.yaml", args, accumulation, dtype)
        for dtype, accumulation in cases:
            train(hosts, 1, folder, f"{dtype}-{accumulation}", "alone")
        for link in args.links:
            with hosts.limited(link):
                bandwidth = check_bandwidth(hosts)
                for dtype, accumulation in cases:
                    case = f"{dtype}-{accumulation}"
                    measured = train(hosts, 2, folder, case, str(link))
                    alone = folder / f"{case}-alone"
                    expected = forecast(folder / f"{case}.yaml", alone, bandwidth)
                    times = step_seconds(alone), expected, measured
                    yield Measured(link, dtype, accumulation, bandwidth, *times)


def train(hosts: Hosts, ranks: int, folder: Path, case: str, kind: str) -> float:
    """Train a case, and return the mean time of a step."""
    out = folder / f"{case}-{kind}"
    words = ["--config", str(folder / f"{case}.yaml"), "--output_dir", str(out), *NO_EXTRAS]
    on_ranks(hosts, ranks, words)
    return step_seconds(out)


# --------------------------------------------------------------------------------------- program


def table(rows: list[Measured]) -> str:
    """Return the table of all runs."""
    heads = "Mbit/s,reduced in,micro-batches,GB/s,one rank s,forecast s,measured s,forecast is"
    cells = [
        (
            f"{row.link}",
            row.reduce_dtype,
            f"{row.accumulation}",
            f"{row.bandwidth:.4g}",
            f"{row.alone:.2f}",
            f"{row.forecast:.2f}",
            f"{row.measured:.2f}",
            f"{row.forecast / row.measured - 1:+.0%}",
        )
        for row in rows
    ]
    return text_table(cells, heads.split(","))


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("slow_links", description=__doc__, formatter_class=raw)

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    add = parser.add_argument
    add("--model", default="gpt2", help="name or folder (default: %(default)s)")
    add("--strategy", default="dp", help="(default: %(default)s)")
    add("--links", type=numbers, default=[1000, 100], help="Mbit/s (default: 1000,100)")
    add("--accumulation", type=numbers, default=[1, 4, 16], help="(default: 1,4,16)")
    add("--reduce_dtype", type=lambda text: text.split(","), default=["default"])
    add("--seq_length", type=int, default=8, help="tokens (default: %(default)s)")
    add("--steps", type=int, default=4, help="optimizer steps of a run (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 4:
        parser.error("--steps needs 4 or more: of fewer a run excludes no warm-up")
    return args


def main(argv: list[str]) -> int:
    """Measure all cases, and print a line about each and the table."""
    args, rows, begin = parse(argv), list[Measured](), time.monotonic()
    args.model = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # a run that is killed leaves its files there
        for row in measure(args, Path(folder)):
            rows.append(row)
            at = f"{row.link} Mbit/s, {row.reduce_dtype}, {row.accumulation} micro-batches"
            print(f"{at}: {row.measured:.2f} s, forecast {row.forecast:.2f} s", flush=True)
    print(
        f"\n`python -m tools.benchmarks.slow_links {' '.join(argv)}`, {date.today()}; CPU cores: "
        f"{available_cores()}, {cpu_fact('model name')}; python {platform.python_version()}, "
        f"torch {version('torch')}; {(time.monotonic() - begin) / 60:.0f} min\n\n{table(rows)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
