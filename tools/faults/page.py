"""docs/FAULTS.md and its figure, from results.json and the catalogue.

python -m tools.faults.page       # write both again, for example after a change of a fault's text
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean

from distributed_training import PROJECT, programs
from distributed_training.errors import UserError
from distributed_training.files.atomic import read_json, write_atomically, write_text
from distributed_training.text_tables import markdown_table
from tools.faults.catalogue import FAULTS, by_group
from tools.faults.deepspeed_release import DEEPSPEED_RELEASE, RELEASE
from tools.faults.fault import Check, Fault

RESULTS = Path(__file__).parent / "results.json"
PAGE = PROJECT / "docs" / "FAULTS.md"
FIGURE = PROJECT / "docs" / "faults.png"
WIDTH = 100
SMOOTHED = 5  # steps of a moving mean in the figure
VERSIONS = ("python", "torch", "deepspeed", "transformers")

INTRODUCTION = """
# The fault museum

With this page you can see which documented bugs of training programs the checks of this project
catch, and how to look for the same bugs in any other trainer.

Most of these bugs raise no error: the loss falls, and the model is worse than it should be.
`make faults` plants them one at a time in a copy of the project, as a patch of a few lines. Then it
runs what a user would run: a comparison of two runs, `--prove`, `--show_sample`, an evaluation, a
resume. The verdict is that of the program, with its usual tolerances
([COMPARISON.md](COMPARISON.md)). The same checks also run without a fault, with other seeds and
other data, and must find nothing.

Where the table names a file, no program gives a verdict: two numbers in it are compared.

The runs train a GPT-2 of 137,000 parameters on pairs of a prompt and an answer, most of them for 10
steps, those of `bf16_without_master` for 120 and those of the figure for 100. `make faults` writes
this page from its results.
One fault, in half a minute: `python -m tools.faults mean_of_means --seeds 1` (`--list`: names).

To look for a fault in another trainer: `torch.nn.utils.clip_grad_norm_` returns the norm of the
gradient before clipping, and `sum(p.double().sum() for p in model.parameters())` is a checksum.
Compare all digits that are printed; rounding changes the sixth or seventh.
"""
FIGURE_TEXT = (
    "Training loss with the fault (orange) and without it (black), each point a mean of 5 steps."
)


def write(results: dict) -> None:
    """Write results.json; without a network it keeps what it had about the DeepSpeed release."""
    kept = read_json(RESULTS).get("release", {}) if RESULTS.exists() else {}
    if "skipped" in results["release"] and "evidence" in kept:
        results["release"] = kept | results["release"]
    write_text(RESULTS, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    write_page()


def write_page() -> None:
    """Write the page and its figure."""
    results = read_json(RESULTS)
    write_text(PAGE, page(results))
    write_atomically(FIGURE, partial(draw, results))


def page(results: dict) -> str:
    """Return the page.

    Args:
        results: the content of results.json.
    """
    lines = [*INTRODUCTION.strip().splitlines(), "", *facts(results), ""]
    lines += ["## What was caught", "", *table(results), ""]
    lines += [
        "![Loss with and without four of the faults](faults.png)",
        "",
        FIGURE_TEXT.strip(),
        "",
    ]
    for group, faults in by_group().items():
        if faults:
            lines += [f"## {group.capitalize()}", ""]
            for fault in faults:
                lines += section(fault, results["faults"][fault.name])
    lines += section_of_release(results.get("release", {}))
    return "\n".join(lines).rstrip() + "\n"


def facts(results: dict) -> list[str]:
    """Say when and where the results were measured."""
    versions = ", ".join(f"{name} {results['versions'][name]}" for name in VERSIONS)
    faults, seeds = len(results["faults"]), results["clean_runs"]
    text = (
        f"Measured on {results['date']} with {versions}, on {results['cores']} cores of "
        f"{results['cpu']}. All {faults} faults were caught, and no check raised an alarm in "
        f"{seeds} runs without a fault. `make faults` took {results['seconds'] / 60:.0f} minutes."
    )
    return wrapped(text)


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return the lines of a paragraph."""
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def table(results: dict) -> list[str]:
    """Return the lines of the table of all faults."""
    rows = []
    for group, faults in by_group().items():
        rows += [[f"**{group}**", "", "", ""]] if faults else []
        for fault in faults:
            found = results["faults"][fault.name]
            alarms = f"{found['alarms']} of {results['clean_runs']}"
            rows.append([f"`{fault.name}`", f"`{found['by']}`", str(found["step"] or "–"), alarms])
    headers = ["fault", "shown first by", "at step", "alarms without it"]
    return markdown_table(rows, headers).splitlines()


def section(fault: Fault, found: dict) -> list[str]:
    """Return the lines about a fault."""
    at = f" at step {found['step']}" if found["step"] else ""
    lines = [f"### {fault.name}", "", *wrapped(fault.title), ""]
    lines += ["<!-- illustration -->", "```diff", *diff_of(fault), "```", ""]
    lines += [*reports_of(fault), "", *wrapped(f"Loss curve: {fault.effect}"), ""]
    shown = [(f"Shown{at} by {check_of(fault.check)}:", found)]
    also = zip(fault.also, found.get("also", []), strict=False)
    shown += [(f"Also shown by {check_of(check)}:", each) for check, each in also]
    for said, each in shown:
        lines += [*wrapped(said), "", *output(each["evidence"]), ""]
    return [*lines, *wrapped(f"In any trainer: {fault.elsewhere}"), ""]


def section_of_release(found: dict) -> list[str]:
    """Return the lines about the fault that is not planted, or why it is not shown."""
    heading = [f"## Not planted: DeepSpeed {RELEASE}", ""]
    why = "The last `make faults` left this part out, because pip could not download the release."
    if "evidence" not in found:
        return [*heading, *wrapped(why), ""]
    fault, release, installed = DEEPSPEED_RELEASE, found["release"], found["installed"]
    whole, wrong = found["loop"][release][0]
    right = found["loop"][installed][0][1]
    loop = (
        "A plain loop ([deepspeed_loop.py](../tools/faults/deepspeed_loop.py)) compares the "
        f"gradient norm of step 1 with that of the whole batch, {whole:.4f}: it is {wrong:.4f} "
        f"with DeepSpeed {release}, and {right:.4f} with {installed}. This project refuses the "
        "release:"
    )
    shown = f"A copy without this refusal shows the fault at step {found['step']}"
    lines = [*heading, *wrapped(fault.title), ""]
    if "skipped" in found:
        lines += [*wrapped(f"{why} What follows is of an earlier run."), ""]
    lines += [*reports_of(fault), "", *wrapped(f"Loss curve: {fault.effect}"), ""]
    lines += [*wrapped(loop), ""]
    lines += [*output(found["refusal"]), "", *wrapped(f"{shown}, by {check_of(fault.check)}:"), ""]
    lines += [*output(found["evidence"]), ""]
    if "silent" in found:
        lines += [*wrapped(f"With {installed} the same check is silent:"), ""]
        lines += [*output(found["silent"]), ""]
    lines += [*wrapped(f"In any trainer: {fault.elsewhere}"), ""]
    return [*lines, *wrapped("`python -m tools.faults.deepspeed_release` repeats this part."), ""]


def reports_of(fault: Fault) -> list[str]:
    """Return the lines of the list of public reports."""
    lines = ["Reported in", ""]
    for report in fault.reports:
        text = f"- [{report.repository}#{report.number}]({report.url}): {report.says}."
        lines += wrapped(text, "  ")
    return lines


def check_of(check: Check) -> str:
    """Return the command of a check, and what it does."""
    return f"`{check.command}`, {check.about}"


def output(text: str) -> list[str]:
    """Return a block with what a program printed."""
    return ["<!-- illustration -->", "```text", *wrapped(text), "```"]


def diff_of(fault: Fault) -> Iterator[str]:
    """Yield the lines of a patch, without those for git."""
    for line in fault.patch.read_text(encoding="utf-8").splitlines():
        if not line.startswith(("diff --git", "index ")):
            yield re.sub(r"^@@ .*? @@ ?", "@@ ", line).rstrip()


# ------------------------------------------------------------------------------------------ figure


def draw(results: dict, path: Path) -> None:
    """Draw the losses with and without the faults that have curves, one panel each."""
    from matplotlib.figure import Figure

    drawn = [fault for fault in FAULTS if "curves" in results["faults"][fault.name]]
    figure = Figure(figsize=(9, 2.6 * -(-len(drawn) // 2)), layout="constrained")
    panels = figure.subplots(-(-len(drawn) // 2), 2, sharex=False, squeeze=False).flatten()
    for panel, fault in zip(panels, drawn, strict=False):
        curves = results["faults"][fault.name]["curves"]
        for name, color in (("without", "#000000"), ("with", "#E69F00")):
            losses = smoothed(curves[name])
            steps = range(SMOOTHED, SMOOTHED + len(losses))
            panel.plot(steps, losses, color=color, label=f"{name} the fault", linewidth=1.5)
        panel.set_title(fault.name, fontsize=10)
        panel.set_xlabel("optimizer step")
        panel.set_ylabel("loss (nats per token)")
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=110, format="png", metadata={"Software": None})


def smoothed(values: list[float]) -> list[float]:
    """Return the means of SMOOTHED values each."""
    return [mean(values[end - SMOOTHED : end]) for end in range(SMOOTHED, len(values) + 1)]


def main() -> None:
    """Write the page from results.json."""
    if len(sys.argv) > 1:
        raise UserError("python -m tools.faults.page has no arguments.")
    write_page()


if __name__ == "__main__":
    programs.run_command_line(main)
