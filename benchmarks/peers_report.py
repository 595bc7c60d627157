"""The statistics, tables and figure of benchmarks/peers.py.

Of a run the speed is that of its median step, without the first steps and the last. Over the
rounds, the table has the median and, in parentheses, the smallest and the largest value. A ratio is
formed within a round, whose runs follow each other, and then the median of the ratios is taken.
"""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.units import GB

if TYPE_CHECKING:
    from benchmarks.peers import Case, Run

COLORS = {"ours": "#0072B2", "Trainer": "#D55E00", "accelerate": "#777777"}


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the spread of values; None if there are none."""
        values = sorted(values)
        return cls(statistics.median(values), values[0], values[-1]) if values else None

    def text(self, form: str) -> str:
        """Format the three numbers, for instance with ".2f"; a single measurement has no range."""
        if self.low == self.high:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.low:{form}}–{self.high:{form}})"


@dataclass(frozen=True)
class Row:
    """A program's line of a table.

    Attributes:
        speed: tokens per second of all ranks.
        speed_ratio, memory_ratio, start_ratio: relative to the reference; None for a program that
            has no round in common with it.
        memory: peak in bytes: on a GPU of PyTorch's allocator, else resident, sum over the ranks.
        start: seconds from the start of the process to the end of the first step.
        mfu: model FLOPs utilization; None if not known.
        rounds: number of its runs.
    """

    program: str
    speed: Spread
    speed_ratio: Spread | None
    memory: float
    memory_ratio: float | None
    start: float
    start_ratio: float | None
    mfu: float | None
    rounds: int


def tokens_per_second(run: Run, skip: int) -> float:
    """Return the speed of a run's median step, without the first `skip` steps and the last.

    On a CPU this project counts all tensors in its last step. Where only some steps are logged, a
    step's time is the mean of those between two lines.
    """
    seconds = [
        (after - before) / (step - previous)
        for (previous, before), (step, after) in itertools.pairwise(run.stamps[:-1])
        if previous >= skip
    ]
    return run.setting.tokens / statistics.median(seconds)


def rows_of(case: Case, runs: list[Run], skip: int) -> list[Row]:
    """Return the rows of a case's table, for the programs with measurements.

    Args:
        case: the case.
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

    def ratio(of: dict[int, Run], value) -> Spread | None:
        common = of.keys() & reference.keys()
        return Spread.of(value(of[number]) / value(reference[number]) for number in common)

    def median(of: dict[int, Run], value) -> float:
        return statistics.median(value(run) for run in of.values())

    def speed(run: Run) -> float:
        return tokens_per_second(run, skip)

    rows = []
    for program, of in by_program.items():
        if not of:
            continue
        speeds = Spread.of(map(speed, of.values()))
        memory_ratio, start_ratio = ratio(of, memory_of), ratio(of, start_of)
        rows.append(
            Row(
                program,
                speeds,
                ratio(of, speed),
                median(of, memory_of),
                memory_ratio.median if memory_ratio else None,
                median(of, start_of),
                start_ratio.median if start_ratio else None,
                speeds.median * mfu_per_rate if mfu_per_rate else None,
                len(of),
            )
        )
    return rows


def memory_of(run: Run) -> int:
    """Return the peak memory of a run: of the GPU if it used one."""
    return run.peak_gpu or sum(run.peak_rss)


def start_of(run: Run) -> float:
    """Return the seconds from the start of the process to the first line after a step."""
    return run.stamps[0][1]


# ------------------------------------------------------------------------------------------- report


def table(case: Case, rows: list[Row]) -> list[str]:
    """Return the lines of a case's Markdown table."""
    work = case.setting
    on_gpu = any(row.mfu for row in rows)
    memory = "peak GPU memory, GB" if on_gpu else "peak resident memory, GB"
    relative = f"relative to {versus(case)}"
    heads = ["", "tokens/s", relative, *(["MFU"] if on_gpu else [])]
    heads += [memory, relative, "first step after, s", relative]
    each = " per process" if work.ranks > 1 else ""
    rounds = str(max(row.rounds for row in rows))
    fewer = [f"{row.program} {row.rounds}" for row in rows if str(row.rounds) != rounds]
    rounds += f" ({', '.join(fewer)})" if fewer else ""
    lines = [f"Each step has {work.batch_size} × {work.seq_length} tokens{each}. Rounds: {rounds}."]
    lines += [""]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row.program, row.speed.text(".0f"), ratio_text(row.speed_ratio)]
        cells += [f"{row.mfu:.1%}" if row.mfu else "—"] if on_gpu else []
        cells += [f"{row.memory / GB:.2f}", number_text(row.memory_ratio)]
        cells += [f"{row.start:.1f}", number_text(row.start_ratio)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def versus(case: Case) -> str:
    """Return the name of a case's reference in tables and titles."""
    return "dp" if case.reference == "ours" else case.reference


def ratio_text(ratio: Spread | None) -> str:
    """Format the spread of a ratio; a dash if there is none."""
    return ratio.text(".2f") if ratio else "—"


def number_text(ratio: float | None) -> str:
    """Format a ratio; a dash if there is none."""
    return "—" if ratio is None else f"{ratio:.2f}"


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


def logging_text(costs: list[float], step: float) -> str:
    """Return a paragraph about what the hooks of a step cost.

    Args:
        costs: seconds per step in each round, from benchmarks/logging_cost.py.
        step: seconds of a step of the first table.
    """
    cost = Spread.of(1000 * seconds for seconds in costs)
    return (
        "Logging, metrics, progress bar and checkpoint hooks cost this project "
        f"{cost.text('.1f')} ms in each step of the embedded model, whatever the model: "
        f"{cost.median / 1000 / step:.2%} of the {step:.1f} s that a step of the first table takes "
        "(`python -m benchmarks.logging_cost` replaces them by functions that do nothing)."
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
        ratios = [row.speed_ratio for row in rows]
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
