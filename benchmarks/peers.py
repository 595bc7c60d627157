#!/usr/bin/env python3
"""Measure this project next to transformers.Trainer and accelerate, on the same work.

    make bench                                                    # all cases
    make bench GPU=1                                              # all cases for a GPU
    python -m benchmarks.peers --list                             # what each case compares
    python -m benchmarks.peers --cases one --rounds 1             # one case, one round
    python -m benchmarks.peers --cases one --rounds 1 --keep      # add a round to the earlier ones
    python -m benchmarks.peers --cases one --only ours --keep     # of this program only

The work is GPT-2 124M with random weights, the same sequences for all, AdamW, clipping to 1 and the
case's dropout. A program prints a line after an optimizer step, and this process, the only clock,
notes when the line arrives. The programs of a case take turns (rounds). The first steps and the
last step of each run are left out. This process also reads the memory of the ranks. All
measurements go to <out>/measurements.json, and the tables to standard output. With --write, which
`make bench` gives, they also go to a section of benchmarks/RESULTS.md, and the figure to docs/.
benchmarks/peers_report.py describes the statistics.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil

from benchmarks.bench import PROJECT, SCRIPT, TORCHRUN, end_family
from benchmarks.peers_report import Case, Row, Run, Setting, draw, provenance, rows_of, table
from support.cluster.devices import cpu_computes_bf16
from support.known_models import CONFIGS, EMBEDDED_MODEL
from support.text_tables import replace_section
from support.units import GB

DRIVERS = PROJECT / "benchmarks" / "drivers.py"
RESULTS = PROJECT / "benchmarks" / "RESULTS.md"
FIGURE = PROJECT / "docs" / "benchmark.png"
RUN_SECONDS = 400  # time limit of one run
MEMORY_INTERVAL = 0.5  # seconds between two looks at the ranks' memory
# Lines after a step: this project counts batches from 0.
OUR_STEP = re.compile(r"\| Batch (\d+)/\d+ \| Loss: (\S+)")
THEIR_STEP = re.compile(r"^step (\d+) loss (\S+)")
GPU_PEAK = re.compile(r"^peak_gpu_bytes (\d+)")


# --------------------------------------------------------------------------------- what is measured

# The flags of each program; "ours" is this project, the others are drivers.py.
PROGRAMS = {
    "ours": ["--strategy", "dp"],
    **{
        f"ours {name}": ["--strategy", name]
        for name in ("zero1", "zero2", "offload", "zero3", "fsdp")
    },
    "Trainer": ["trainer"],
    "accelerate": ["accelerate"],
    "accelerate FSDP": ["accelerate", "--fsdp"],
}
PEERS = ("ours", "Trainer", "accelerate")
OURS = ("ours", "ours zero1", "ours zero2", "ours offload", "ours zero3", "ours fsdp")
ONE = Setting()
COMPILED = Setting(compile=True)
TWO = Setting(ranks=2)
GPU = Setting("bf16", 0.0, 32, 1024, logging_steps=10, gpu=True)
GPU_4 = replace(GPU, batch_size=4)
CPU_CASES = {
    "one": Case("One process, fp32, dropout 0.1", ONE, PEERS[:2]),
    "no-dropout": Case("One process, fp32, no dropout", replace(ONE, dropout=0.0), PEERS[:2]),
    "compiled": Case("One process, fp32, dropout 0.1, --compile", COMPILED, PEERS[:2]),
    "compiled-no-dropout": Case(
        "One process, fp32, no dropout, --compile", replace(COMPILED, dropout=0.0), PEERS[:2]
    ),
    "ddp": Case("Two processes, fp32, DDP", TWO, PEERS),
    "fsdp": Case(
        "Two processes, fp32, FSDP", TWO, ("ours fsdp", "accelerate FSDP"), "accelerate FSDP"
    ),
    "strategies": Case("Two processes, fp32, strategies", TWO, OURS, "ours"),
}
# Without bf16 instructions PyTorch emulates bf16, and only the emulation would be measured.
BF16_CASES = {
    f"{name}-bf16": replace(
        case,
        title=case.title.replace("fp32", "bf16"),
        setting=replace(case.setting, precision="bf16"),
    )
    for name, case in CPU_CASES.items()
}
NO_BF16 = "bf16 is not measured: this CPU has no bf16 instructions, and PyTorch emulates them."
GPU_CASES = {
    "eager": Case("One GPU, bf16, 32 sequences, eager", GPU, PEERS),
    "compiled": Case("One GPU, bf16, 32 sequences, compiled", replace(GPU, compile=True), PEERS),
    "eager-4": Case("One GPU, bf16, 4 sequences, eager", GPU_4, PEERS),
    "compiled-4": Case("One GPU, bf16, 4 sequences, compiled", replace(GPU_4, compile=True), PEERS),
    "strategies": Case("One GPU, bf16, strategies", GPU, OURS, "ours"),
}


# ------------------------------------------------------------------------------------- measurements


class PeakMemory(threading.Thread):
    """A thread that reads the peak of the resident memory of each rank from /proc.

    The kernel keeps the peak (VmHWM), so that reading it now and then misses nothing but the last
    moments of a process.

    Args:
        pid: the process that was started: the only rank, or torchrun, whose children are the ranks.
        launched: whether it is torchrun.
    """

    def __init__(self, pid: int, launched: bool):
        super().__init__(daemon=True)
        self.root, self.launched = psutil.Process(pid), launched
        self.peaks: dict[int, int] = {}  # bytes by process
        self._ended = threading.Event()

    def run(self) -> None:
        """Read the peaks until `stop` is called."""
        while not self._ended.wait(MEMORY_INTERVAL):
            with contextlib.suppress(psutil.Error):
                ranks = self.root.children() if self.launched else [self.root]
                for rank in ranks:
                    self.peaks[rank.pid] = max(self.peaks.get(rank.pid, 0), peak_rss(rank.pid))

    def stop(self) -> list[int]:
        """Stop the thread and return the peaks."""
        self._ended.set()
        self.join()
        return list(self.peaks.values())


def peak_rss(pid: int) -> int:
    """Return a process's peak resident memory in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError):
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return 1024 * int(match[1]) if match else 0
    return 0


class Load:
    """The CPU time that programs other than this process's children take from now on."""

    def __init__(self):
        self.before = self._seconds()

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        """Return seconds since some moment: on the clock, busy on all cores, of the children."""
        times, children = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = sum(times[:8]) - times.idle - times.iowait  # without guests, which count as user
        return time.monotonic(), busy, children.ru_utime + children.ru_stime

    def of_others(self) -> float:
        """Return their share of all cores' time; call it after the children have ended."""
        seconds, busy, children = (
            now - before for now, before in zip(self._seconds(), self.before, strict=True)
        )
        return max(0.0, busy - children) / (seconds * psutil.cpu_count())


@dataclass
class Measurer:
    """Runs programs and measures them."""

    out: Path  # folder of logs, data and runs
    steps: int  # optimizer steps of a run
    # Hardware, versions and date of the last run of this project; the command of this call, and
    # those of the measurements that it keeps.
    facts: dict = field(default_factory=dict)

    def measure(self, setting: Setting, program: str, number: int) -> Run:
        """Run a program once.

        Raises:
            RuntimeError: it failed, or exceeded the time limit; the message ends with its output.
        """
        folder = self.out / "run"
        shutil.rmtree(folder, ignore_errors=True)
        command = self.command(setting, program, folder)
        env = {**os.environ, **environment(setting)}
        log = self.out / "log.txt"
        with open(log, "w", encoding="utf-8") as errors:
            run = self._watch(command, env, errors, Run(setting, program, number, [], [], []))
        if len(run.stamps) < 3:
            raise RuntimeError(f"{program}: {log.read_text(errors='replace')[-2000:]}")
        if program.startswith("ours"):
            results = json.loads((folder / "results.json").read_text())
            self.facts |= {name: results[name] for name in ("hardware", "versions", "started_at")}
            self.facts["versions"]["accelerate"] = version("accelerate")
            if results["device"] == "cuda":
                run.peak_gpu = max(results["memory"]["peak_bytes"])
            if results["mfu"]:
                run.mfu_per_rate = results["mfu"] / results["tokens_per_second"]
        shutil.rmtree(folder, ignore_errors=True)
        return run

    def command(self, setting: Setting, program: str, folder: Path) -> list[str]:
        """Return the command line of a program."""
        data = self.data(setting)
        flags = {
            "batch_size": setting.batch_size,
            "max_steps": self.steps,
            "logging_steps": setting.logging_steps,
            "precision": setting.precision,
            "lr": 5e-4,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        words += ["--compile"] if setting.compile else []
        if program.startswith("ours"):
            words = [str(SCRIPT), *PROGRAMS[program], *words, *self.our_flags(setting, data)]
            words += ["--output_dir", str(folder)]
        else:
            config, sequences = data / f"config-{setting.dropout}.json", data / "sequences.npy"
            config.write_text(json.dumps(model_config(setting)))
            words = [str(DRIVERS), *PROGRAMS[program], *words]
            words += ["--config", str(config), "--data", str(sequences)]
        launcher = [*TORCHRUN, f"--nproc_per_node={setting.ranks}"]
        return [*(launcher if setting.ranks > 1 else [sys.executable]), *words]

    def our_flags(self, setting: Setting, data: Path) -> list[str]:
        """Return the flags of the model and the data."""
        flags = f"--model {setting.model} --from_scratch --dropout {setting.dropout} --no_eval"
        flags += f" --seq_length {setting.seq_length} --no_export"
        files = ["--dataset", str(data / "corpus.txt"), "--cache_dir", str(data / "cache")]
        samples = self.steps * setting.ranks * setting.batch_size
        return [*flags.split(), *files, "--num_samples", str(samples)]

    def data(self, setting: Setting) -> Path:
        """Return a folder with the text, and its tokens as this project cuts them into sequences.

        The tokens are those of this project's cache, so that no program tokenizes.
        """
        count = self.steps * setting.ranks * setting.batch_size
        folder = self.out / "data" / f"{setting.model}-{count}x{setting.seq_length}"
        if (folder / "sequences.npy").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # 8 characters a token are more than any text has; one tenth is held out for validation.
        write_corpus(folder / "corpus.txt", 10 * count * setting.seq_length)
        command = [sys.executable, str(SCRIPT), *self.our_flags(setting, folder), "--prefetch"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, cwd=PROJECT)
        [tokens] = (folder / "cache").glob("*/train.bin")
        facts = json.loads((tokens.parent / "meta.json").read_text())["facts"]
        stream = np.fromfile(tokens, facts["splits"]["train"]["dtype"])[
            : count * setting.seq_length
        ]
        np.save(folder / "sequences.npy", stream.reshape(count, -1).astype(np.int64))
        return folder

    def _watch(self, command: list[str], env: dict, errors, run: Run) -> Run:
        """Start a command, note when its lines arrive, and return the completed measurement."""
        pattern, first = (OUR_STEP, 0) if run.program.startswith("ours") else (THEIR_STEP, 1)
        load = Load()
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=PROJECT
        )
        memory = PeakMemory(process.pid, launched=run.setting.ranks > 1)
        memory.start()
        limit = threading.Timer(RUN_SECONDS, end_family, [process])
        limit.start()
        try:
            for line in process.stdout:
                now = time.perf_counter() - started
                if match := pattern.search(line):
                    run.stamps.append((int(match[1]) + 1 - first, now))
                    run.losses.append(float(match[2]))
                elif match := GPU_PEAK.match(line):
                    run.peak_gpu = int(match[1])
                errors.write(line)
        except BaseException:  # also Ctrl-C and SIGTERM: the ranks must not outlive this process
            end_family(process)
            raise
        finally:
            limit.cancel()
            if process.wait() != 0:
                run.stamps.clear()
            run.peak_rss = memory.stop()
            run.other_load = load.of_others()
        return run


def environment(setting: Setting) -> dict[str, str]:
    """Return the environment variables that are equal for all programs."""
    cores = len(os.sched_getaffinity(0))
    # The Trainer would use all visible GPUs.
    first_gpu = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    return {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # torchrun would give each rank one thread.
        "OMP_NUM_THREADS": str(max(1, cores // setting.ranks)),
        "CUDA_VISIBLE_DEVICES": first_gpu if setting.gpu else "",
    }


def write_corpus(file: Path, characters: int) -> None:
    """Write the beginning of the text of Python's standard library to a file."""
    text: list[str] = []
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py")):
        if characters <= 0:
            break
        text.append(source.read_text(encoding="utf-8", errors="replace")[:characters])
        characters -= len(text[-1])
    file.write_text("\n".join(text), encoding="utf-8")


def model_config(setting: Setting) -> dict:
    """Return the configuration of the model as transformers' GPT2Config reads it."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), setting.dropout)
    return {**CONFIGS[setting.model], "use_cache": False, **dropout}


# ------------------------------------------------------------------------------------- measurements


def load_runs(file: Path) -> tuple[list[Run], dict]:
    """Read the measurements of earlier calls and their facts; empty if there are none."""
    if not file.exists():
        return [], {}
    content = json.loads(file.read_text(encoding="utf-8"))
    runs = [{**record, "setting": Setting(**record["setting"])} for record in content["runs"]]
    return [Run(**record) for record in runs], content["facts"]


def save_runs(file: Path, runs: list[Run], facts: dict) -> None:
    """Write the measurements, and the facts about the machine."""
    content = {"facts": facts, "runs": [asdict(run) for run in runs]}
    file.write_text(json.dumps(content), encoding="utf-8")


def schedule(cases: list[Case], only: list[str]) -> list[tuple[Setting, str]]:
    """Return the runs of a round: each program once per setting, in the order of the cases."""
    runs = [(case.setting, program) for case in cases for program in case.programs]
    return [run for run in dict.fromkeys(runs) if not only or run[1] in only]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `cases` becomes a dictionary of the selected ones."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("peers", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--gpu", action="store_true", help="the cases for a GPU")
    add("--cases", help="names with commas between (default: all)")
    add("--only", default="", help="programs, with commas between (default: all of each case)")
    add("--list", action="store_true", help="print the cases and exit")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--steps", type=int, help="optimizer steps of a run (default: 5; 40 on a GPU)")
    add("--skip", type=int, help="first steps to leave out (default: 2; 10 on a GPU)")
    add("--keep", action="store_true", help="keep earlier measurements, and add to them")
    add("--batch_size", type=int, help="sequences of a rank (default: those of the case)")
    add("--model", choices=["gpt2", EMBEDDED_MODEL], default="gpt2", help="(default: gpt2)")
    add("--out", type=Path, default=PROJECT / "runs" / "bench", help="(default: runs/bench)")
    add("--write", action="store_true", help="write benchmarks/RESULTS.md and the figure")
    args = parser.parse_args(argv)
    args.command = "make bench GPU=1" if args.gpu else "make bench"
    all_cases = GPU_CASES if args.gpu else CPU_CASES
    if not args.gpu and cpu_computes_bf16():
        all_cases = all_cases | BF16_CASES
    changes = {"model": args.model}
    if args.batch_size:
        changes["batch_size"] = args.batch_size
    args.all_cases = {
        name: replace(case, setting=replace(case.setting, **changes))
        for name, case in all_cases.items()
    }
    names = args.cases.split(",") if args.cases else [*all_cases]
    args.only = [name for name in args.only.split(",") if name]
    unknown = [name for name in names if name not in all_cases]
    unknown += [name for name in args.only if name not in PROGRAMS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    if options := [word for word in argv if word not in ("--gpu", "--write")]:
        args.command += f' BENCH="{" ".join(options)}"'
    args.cases = {name: args.all_cases[name] for name in names}
    args.steps = args.steps or (40 if args.gpu else 5)
    args.skip = (10 if args.gpu else 2) if args.skip is None else args.skip
    return args


def main(argv: list[str]) -> int:
    """Measure and report; the exit code is 1 if a run failed."""
    args = parse(argv)
    if args.list:
        for name, case in args.cases.items():
            print(f"{name:24} {case.title}: {', '.join(case.programs)}")
        return 0
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"measurements{'-gpu' if args.gpu else ''}.json"
    runs, facts = load_runs(file) if args.keep else ([], {})
    if args.rounds:
        unknown = ["earlier commands, unknown"] if runs else []
        facts["commands"] = [*facts.get("commands", unknown), args.command]
    measurer, failures = Measurer(out, args.steps, facts), 0
    earlier = max((run.round for run in runs), default=0)
    for number in range(earlier + 1, earlier + 1 + args.rounds):
        for setting, program in schedule(list(args.cases.values()), args.only):
            try:
                run = measurer.measure(setting, program, number)
            except RuntimeError as error:
                failures += 1
                print(f"❌ {error}", flush=True)
                continue
            runs.append(run)
            save_runs(file, runs, measurer.facts)
            print(describe(run), flush=True)
    tables = [(case, rows_of(case, runs, args.skip)) for case in args.all_cases.values()]
    measurer.facts["other_load"] = max((run.other_load for run in runs), default=0)
    # A case that was not asked for may share runs with another one, and lack its own reference.
    selected = args.cases.values()
    tables = [
        (case, rows)
        for case, rows in tables
        if any(row.speed_ratio or case in selected for row in rows)
    ]
    report(tables, measurer.facts, args)
    return 1 if failures else 0


def report(tables: list[tuple[Case, list[Row]]], facts: dict, args: argparse.Namespace) -> None:
    """Print the tables; with --write also write them, and draw the figure."""
    lines = [*table(tables), ""] if tables else []
    if not args.gpu and not cpu_computes_bf16():
        lines += [NO_BF16]
    print("\n".join(lines))
    if args.write:
        name = "bench GPU=1" if args.gpu else "bench"
        figure = FIGURE.with_stem(f"{FIGURE.stem}_gpu") if args.gpu else FIGURE
        commands = "`, `".join(facts.get("commands", [args.command]))
        source = provenance(facts, commands, args.steps, args.skip)
        source += f" Other programs took at most {facts['other_load']:.0%} of the CPU."
        text = RESULTS.read_text(encoding="utf-8")
        text = replace_section(text, name, [source, "", *lines], by="make bench")
        RESULTS.write_text(text, encoding="utf-8")
        in_bf16 = [(case, rows) for case, rows in tables if case.setting.precision == "bf16"]
        draw(in_bf16 or tables, figure, source.replace("`", ""))


def describe(run: Run) -> str:
    """Return a line about a run, for the console."""
    seconds = [time for _, time in run.stamps]
    steps = " ".join(f"{after - before:.2f}" for before, after in itertools.pairwise(seconds))
    return (
        f"round {run.round}, {run.program}: first step after {seconds[0]:.1f} s, then {steps} s; "
        f"peak {sum(run.peak_rss) / GB:.2f} GB; loss {run.losses[0]:.2f} to {run.losses[-1]:.2f}; "
        f"other programs took {run.other_load:.0%} of the CPU"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped by SIGTERM."))
    sys.exit(main(sys.argv[1:]))
