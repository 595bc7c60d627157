"""The statistics, tables and figure of benchmarks/peers.py.

Of a run the speed is that of its median step, without the first steps and the last. Over the
rounds, the table has the median and, in parentheses, the smallest and the largest value. A ratio is
formed within a round, whose runs follow each other, and then the median of the ratios is taken.
"""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from support.units import GB

COLORS = {"ours": "#0072B2", "Trainer": "#D55E00", "accelerate": "#777777"}


@dataclass(frozen=True)
class Setting:
    """The work of a case, equal for all its programs."""

    precision: str = "fp32"
    dropout: float = 0.1
    batch_size: int = 4  # sequences of a rank in a step
    seq_length: int = 256
    ranks: int = 1  # more than one process are started by torchrun
    compile: bool = False
    logging_steps: int = 1  # steps between two lines; on a GPU each line waits for the device
    model: str = "gpt2"  # or "tiny-gpt2", for tests
    gpu: bool = False  # run on the first GPU; otherwise GPUs are hidden

    @property
    def tokens(self) -> int:
        """Tokens of a step on all ranks."""
        return self.ranks * self.batch_size * self.seq_length


@dataclass(frozen=True)
class Case:
    """A comparison."""

    title: str  # of its table
    setting: Setting
    programs: tuple[str, ...]  # in the order of the runs of a round
    reference: str = "Trainer"  # the program that the others are compared with


@dataclass
class Run:
    """What was measured of one run."""

    setting: Setting
    program: str
    round: int  # from 1
    stamps: list[tuple[int, float]]  # (step, seconds since the start of the process) of each line
    losses: list[float]  # of the same steps
    peak_rss: list[int]  # for each rank the kernel's peak of its resident memory (VmHWM), in bytes
    peak_gpu: int | None = None  # bytes of PyTorch's allocator, of rank 0
    # MFU for one token per second, as this project computes it; None for other programs.
    mfu_per_rate: float | None = None
    other_load: float = 0  # share of the machine's CPU time that other programs took meanwhile

    @property
    def memory(self) -> int:
        """Peak memory in bytes: of the GPU if it used one, else of all ranks."""
        return self.peak_gpu or sum(self.peak_rss)

    @property
    def start(self) -> float:
        """Seconds from the start of the process to the first line after a step."""
        return self.stamps[0][1]

    def speed(self, skip: int) -> float:
        """Return the tokens per second of the median step, without the first `skip` and the last.

        On a CPU this project counts all tensors in its last step. Where only some steps are logged,
        a step's time is the mean of those between two lines.
        """
        seconds = [
            (after - before) / (step - previous)
            for (previous, before), (step, after) in itertools.pairwise(self.stamps[:-1])
            if previous >= skip
        ]
        return self.setting.tokens / statistics.median(seconds)


@dataclass(frozen=True)
class Spread:
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
        if self.low == self.high:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.low:{form}}–{self.high:{form}})"


@dataclass(frozen=True)
class Row:
    """A program's line of a table; ratios to the reference, None without a round in common."""

    program: str
    speed: Spread  # tokens per second of all ranks
    speed_ratio: Spread | None
    memory: float  # see Run.memory
    memory_ratio: Spread | None
    start: float  # see Run.start
    start_ratio: Spread | None
    mfu: float | None  # model FLOPs utilization
    rounds: int


def rows_of(case: Case, runs: list[Run], skip: int) -> list[Row]:
    """Return the rows of a case's table, for the programs with measurements.

    Args:
        runs: of all cases.
        skip: number of first steps that are left out.
    """
    by_program = {
        program: {
            run.round: run for run in runs if (run.setting, run.program) == (case.setting, program)
        }
        for program in case.programs
    }
    reference = by_program.get(case.reference, {})
    mfu_per_rate = next((run.mfu_per_rate for run in runs if run.mfu_per_rate), None)
    values: tuple[Callable[[Run], float], ...] = (
        lambda run: run.speed(skip),
        lambda run: run.memory,
        lambda run: run.start,
    )
    rows = []
    for program, of in by_program.items():
        if not of:
            continue
        spreads = [Spread.of(map(value, of.values())) for value in values]
        common = of.keys() & reference.keys()
        ratios = [
            Spread.of(value(of[number]) / value(reference[number]) for number in common)
            if common
            else None
            for value in values
        ]
        speed, memory, start = spreads
        mfu = speed.median * mfu_per_rate if mfu_per_rate else None
        medians = (memory.median, ratios[1], start.median, ratios[2])
        rows.append(Row(program, speed, ratios[0], *medians, mfu, len(of)))
    return rows


# ------------------------------------------------------------------------------------------- report


def table(tables: list[tuple[Case, list[Row]]]) -> list[str]:
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
            spread = row.speed_ratio.text(".2f") if row.speed_ratio else "—"
            cells = [title, row.program, str(row.rounds), row.speed.text(".0f"), spread]
            cells += [f"{row.mfu:.1%}" if row.mfu else "—"] if on_gpu else []
            cells += [f"{row.memory / GB:.2f}", median_of(row.memory_ratio)]
            cells += [f"{row.start:.1f}", median_of(row.start_ratio)]
            lines.append(f"| {' | '.join(cells)} |")
            title = ""
    return lines


def versus(case: Case) -> str:
    """Return the name of a case's reference in tables and titles."""
    return "dp" if case.reference == "ours" else case.reference


def median_of(ratio: Spread | None) -> str:
    """Format the median of a ratio; a dash if there is none."""
    return f"{ratio.median:.2f}" if ratio else "—"


def provenance(facts: dict, command: str, steps: int, skip: int) -> str:
    """Return a paragraph with the command, the hardware, the versions and the date."""
    machine = facts["hardware"]
    versions = ", ".join(
        f"{name} {facts['versions'][name]}"
        for name in ("python", "torch", "cuda", "transformers", "accelerate", "deepspeed")
        if name in facts["versions"]
    )
    return (
        f"`{command}`, {facts['started_at'][:10]}; "
        f"CPU cores: {machine['cores']}, {machine['cpu']}; "
        f"{machine['ram_bytes'] / GB:.0f} GB of memory, {machine['gpu'] or 'no GPU'}; {versions}. "
        f"Each run has {steps} steps, of which the first {skip} and the last are left out."
    )


# ------------------------------------------------------------------------------------------- figure


def draw(tables: list[tuple[Case, list[Row]]], path: Path, caption: str) -> None:
    """Draw speed and memory of each program, relative to the case's reference, as bars.

    Args:
        tables: the cases and their rows.
        path: the .png file to write.
        caption: hardware and versions.
    """
    from matplotlib.figure import Figure

    heights = [len(rows) + 1.5 for _, rows in tables]
    figure = Figure(figsize=(11, 0.8 + 0.27 * sum(heights)), layout="constrained")
    axes = figure.subplots(
        len(tables), 2, sharey="row", squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for (case, rows), (speed, memory) in zip(tables, axes, strict=True):
        rows = [row for row in rows if row.speed_ratio][::-1]
        ratios = [row.speed_ratio for row in rows if row.speed_ratio]
        spread = [
            [ratio.median - ratio.low for ratio in ratios],
            [ratio.high - ratio.median for ratio in ratios],
        ]
        values = [ratio.median for ratio in ratios]
        bars(speed, rows, values, f"{case.title}: speed relative to {versus(case)}", xerr=spread)
        speed.axvline(1, color="#555555", linewidth=0.8)
        bars(memory, rows, [row.memory / GB for row in rows], "peak memory of all ranks, GB")
    figure.supxlabel("\n".join(textwrap.wrap(caption, 150)), fontsize=7, color="#555555")
    figure.savefig(path, dpi=110)


def bars(axes, rows: list[Row], values: list[float], title: str, **style) -> None:
    """Draw a horizontal bar for each row, with its value inside."""
    names = [row.program for row in rows]
    colors = [COLORS[name.split()[0]] for name in names]
    axes.barh(names, values, color=colors, capsize=3, **style)
    for bar, value in enumerate(values):
        axes.text(value / 50, bar, f"{value:.2f}", va="center", fontsize=8, color="white")
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
