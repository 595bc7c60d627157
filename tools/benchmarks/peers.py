#!/usr/bin/env python3
"""Measure this project next to transformers.Trainer and accelerate, on the same work.

    make bench                                             # a round of all cases (28 min in fp32)
    make bench BENCH=--keep                                # add a round to the earlier ones
    make bench BENCH="--cases one,compiled --rounds 3 --steps 23"     # also draws the figure
    make bench GPU=1                                       # a round of all cases for a GPU
    python -m tools.benchmarks.peers --list                      # what each case compares
    python -m tools.benchmarks.peers --cases one --only ours     # one program of one case

The work is GPT-2 124M with random weights, the same sequences for all, AdamW, clipping to 1 and the
case's dropout. A program prints a line after an optimizer step, and this process, the only clock,
notes when the line arrives. The programs of a case take turns (rounds). All measurements go to
<out>/measurements.json, and the tables to standard output. With --write, which `make bench` gives,
they also go to a section of RESULTS.md. The figure in docs/ shows this project and the
Trainer, eager and compiled; it is drawn only from at least 3 rounds of at least 20 measured steps.

Of a run the speed is that of its median step, without the first steps and the last. Over the
rounds, the table has the median and, in parentheses, the smallest and the largest value. A ratio is
formed within a round, whose runs follow each other, and then the median of the ratios is taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from distributed_training.hardware import cpu_computes_bf16
from distributed_training.known_models import CONFIGS, EMBEDDED_MODEL
from distributed_training.text_tables import replace_section
from distributed_training.units import GB
from tools.benchmarks import corpus
from tools.benchmarks.runner import PROJECT, SCRIPT, TORCHRUN, end_families

DRIVERS = PROJECT / "tools" / "benchmarks" / "drivers.py"
RESULTS = PROJECT / "tools" / "benchmarks" / "RESULTS.md"
FIGURE = PROJECT / "docs" / "benchmark.png"
RUN_SECONDS = 400  # time limit of one run
# Lines of a program: after a step (this project counts batches from 0), and at the end.
OUR_STEP = re.compile(r"\| Batch (\d+)/\d+ \| Loss: (\S+)")
THEIR_STEP = re.compile(r"^step (\d+) loss (\S+)")
PEAK = re.compile(r"^peak_bytes (\d+)")
COLORS = {"ours": "#0072B2", "Trainer": "#D55E00"}
FIRST_STEPS = {True: 10, False: 2}  # that are left out: on a GPU, and on a CPU
FIGURE_ROUNDS, FIGURE_STEPS = 3, 20  # rounds of a bar, and measured steps of each, at least


# --------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Setting:
    """The work of a case, equal for all its programs."""

    precision: str = "fp32"
    dropout: float = 0.1
    batch_size: int = 4  # sequences of a rank in a step
    seq_length: int = 256
    ranks: int = 1  # more than one process are started by torchrun
    compile: bool = False
    logging_steps: int = 1  # steps between two lines; on a GPU the host waits for each line
    model: str = "gpt2"  # or "tiny-gpt2", for tests
    gpu: bool = False  # run on the first GPU; otherwise GPUs are hidden


@dataclass(frozen=True)
class Case:
    """A comparison."""

    title: str  # of its table
    setting: Setting
    programs: tuple[str, ...]  # in the order of the runs of a round
    reference: str = "Trainer"  # the program that the others are compared with


# The flags of each program; "ours" is this project, the others are drivers.py.
STRATEGIES = ("zero1", "zero2", "offload", "zero3", "fsdp")
PROGRAMS = {
    "ours": ["--strategy", "dp"],
    **{f"ours {name}": ["--strategy", name] for name in STRATEGIES},
    "Trainer": ["trainer"],
    "accelerate": ["accelerate"],
    "accelerate FSDP": ["accelerate", "--fsdp"],
}
PEERS = ("ours", "Trainer", "accelerate")
OURS = ("ours", *(f"ours {name}" for name in STRATEGIES))
GPU = Setting("bf16", 0.0, 32, 1024, logging_steps=10, gpu=True)
GPU_4 = replace(GPU, batch_size=4)
GPU_CASES = {
    "eager": Case("One GPU, bf16, 32 sequences, eager", GPU, PEERS),
    "compiled": Case("One GPU, bf16, 32 sequences, compiled", replace(GPU, compile=True), PEERS),
    "eager-4": Case("One GPU, bf16, 4 sequences, eager", GPU_4, PEERS),
    "compiled-4": Case("One GPU, bf16, 4 sequences, compiled", replace(GPU_4, compile=True), PEERS),
    "strategies": Case("One GPU, bf16, strategies", GPU, OURS, "ours"),
}


def cpu_cases(precision: str) -> dict[str, Case]:
    """Return the cases for a CPU, by name."""
    one, two = Setting(precision), Setting(precision, ranks=2)
    no_dropout, pair = replace(one, dropout=0.0), PEERS[:2]
    alone, both = f"One process, {precision}", f"Two processes, {precision}"
    fsdp = ("ours fsdp", "accelerate FSDP")
    return {
        "one": Case(f"{alone}, dropout 0.1", one, pair),
        "compiled": Case(f"{alone}, dropout 0.1, compiled", replace(one, compile=True), pair),
        "no-dropout": Case(f"{alone}, no dropout", no_dropout, pair),
        "compiled-no-dropout": Case(
            f"{alone}, no dropout, compiled", replace(no_dropout, compile=True), pair
        ),
        "ddp": Case(f"{both}, DDP", two, PEERS),
        "fsdp": Case(f"{both}, FSDP", two, fsdp, "accelerate FSDP"),
        "strategies": Case(f"{both}, strategies", two, OURS, "ours"),
    }


@dataclass
class Run:
    """What was measured of one run."""

    setting: Setting
    program: str
    round: int  # from 1
    # (step, seconds since the start of the process) of each line. On a GPU this project prints all
    # lines but the last while the next step runs, so the first one comes up to a step later.
    stamps: list[tuple[int, float]]
    losses: list[float]  # of the same steps
    memory: int = 0  # peak in bytes: of the GPU if it used one, else resident, of all ranks
    # MFU for one token per second, as this project computes it; None for other programs.
    mfu_per_rate: float | None = None

    def intervals(self, skip: int) -> list[tuple[int, float]]:
        """Return (steps, seconds) between two lines, without the first `skip` steps and the last.

        On a CPU this project counts all tensors in its last step.
        """
        return [
            (step - previous, after - before)
            for (previous, before), (step, after) in itertools.pairwise(self.stamps[:-1])
            if previous >= skip
        ]

    def speed(self, skip: int) -> float:
        """Return the tokens per second of the median step of `intervals`.

        Where only some steps are logged, a step's time is the mean of those between two lines.
        """
        seconds = [time / steps for steps, time in self.intervals(skip)]
        work = self.setting
        return work.ranks * work.batch_size * work.seq_length / statistics.median(seconds)


# ------------------------------------------------------------------------------------- measurements


def measure(
    setting: Setting, program: str, number: int, out: Path, data: Path, steps: int
) -> tuple[Run, dict]:
    """Run a program once.

    Args:
        number: of the round.
        out: folder of the log and of the run, whose output stays there until the next one.
        data, steps: as for `command_of`.
    Returns:
        The run, and the results.json of this project, which is empty for other programs.
    Raises:
        RuntimeError: it failed, or exceeded the time limit; the message ends with its output.
    """
    folder, log = out / "run", out / "log.txt"
    shutil.rmtree(folder, ignore_errors=True)
    command, env = command_of(setting, program, out, data, steps), environment(setting)
    run, results = Run(setting, program, number, [], []), {}
    with open(log, "w", encoding="utf-8") as errors:
        code = watch(command, env, errors, run)
    if code or len(run.stamps) < 3:
        raise RuntimeError(f"{program}: {log.read_text(errors='replace')[-2000:]}")
    if program.startswith("ours"):
        results = json.loads((folder / "results.json").read_text())
        memory = results["memory"]
        on_gpu = results["device"] == "cuda"
        run.memory = max(memory["peak_bytes"]) if on_gpu else sum(memory["host_peak_bytes"])
        if results["mfu"]:
            run.mfu_per_rate = results["mfu"] / results["tokens_per_second"]
    return run, results


def watch(command: list[str], env: dict, errors, run: Run) -> int:
    """Start a command, add its lines to `run` when they arrive, and return its exit code."""
    pattern, first = (OUR_STEP, 0) if run.program.startswith("ours") else (THEIR_STEP, 1)
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=PROJECT
    )
    limit = threading.Timer(RUN_SECONDS, end_families, [[process]])
    limit.start()
    try:
        for line in process.stdout:
            now = time.perf_counter() - started
            if match := pattern.search(line):
                run.stamps.append((int(match[1]) + 1 - first, now))
                run.losses.append(float(match[2]))
            elif match := PEAK.match(line):
                run.memory = int(match[1])
            errors.write(line)
        return process.wait()
    finally:  # also after Ctrl-C and SIGTERM: the ranks must not outlive this process
        limit.cancel()
        if process.poll() is None:
            end_families([process])


def command_of(setting: Setting, program: str, out: Path, data: Path, steps: int) -> list[str]:
    """Return the command line of a program, whose data is prepared if it is missing.

    Args:
        out: folder of the run.
        data: folder of text and tokens, by model and length of the sequences.
        steps: optimizer steps of the run.
    """
    data = data / f"{setting.model}-{setting.seq_length}"
    count = steps * setting.ranks * setting.batch_size
    corpus.prepare(data, setting.model, count, setting.seq_length)
    words = f"--batch_size {setting.batch_size} --max_steps {steps}"
    words += f" --logging_steps {setting.logging_steps} --precision {setting.precision}"
    words += " --lr 5e-4 --weight_decay 0.01 --max_grad_norm 1.0"
    flags = [*PROGRAMS[program], *words.split(), *(["--compile"] if setting.compile else [])]
    if program.startswith("ours"):
        flags += [*our_flags(setting, count), *corpus.flags_of(data)]
        flags += ["--output_dir", str(out / "run")]
    else:
        config = out / "config.json"
        config.write_text(json.dumps(model_config(setting)))
        flags += ["--config", str(config), "--data", str(data / "sequences.npy")]
    launcher = [*TORCHRUN, f"--nproc_per_node={setting.ranks}"]
    launcher = launcher if setting.ranks > 1 else [sys.executable]
    return [*launcher, str(SCRIPT if program.startswith("ours") else DRIVERS), *flags]


def our_flags(setting: Setting, count: int) -> list[str]:
    """Return this project's flags of the model, and of the number of sequences."""
    flags = f"--model {setting.model} --from_scratch --dropout {setting.dropout} --no_eval"
    return f"{flags} --seq_length {setting.seq_length} --no_export --num_samples {count}".split()


def environment(setting: Setting) -> dict[str, str]:
    """Return the environment variables, which are equal for all programs."""
    cores = len(os.sched_getaffinity(0))
    # The Trainer would use all visible GPUs.
    first_gpu = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # torchrun would give each rank one thread.
        "OMP_NUM_THREADS": str(max(1, cores // setting.ranks)),
        "CUDA_VISIBLE_DEVICES": first_gpu if setting.gpu else "",
    }


def model_config(setting: Setting) -> dict:
    """Return the configuration of the model as transformers' GPT2Config reads it."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), setting.dropout)
    return {**CONFIGS[setting.model], "use_cache": False, **dropout}


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


def schedule(cases: Iterable[Case], only: list[str]) -> list[tuple[Setting, str]]:
    """Return the runs of a round: each program once per setting, in the order of the cases."""
    runs = [(case.setting, program) for case in cases for program in case.programs]
    return [run for run in dict.fromkeys(runs) if not only or run[1] in only]


# ------------------------------------------------------------------------------ tables and figure


class Spread(NamedTuple):
    """Median, smallest and largest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of values, at least one."""
        values = sorted(values)
        return cls(statistics.median(values), values[0], values[-1])

    def text(self, form: str) -> str:
        """Format the three numbers, for instance with ".2f"; a single measurement has no range."""
        spread = "" if self.low == self.high else f" ({self.low:{form}}–{self.high:{form}})"
        return f"{self.median:{form}}{spread}"


class Row(NamedTuple):
    """A program's line of a table; ratios to the reference, None without a round in common."""

    program: str
    rounds: int
    speed: Spread  # tokens per second of all ranks
    memory: Spread  # see Run.memory
    start: Spread  # seconds from the start of the process to the first line after a step
    ratios: list[Spread | None]  # of speed, memory and start
    mfu: float | None  # model FLOPs utilization


def rows_of(case: Case, runs: list[Run], skip: int) -> list[Row]:
    """Return the rows of a case's table, for the programs with measurements.

    Args:
        runs: of all cases.
        skip: number of first steps that are left out.
    """
    values: dict[str, dict[int, tuple[float, ...]]] = {program: {} for program in case.programs}
    for run in runs:
        if run.setting == case.setting and run.program in values:
            measured = (run.speed(skip), run.memory, run.stamps[0][1])
            values[run.program][run.round] = measured
    reference = values[case.reference]
    mfu_per_rate = next((run.mfu_per_rate for run in runs if run.mfu_per_rate), None)
    rows = []
    for program, of in values.items():
        if not of:
            continue
        spreads = [Spread.of(column) for column in zip(*of.values(), strict=True)]
        ratios: list[Spread | None] = [None] * 3
        if common := of.keys() & reference.keys():
            ratios = [Spread.of(of[n][i] / reference[n][i] for n in common) for i in range(3)]
        mfu = spreads[0].median * mfu_per_rate if mfu_per_rate else None
        rows.append(Row(program, len(of), *spreads, ratios, mfu))
    return rows


Tables = list[tuple[Case, list[Row]]]


def table(tables: Tables) -> list[str]:
    """Return the lines of a Markdown table of all cases; the reference of a case has ratio 1."""
    on_gpu = any(row.mfu for _, rows in tables for row in rows)
    memory = "peak GPU memory, GB" if on_gpu else "peak resident memory, GB"
    heads = ["case", "program", "rounds", "tokens/s", "relative", *(["MFU"] if on_gpu else [])]
    heads += [memory, "relative", "first step after, s", "relative"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, rows in tables:
        work = case.setting
        title = f"{case.title} ({work.batch_size} × {work.seq_length} tokens)"
        for row in rows:
            speed, *medians = (ratio.text(".2f") if ratio else "—" for ratio in row.ratios)
            in_memory, start = (median.partition(" ")[0] for median in medians)
            cells = [title, row.program, str(row.rounds), row.speed.text(".0f"), speed]
            cells += [f"{row.mfu:.1%}" if row.mfu else "—"] if on_gpu else []
            cells += [f"{row.memory.median / GB:.2f}", in_memory]
            cells += [f"{row.start.median:.1f}", start]
            lines.append(f"| {' | '.join(cells)} |")
            title = ""
    return lines


def provenance(facts: dict, command: str, runs: list[Run], skip: int) -> str:
    """Return a paragraph with the command, the hardware, the versions and the date."""
    steps = " or ".join(str(number) for number in sorted({run.stamps[-1][0] for run in runs}))
    machine = facts["hardware"]
    names = ("python", "torch", "cuda", "transformers", "accelerate", "deepspeed")
    versions = [f"{name} {facts['versions'][name]}" for name in names if name in facts["versions"]]
    return (
        f"`{command}`, {facts['started_at'][:10]}; "
        f"CPU cores: {machine['cores']}, {machine['cpu']}; "
        f"{machine['ram_bytes'] / GB:.0f} GB of memory, {machine['gpu'] or 'no GPU'}; "
        f"{', '.join(versions)}. "
        f"Each run has {steps} steps, of which the first {skip} and the last are left out."
    )


def long_runs(runs: list[Run], skip: int) -> list[Run]:
    """Return the runs with at least FIGURE_STEPS measured steps."""
    return [run for run in runs if sum(n for n, _ in run.intervals(skip)) >= FIGURE_STEPS]


def figure_rows(cases: dict[str, Case], runs: list[Run], skip: int) -> list[Row]:
    """Return the figure's rows, or [] if a program has too few rounds.

    Args:
        cases: all cases; the first two are this project and the Trainer, eager and compiled.
        runs: those of `long_runs`.
        skip: as in `rows_of`.
    """
    rows = []
    for case, end in zip([*cases.values()][:2], ("", ", compiled"), strict=True):
        of_case = [row for row in rows_of(case, runs, skip) if row.program in COLORS]
        rows += [row._replace(program=row.program + end) for row in of_case]
    return rows if len(rows) == 4 and all(row.rounds >= FIGURE_ROUNDS for row in rows) else []


def draw(rows: list[Row], path: Path, work: Setting, caption: str) -> None:
    """Draw the speed, with its range over the rounds, and the peak memory of each row as bars."""
    from matplotlib.figure import Figure

    rows = rows[::-1]  # the first row is the top bar
    figure = Figure(figsize=(11, 3), layout="constrained")
    step = f"{work.batch_size} × {work.seq_length} tokens a step"
    title = f"{work.model}, {work.precision}, {step}, dropout {work.dropout}"
    figure.suptitle(title, fontsize=11)
    speed, memory = figure.subplots(1, 2, sharey=True)
    names = [row.program for row in rows]
    colors = [COLORS[name.split(",")[0]] for name in names]
    speeds = [row.speed for row in rows]
    spread = [[s.median - s.low for s in speeds], [s.high - s.median for s in speeds]]
    gigabytes = [row.memory.median / GB for row in rows]
    speed.barh(names, [s.median for s in speeds], color=colors, xerr=spread, capsize=3)
    memory.barh(names, gigabytes, color=colors)
    for bar, row in enumerate(rows):
        speed.text(row.speed.median / 50, bar, row.speed.text(".0f"), va="center", color="white")
        memory.text(gigabytes[bar] / 50, bar, f"{gigabytes[bar]:.2f}", va="center", color="white")
    for axes, label in (
        (speed, "tokens/s (more is better)"),
        (memory, "peak memory, GB (less is better)"),
    ):
        axes.set_xlabel(label, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("\n".join(textwrap.wrap(caption, 150)), fontsize=7, color="#555555")
    figure.savefig(path, dpi=110)


# ----------------------------------------------------------------------------------------- program


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `cases` becomes a dictionary of the selected ones."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("peers", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--gpu", action="store_true", help="the cases for a GPU")
    add("--cases", help="names with commas between (default: all)")
    add("--only", default="", help="programs, with commas between (default: all of each case)")
    add("--list", action="store_true", help="print the cases and exit")
    add(
        "--precision",
        choices=["fp32", "bf16"],
        help="of a CPU (default: bf16 if it has the instructions)",
    )
    add("--rounds", type=int, default=1, help="(default: %(default)s)")
    add("--steps", type=int, help="optimizer steps of a run (default: 6; 40 on a GPU)")
    add("--skip", type=int, help="first steps to leave out (default: 2; 10 on a GPU)")
    add("--keep", action="store_true", help="keep earlier measurements, and add to them")
    add("--batch_size", type=int, help="sequences of a rank (default: those of the case)")
    add("--model", choices=["gpt2", EMBEDDED_MODEL], default="gpt2", help="(default: gpt2)")
    add("--out", type=Path, default=PROJECT / "runs" / "bench", help="(default: runs/bench)")
    add("--data", type=Path, help="folder of text and tokens (default: data/ in --out)")
    add("--write", action="store_true", help="write tools/benchmarks/RESULTS.md and the figure")
    args = parser.parse_args(argv)
    # Without bf16 instructions PyTorch emulates bf16, and only the emulation would be measured.
    precision = args.precision or ("bf16" if cpu_computes_bf16() else "fp32")
    changes = {"model": args.model}
    if args.batch_size:
        changes["batch_size"] = args.batch_size
    args.all_cases = {
        name: replace(case, setting=replace(case.setting, **changes))
        for name, case in (GPU_CASES if args.gpu else cpu_cases(precision)).items()
    }
    names = args.cases.split(",") if args.cases else [*args.all_cases]
    args.only = [name for name in args.only.split(",") if name]
    unknown = [name for name in names if name not in args.all_cases]
    unknown += [name for name in args.only if name not in PROGRAMS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    if args.gpu and args.precision:
        parser.error("--precision is for the cases of a CPU: those of a GPU are in bf16")
    args.command = "make bench GPU=1" if args.gpu else "make bench"
    if options := [word for word in argv if word not in ("--gpu", "--write")]:
        args.command += f' BENCH="{" ".join(options)}"'
    args.cases = {name: args.all_cases[name] for name in names}
    args.steps = args.steps or (40 if args.gpu else 6)
    args.skip = FIRST_STEPS[args.gpu] if args.skip is None else args.skip
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
    data = (args.data or out / "data").resolve()
    file = out / f"measurements{'-gpu' if args.gpu else ''}.json"
    runs, facts = load_runs(file) if args.keep else ([], {})
    if args.rounds:
        facts["commands"] = [*facts.get("commands", []), args.command]
    earlier, failures = max((run.round for run in runs), default=0), 0
    for number in range(earlier + 1, earlier + 1 + args.rounds):
        for setting, program in schedule(args.cases.values(), args.only):
            try:
                run, results = measure(setting, program, number, out, data, args.steps)
            except RuntimeError as error:
                failures += 1
                print(f"❌ {error}", flush=True)
                continue
            if results:
                facts |= {name: results[name] for name in ("hardware", "versions", "started_at")}
                facts["versions"]["accelerate"] = version("accelerate")
            runs.append(run)
            save_runs(file, runs, facts)
            print(describe(run), flush=True)
    tables = [(case, rows_of(case, runs, args.skip)) for case in args.all_cases.values()]
    # A case that was not asked for may share runs with another one: it needs a comparison to show.
    asked = args.cases.values()
    tables = [
        (case, rows)
        for case, rows in tables
        if rows and (case in asked or (len(rows) > 1 and rows[0].ratios[0]))
    ]
    lines = table(tables) if tables else []
    print("\n".join(lines))
    if args.write:
        settings = [case.setting for case, _ in tables]
        shown = [run for run in runs if run.setting in settings]
        write(lines, shown, facts, args)
    return 1 if failures else 0


def write(lines: list[str], runs: list[Run], facts: dict, args: argparse.Namespace) -> None:
    """Write the tables to RESULTS.md; draw the figure if there are enough long runs."""
    name = "bench GPU=1" if args.gpu else "bench"
    commands = "`, `".join(facts.get("commands", [args.command]))
    source = provenance(facts, commands, runs, args.skip)
    text = RESULTS.read_text(encoding="utf-8")
    text = replace_section(text, name, [source, "", *lines], by="make bench")
    RESULTS.write_text(text, encoding="utf-8")
    long = long_runs(runs, args.skip)
    if rows := figure_rows(args.all_cases, long, args.skip):
        [eager, *_] = args.all_cases.values()
        figure = FIGURE.with_stem(f"{FIGURE.stem}_gpu") if args.gpu else FIGURE
        caption = provenance(facts, commands, long, args.skip).replace("`", "")
        draw(rows, figure, eager.setting, caption)


def describe(run: Run) -> str:
    """Return a line about a run, for the console."""
    seconds = [time for _, time in run.stamps]
    steps = " ".join(f"{after - before:.2f}" for before, after in itertools.pairwise(seconds))
    return (
        f"round {run.round}, {run.program}: first step after {seconds[0]:.1f} s, then {steps} s; "
        f"peak {run.memory / GB:.2f} GB; loss {run.losses[0]:.2f} to {run.losses[-1]:.2f}"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped by SIGTERM."))
    sys.exit(main(sys.argv[1:]))
