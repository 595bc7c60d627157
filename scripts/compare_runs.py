#!/usr/bin/env python3
"""Compare runs: find where the losses begin to differ from the first run's, and the likely cause.

    python scripts/compare_runs.py runs/a runs/b
    python scripts/compare_runs.py runs/a trainer_output/checkpoint-500/trainer_state.json

Each RUN is an output folder (results.json, metrics.jsonl), or the trainer_state.json of Hugging
Face's Trainer, whose losses are means over its logging_steps. The script prints a table of numbers,
the first step that differs, and everything else that differs with its effect on the losses. The
figure goes into the first run's folder (or --plot FILE).

Exit codes: 0 if all losses agree that the runs have in common; 1 if some differ, or none could be
compared; 2 for wrong usage, or a folder or file without a run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process

if __name__ == "__main__":
    process.catch_signals()

from support.cli import argument_types as kinds
from support.errors import UserError, first_line
from support.files.atomic import write_atomically
from support.redaction import redact


def main() -> int:
    """Print the comparison, and write the figure if there are losses; return the exit code."""
    parser = kinds.Parser.of_script(__doc__)
    place = "output folder of a run, or trainer_state.json of Hugging Face's Trainer; two or more"
    parser.add_argument("runs", type=kinds.path, metavar="RUN", nargs="+", help=place)
    tolerance = "largest relative difference of equal losses (default: %(default)s)"
    parser.add_argument("--tolerance", type=kinds.natural_float, default=1e-6, help=tolerance)
    figure = "the figure (.png, .svg or .pdf; default: difference_from_<last RUN's name>.png)"
    parser.add_argument("--plot", type=kinds.path, metavar="FILE", help=figure)
    parser.add_argument("--wide", action="store_true", help="more columns, wider than 80")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args()
    if not 2 <= len(args.runs) <= 26:
        raise UserError("Name two or more runs to compare, at most 26.")
    from support.report import compare, comparison_text  # --help must be fast

    comparison = compare.compare_runs(
        [compare.read_run(path) for path in args.runs], args.tolerance
    )
    plot = draw(comparison, args.plot) if comparison.compared else None
    if args.json:
        report = {**comparison_text.as_json(comparison), "plot": plot and str(plot)}
        print(redact(json.dumps(report, indent=2, ensure_ascii=False)))
    else:
        text = comparison_text.as_text(comparison, args.wide)
        print(redact(text), end=f"📁 {plot}\n" if plot else "")
    return comparison.exit_code


def draw(comparison, plot: Path | None) -> Path | None:
    """Draw the figure, and return its path; None without matplotlib or a writable folder.

    Args:
        plot: --plot, or None for the default path in the first run's folder.
    """
    first, last = (comparison.rows[number].runs[0].place for number in (0, -1))
    folder, other = (place.parent if place.is_file() else place for place in (first, last))
    path = plot or folder / f"difference_from_{other.resolve().name}.png"
    try:
        from support.report import plots  # importing matplotlib takes a second

        write_atomically(path, lambda file: plots.draw(comparison, file))
        return path
    except (ImportError, OSError, ValueError) as error:  # ValueError: an unknown ending of --plot
        problem = f"No figure, {path}: {first_line(error)}"
    if plot:
        raise UserError(problem)
    print(f"⚠️  {redact(problem)}", file=sys.stderr)
    return None


if __name__ == "__main__":
    process.run_command_line(main)
