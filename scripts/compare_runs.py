#!/usr/bin/env python3
"""Find where the losses of two runs begin to differ, and what can be the cause.

    python scripts/compare_runs.py runs/a runs/b
    python scripts/compare_runs.py runs/a trainer_output/checkpoint-500/trainer_state.json

A and B are output folders (results.json, metrics.jsonl), or the trainer_state.json of Hugging
Face's Trainer, whose losses are means over its logging_steps. The script prints the first step that
differs, and a table of everything that differs between the runs with its effect on the losses. The
figure goes into A's folder (or --plot FILE).

Exit codes: 0 if all losses agree that both runs have; 1 if some differ, or none could be compared;
2 for wrong usage, or a folder or file without a run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process

if __name__ == "__main__":
    process.catch_signals()

from support.cli import argument_types as kinds
from support.cli.arguments import Arguments
from support.errors import EXIT_COMPLETED, EXIT_FAILED, UserError
from support.files.atomic import only_finite, write_atomically
from support.redaction import redact

if TYPE_CHECKING:  # --help must be fast
    from support.report.divergence import Divergence


def main() -> int:
    """Print the comparison, and write the figure if there are losses; return the exit code."""
    from support.report import divergence

    args = parse()
    runs = divergence.read_run(args.a), divergence.read_run(args.b)
    found = divergence.compare_runs(*runs, args.tolerance)
    plot = draw(found, args.plot) if found.points else None
    if args.json:
        report = {**divergence.as_json(found), "plot": plot and str(plot)}
        print(redact(json.dumps(only_finite(report), indent=2, ensure_ascii=False)))
    else:
        print(redact(divergence.as_text(found)), end=f"📁 {plot}\n" if plot else "")
    return EXIT_COMPLETED if found.equal else EXIT_FAILED


def parse() -> Arguments:
    """Parse the command line."""
    parser = kinds.Parser.of_script(__doc__)
    place = "output folder of a run, or trainer_state.json of Hugging Face's Trainer"
    parser.add_argument("a", type=kinds.path, metavar="A", help=place)
    parser.add_argument("b", type=kinds.path, metavar="B", help=place)
    tolerance = "largest relative difference of equal losses (default: %(default)s)"
    parser.add_argument("--tolerance", type=kinds.natural_float, default=1e-6, help=tolerance)
    figure = (
        "the figure (.png, .svg or .pdf; default: difference_from_<B's name>.png in A's folder)"
    )
    parser.add_argument("--plot", type=kinds.path, metavar="FILE", help=figure)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser.parse_args()


def draw(found: Divergence, plot: Path | None) -> Path | None:
    """Draw the figure, and return its path; None if the default path cannot be written.

    Args:
        plot: --plot, or None for the default path in A's folder.
    """
    from support.report.plots import draw_divergence  # importing matplotlib takes a second

    path = plot or found.a.folder / f"difference_from_{found.b.folder.resolve().name}.png"
    try:
        write_atomically(path, lambda file: draw_divergence(found, file))
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the ending
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        problem = f"{path} cannot be written: {reason}. Use --plot FILE."
        if plot:
            raise UserError(problem) from error
        print(f"⚠️  {redact(problem)}", file=sys.stderr)
        return None
    return path


if __name__ == "__main__":
    process.run_command_line(main)
