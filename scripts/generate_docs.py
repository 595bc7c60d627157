#!/usr/bin/env python3
"""Write the generated sections of the documents, between `<!-- generated: NAME -->` and its end.

    python scripts/generate_docs.py

They come from the tables of the code: flags, tolerances of the comparison, and planned memory. A
test fails if a section is not what this program writes.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import PROJECT
from support.cli import argument_types as kinds
from support.cli.flags import GROUPS, IGNORED, HelpFormatter, build_parser, names_in_help
from support.console import replace_section
from support.memory.architectures import find_architecture
from support.memory.estimate import predict_all
from support.memory.workload import Workload
from support.report.compare import lasting_steps, tolerance_of
from support.tables import GPT2_SHAPES
from support.units import GB


def table(headers: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table, with cells of any width."""
    lines = [headers, ["---"] * len(headers), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]


# ------------------------------------------------------------------------------------------- flags


def flags() -> list[str]:
    """List all flags of real_model_example.py by group, with their other names and defaults."""
    actions = {name: a for a in build_parser()._actions for name in a.option_strings}
    lines = []
    for title, names in GROUPS.items():
        listed = [actions[f"--{name}"] for name in names]
        lines += [f"## {title}", ""]
        lines += [*table(["flag", "default", "meaning"], map(row_of_flag, listed)), ""]
    lines += ["## Accepted and ignored", "", "For command lines of other trainers:", ""]
    ignored = ", ".join(f"`--{name}`" for name in IGNORED)
    return [*lines, *textwrap.wrap(ignored, 100, break_on_hyphens=False)]


def row_of_flag(action: argparse.Action) -> tuple[str, str, str]:
    """Return names, default and meaning; the default is at the end of the help."""
    formatter = HelpFormatter("")
    text = as_markdown(" ".join(formatter._expand_help(action).split()))
    found = re.fullmatch(r"(.*?) ?\(default: ((?:[^()]|\([^()]*\))*)\)", text)
    if action.type is kinds.boolean:
        meaning, default = text, "off"
    else:
        meaning, default = found.groups() if found else (text, "")
    ours, *others = names_in_help(action)
    shown = formatter._format_action_invocation(action).removeprefix(", ".join([ours, *others]))
    shown = "" if shown[1:].lower() == ours[2:] else shown
    return ", ".join([f"`{ours}{shown}`", *(f"`{name}`" for name in others)]), default, meaning


def as_markdown(text: str) -> str:
    """Return a text of --help for a cell of a table."""
    text = text.replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"(?<!\w)--\w+", r"`\g<0>`", text)


# --------------------------------------------------------------------------- tolerances and memory


def tolerances() -> list[str]:
    """List which losses count as equal in a comparison."""
    rows = []
    for precision, device in (
        *(("fp32", "a CPU"), ("fp32", "a GPU, where matrices are multiplied in TF32")),
        *(("bf16", "both"), ("fp16", "both")),
    ):
        on_cpu = device == "a CPU"
        steps = lasting_steps(precision, on_cpu)
        compared = f"median of {steps} steps" if steps > 1 else "each step"
        rows.append((precision, device, f"{tolerance_of(precision, not on_cpu):.0e}", compared))
    return table(["precision", "device", "largest relative difference", "compared"], rows)


def gpt2_memory() -> list[str]:
    """Plan GPT-2's sizes under each strategy: model states and peak in GB of a GPU."""
    rows, columns = [], {}
    for name in GPT2_SHAPES:
        model = find_architecture(name)
        for ranks in (1, 2, 4, 8):
            for need in predict_all(Workload(model, ranks, seq_length=1024)):
                states = need.parameters + need.gradients + need.optimizer
                cell = f"{states / GB:.2f} / {need.peak / GB:.1f}"
                columns.setdefault(need.strategy, []).append(cell)
            rows.append([f"{name} ({model.total / 1e6:,.1f}M)" if ranks == 1 else "", str(ranks)])
    equal: dict[tuple, list[str]] = {}
    for strategy, cells in columns.items():
        equal.setdefault(tuple(cells), []).append(strategy)
    cells = zip(*equal, strict=True)
    headers = ["model", "N", *map(", ".join, equal.values())]
    return table(headers, ([*row, *more] for row, more in zip(rows, cells, strict=True)))


SECTIONS: dict[str, Callable[[], list[str]]] = {
    "flags": flags,
    "tolerances": tolerances,
    "gpt2-memory": gpt2_memory,
}


def generated(text: str) -> str:
    """Return a document with all of its generated sections renewed."""
    for name in re.findall(r"^<!-- generated: (\S+) -->$", text, re.MULTILINE):
        text = replace_section(text, name, SECTIONS[name]())
    return text


def main() -> None:
    """Renew the sections of all documents, and name the files that change."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    for path in sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md")]):
        text = path.read_text(encoding="utf-8")
        if (new := generated(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(PROJECT))


if __name__ == "__main__":
    main()
