"""Draw the pictures of docs/FIRST_STEPS.md into docs/images.

    python scripts/draw_pictures.py                      # all: about two minutes on two cores
    python scripts/draw_pictures.py memory.svg

memory.svg has the numbers of the planner; a test fails if they have changed. step.svg is drawn from
traces of --profile on two ranks, loss.png and report.png are of one of these runs. report.png is a
screenshot: it needs Chromium, and is left out without it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from distributed_training import PROJECT
from distributed_training.files.json_types import JsonObject
from distributed_training.memory.estimate import MemoryEstimate, predict_all
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.units import GB
from distributed_training.workload.workload import Workload
from tools.plotting import BLUE, GREEN, ORANGE, PINK, RED, SKY, SVG_SETTINGS, draw_bars

IMAGES = PROJECT / "docs" / "images"
MODEL, GPUS, TOKENS = "gpt2-medium", 4, 1024  # of memory.svg
TRACED = ("dp", "zero2", "zero3")
KINDS = ("parameters", "optimizer", "gradients", "activations", "logits", "other")
# By the first word of a term of the estimate.
KIND_OF = {name: name for name in KINDS} | {"loss": "logits", "gathered": "parameters"}
KIND_OF |= {"16-bit": "parameters", "buckets": "gradients"}
COLORS = {"forward": BLUE, "backward": SKY, "update": ORANGE}
COLORS |= {"all-reduce": RED, "all-gather": GREEN, "reduce-scatter": PINK}
# torch's names of the calls, in the order of which gloo's threads run them.
REDUCTIONS = {"c10d::allreduce_": "all-reduce", "c10d::_reduce_scatter_base_": "reduce-scatter"}
SMALLEST_GAP = 500  # microseconds between operators that are drawn as a gap


class Bar(NamedTuple):
    """A part of a lane of step.svg, in microseconds of the trace."""

    kind: str  # key of COLORS
    start: float
    length: float


def save(figure, name: str) -> None:
    """Write a figure on white: a page may have a dark background."""
    import matplotlib

    with matplotlib.rc_context(SVG_SETTINGS):
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(IMAGES / name, facecolor="white", metadata=none)


# ------------------------------------------------------------------------------------ memory.svg


def planned() -> list[MemoryEstimate]:
    """Return the estimates of memory.svg, one for each strategy."""
    return predict_all(Workload(find_architecture(MODEL), GPUS, seq_length=TOKENS))


def parts_of(need: MemoryEstimate) -> dict[str, float]:
    """Return the GB of each kind at the peak of an estimate, in the order of the bars."""
    parts = dict.fromkeys(KINDS, 0.0)
    peak = need.phase_of_peak()
    for term in need.terms:
        if peak not in term.phases:
            continue
        first = term.name.split(":")[0].split()[0]
        parts[KIND_OF.get(first, "other")] += term.size / GB
    return parts | {"in host memory": need.host / GB, "on NVMe": need.nvme / GB}


def draw_memory_of_strategies() -> None:
    """Draw the planned memory of one GPU under each strategy as stacked bars."""
    from matplotlib.figure import Figure

    needs = planned()
    rows = [parts_of(need) for need in needs]
    figure = Figure(figsize=(8.2, 4.2), layout="constrained")
    axes = figure.subplots()
    names = [need.strategy for need in needs]
    draw_bars(axes, names, {kind: [row[kind] for row in rows] for kind in rows[0]})
    for row, need in zip(rows, needs, strict=True):
        axes.text(sum(row.values()) + 0.1, need.strategy, f"{need.peak / GB:.1f}", va="center")
    axes.set_xlabel(
        "GB of one GPU at the peak of a step; for offload and infinity also outside of it"
    )
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    save(figure, "memory.svg")


# ---------------------------------------------------------------------------------------- step.svg


def lanes_of(events: list[JsonObject]) -> tuple[float, float, list[Bar], list[Bar]]:
    """Return (start, duration, computation, communication) of the fastest step of a trace."""
    events = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    step = min(steps, key=lambda event: event["dur"])
    start, end = step["ts"], step["ts"] + step["dur"]
    own = sorted(
        (e for e in events if e["tid"] == step["tid"] and start <= e["ts"] < end and e != step),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    backward = [e for e in own if e["name"].startswith("autograd::engine::evaluate_function")]
    ends = {"forward": backward[0]["ts"], "backward": max(e["ts"] + e["dur"] for e in backward)}
    bars: list[Bar] = []
    for event in own:
        if not event["name"].startswith("aten::"):
            continue  # may contain a wait for a collective; the operators in it do not
        kind = next((kind for kind, last in ends.items() if event["ts"] < last), "update")
        before = bars[-1] if bars else Bar("", 0, 0)
        gap = event["ts"] - before.start - before.length
        if before.kind == kind and gap < SMALLEST_GAP:
            length = max(before.length, event["ts"] + event["dur"] - before.start)
            bars[-1] = Bar(kind, before.start, length)
        else:
            bars.append(Bar(kind, event["ts"], event["dur"]))
    sent = [bar for bar in collectives_of(events) if start <= bar.start < end]
    return start, step["dur"], bars, sent


def collectives_of(events: list[JsonObject]) -> list[Bar]:
    """Return what gloo's threads did; they run a reduce-scatter as an all-reduce."""
    ordered = sorted(events, key=lambda event: event["ts"])
    calls = [REDUCTIONS[e["name"]] for e in ordered if e["name"] in REDUCTIONS]
    done = [event for event in ordered if event["name"].startswith("gloo:")]
    names = iter(calls)
    return [
        Bar(
            "all-gather" if event["name"] == "gloo:all_gather" else next(names),
            event["ts"],
            event["dur"],
        )
        for event in done
    ]


def trace_runs(folder: Path) -> None:
    """Train 40 steps under each strategy on two ranks, with a trace of three steps."""
    for strategy in TRACED:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        command += ["real_model_example.py", "--strategy", strategy, "--precision", "fp32"]
        command += ["--batch_size", "2", "--max_steps", "40", "--no_export"]
        command += ["--profile", str(folder / f"trace-{strategy}")]
        command += ["--output_dir", str(folder / strategy)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=PROJECT, check=True, env=environment, stdout=subprocess.DEVNULL)


def draw_step(folder: Path) -> None:
    """Draw one optimizer step of rank 0 under each strategy, from its trace."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    for row, strategy in enumerate(TRACED):
        trace = json.loads((folder / f"trace-{strategy}" / "trace-rank0.json").read_text("utf-8"))
        start, duration, *lanes = lanes_of(trace["traceEvents"])
        for lane, bars in enumerate(lanes):
            y = 2.6 * row + lane
            for kind, begin, length in bars:
                box = [((begin - start) / 1000, length / 1000)]
                axes.broken_barh(box, (y - 0.4, 0.8), facecolors=COLORS[kind])
        axes.vlines(duration / 1000, 2.6 * row - 0.5, 2.6 * row + 1.5, color="#555555", linewidth=1)
    names = [f"{strategy}: {lane}" for strategy in TRACED for lane in ("computes", "sends")]
    axes.set_yticks([2.6 * row + lane for row in range(len(TRACED)) for lane in (0, 1)], names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds of one optimizer step of rank 0; the line is the end of the step")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=patches, ncols=6, loc="outside upper center", frameon=False)
    results = json.loads((folder / TRACED[0] / "results.json").read_text("utf-8"))
    hardware, versions = results["hardware"], results["versions"]
    sequences = f"{results['batch_size']} × {results['seq_length']} tokens"
    work = f"{results['model']}, {results['precision']}, {sequences}"
    made = f"{hardware['cpu']}, torch {versions['torch']}, deepspeed {versions['deepspeed']}"
    figure.supxlabel(
        f"{work} on each of two CPU ranks; {made}; {results['started_at'][:10]}",
        fontsize=8,
        color="#555555",
    )
    save(figure, "step.svg")


# --------------------------------------------------------------------------------------- the others


def draw_collectives() -> None:
    """Draw what four ranks have before and after three collectives."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    ranks = range(4)
    colors = (BLUE, ORANGE, GREEN, PINK)
    # (name, whether rank r has cell c before and after, whether cells after are sums)
    kinds: tuple[tuple[str, Callable, Callable, bool], ...] = (
        ("all-reduce", lambda r, c: True, lambda r, c: True, True),
        ("reduce-scatter", lambda r, c: True, lambda r, c: r == c, True),
        ("all-gather", lambda r, c: r == c, lambda r, c: True, False),
    )
    figure = Figure(figsize=(9, 2.5), layout="constrained")
    for axes, (name, before, after, summed) in zip(figure.subplots(1, 3), kinds, strict=True):
        for rank in ranks:
            for cell in ranks:
                for left, has, is_sum in ((0, before, False), (5.6, after, summed)):
                    corner = (left + cell, 3 - rank)
                    axes.add_patch(Rectangle(corner, 0.9, 0.8, facecolor="#eeeeee"))
                    if has(rank, cell):
                        color = "#444444" if is_sum else colors[rank if summed else cell]
                        axes.add_patch(Rectangle(corner, 0.9, 0.8, facecolor=color))
                    if has(rank, cell) and is_sum:
                        middle = (corner[0] + 0.45, corner[1] + 0.38)
                        axes.text(*middle, "Σ", color="white", ha="center", va="center")
            axes.text(-0.25, 3.4 - rank, f"rank {rank}", ha="right", va="center", fontsize=8)
        axes.annotate("", (5.4, 1.9), (4.2, 1.9), arrowprops={"arrowstyle": "->"})
        axes.set_title(name, fontsize=10)
        axes.set_xlim(-2, 9.6)
        axes.set_ylim(-0.1, 4)
        axes.axis("off")
    figure.supxlabel("a color: the numbers of one rank; Σ: their sum over the ranks", fontsize=8)
    save(figure, "collectives.svg")


def draw_report(folder: Path) -> None:
    """Take a picture of the first part of a report page."""
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        print("report.png is left out: it needs Chromium.", file=sys.stderr)
        return
    page = folder / "report.html"
    run = str(folder / TRACED[0])
    report = [sys.executable, "scripts/report.py", run, "--out", str(page)]
    subprocess.run(report, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
    page.write_text(page.read_text("utf-8").replace(run, "runs/two"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,830"]
    picture = f"--screenshot={IMAGES / 'report.png'}"
    command = [browser, *options, picture, page.as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = ["memory.svg", "collectives.svg", "step.svg", "loss.png", "report.png"]
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=f"default: {' '.join(known)}")
    names = parser.parse_args().pictures or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown pictures: {' '.join(unknown)}")
    IMAGES.mkdir(exist_ok=True)
    if "memory.svg" in names:
        draw_memory_of_strategies()
    if "collectives.svg" in names:
        draw_collectives()
    if {*names} <= {"memory.svg", "collectives.svg"}:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace_runs(folder)
        if "step.svg" in names:
            draw_step(folder)
        if "loss.png" in names:
            shutil.copy(folder / TRACED[0] / "loss.png", IMAGES)
        if "report.png" in names:
            draw_report(folder)
