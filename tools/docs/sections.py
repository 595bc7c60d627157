"""Write the generated sections of the documents, between `<!-- generated: NAME -->` and its end.

    python scripts/generate_docs.py

They come from the tables of the code: flags, tolerances of the comparison, planned memory, types of
files and formats of rows, findings. A test fails if a section is not what this program writes.
"""

import argparse
import re
import textwrap
from collections.abc import Iterable

from distributed_training import PROJECT
from distributed_training.cli.flags import (
    GROUPS,
    IGNORED,
    HelpFormatter,
    build_parser,
    names_in_help,
)
from distributed_training.data.file_types import FILE_TYPES
from distributed_training.data.row_formats import FORMATS
from distributed_training.known_models import GPT2_SHAPES
from distributed_training.memory.estimate import predict_all
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.records.agreement import TOLERANCES
from distributed_training.text_tables import replace_section
from distributed_training.units import GB
from distributed_training.workload.workload import Workload


def table(headers: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table, with cells of any width."""
    lines = [headers, ["---"] * len(headers), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]


def flags() -> list[str]:
    """List all flags of real_model_example.py by group, with their other names and defaults."""
    actions = {name: a for a in build_parser()._actions for name in a.option_strings}
    lines = []
    for title, names in GROUPS.items():
        listed = [actions[f"--{name}"] for name in names]
        lines += [f"## {title}", ""]
        lines += [*table(["flag", "meaning"], map(row_of_flag, listed)), ""]
    lines += ["## Accepted and ignored", "", "For command lines of other trainers:", ""]
    ignored = ", ".join(f"`--{name}`" for name in IGNORED)
    return [*lines, *textwrap.wrap(ignored, 100, break_on_hyphens=False)]


def row_of_flag(action: argparse.Action) -> tuple[str, str]:
    """Return names and meaning, as in --help."""
    formatter = HelpFormatter("")
    ours, *others = names_in_help(action)
    value = formatter._format_action_invocation(action).removeprefix(", ".join([ours, *others]))
    value = "" if value[1:].lower() == ours[2:] else value
    meaning = " ".join(formatter._expand_help(action).split())
    meaning = meaning.replace("<", "&lt;").replace("*", "\\*")
    names = ", ".join([f"`{ours}{value}`", *(f"`{name}`" for name in others)])
    return names, re.sub(r"(?<!\w)--\w+", r"`\g<0>`", meaning)


def tolerances() -> list[str]:
    """List which losses count as equal in a comparison."""
    rows = []
    for precision, (loss, norm, steps) in TOLERANCES.items():
        compared = f"median of {steps} steps" if steps > 1 else "each step"
        rows.append((precision, f"{loss:.0e}", f"{norm:.0e}", compared))
    return table(["precision", "loss", "gradient norm", "compared"], rows)


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


def file_types() -> list[str]:
    """List the types of files that have rows."""
    types = dict.fromkeys(FILE_TYPES.values())
    rows = ((", ".join(f"`{suffix}`" for suffix in each.suffixes), each.rows) for each in types)
    return table(["suffix", "a row is"], rows)


def row_formats() -> list[str]:
    """List the formats of rows in the order in which they are tried."""
    rows = (described for row_format in FORMATS for described in row_format.described)
    return table(["keys of a row", "known as", "becomes"], rows)


def findings() -> list[str]:
    """List the scripts in findings/ by their first lines."""
    rows = []
    for path in sorted(PROJECT.glob("findings/*.sh")):
        lines = dict(re.findall(r"^# (\w+): (.*)$", path.read_text("utf-8"), re.MULTILINE))
        rows.append((f"[{path.stem}]({path.name})", lines["release"], lines["finding"]))
    return table(["script", "release", "what happens"], rows)


SECTIONS = {
    "findings": findings,
    "flags": flags,
    "tolerances": tolerances,
    "gpt2-memory": gpt2_memory,
    "file-types": file_types,
    "row-formats": row_formats,
}


def generated(text: str) -> str:
    """Return a document with all of its generated sections renewed."""
    for name in re.findall(r"^<!-- generated: (\S+) -->$", text, re.MULTILINE):
        text = replace_section(text, name, SECTIONS[name]())
    return text


PAGES = [path for folder in (".", "docs", "findings") for path in PROJECT.glob(f"{folder}/*.md")]


def main() -> None:
    """Renew the sections of all documents."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in PAGES:
        path.write_text(generated(path.read_text(encoding="utf-8")), encoding="utf-8")
