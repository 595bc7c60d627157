#!/usr/bin/env python3
"""Report on the runs of a comparison of strategies: tables, a verdict, files and a figure.

    python scripts/compare_report.py comparison_runs/tiny-gpt2

The script reads the runs that compare_strategies.sh left in DIR/<strategy>/<repeat>/. It prints the
report and writes comparison_results_<name>.txt, .json, .md and .png to the current folder (or
--output_dir), where <name> is the name of DIR.

Exit codes: 0; 1 if a loss curve differs by more than the tolerance, a strategy did not complete
(unless it was skipped), or no run completed; 2 for wrong usage, a folder without runs or files that
cannot be written; with --status, 3 if the run did not complete.
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
from support.errors import EXIT_COMPLETED, UserError
from support.files.atomic import write_atomically, write_text
from support.report import comparison_text
from support.report.compare import Comparison, RecordedRun, read_comparison, read_strategy_run
from support.units import human_bytes, human_rate

EXIT_NOT_COMPLETED = 3


def main() -> int:
    """Print the report, and write its files; return the exit code."""
    parser = kinds.Parser.of_script(__doc__)
    add = parser.add_argument
    folder = "folder with <strategy>/<repeat>/results.json"
    add("folder", type=kinds.path, metavar="DIR", help=folder)
    files = "where the files go (default: here)"
    add("--output_dir", type=kinds.path, default=Path(), help=files)
    tolerance = "largest relative loss difference that counts as the same model"
    add("--tolerance", type=kinds.positive_float, help=tolerance)
    add("--wide", action="store_true", help="more columns, wider than 80")
    status = "DIR is one run: print its status; exit code 3 if not completed"
    add("--status", action="store_true", help=status)
    args = parser.parse_args()
    if not args.folder.is_dir():
        raise UserError(f"{args.folder}: no such folder.")
    if args.status:
        run = read_strategy_run(args.folder)
        print(describe(run))
        return EXIT_COMPLETED if run.completed else EXIT_NOT_COMPLETED
    comparison = read_comparison(args.folder, args.tolerance)
    if not comparison.rows:
        raise UserError(
            f"{args.folder} holds no runs: compare_strategies.sh leaves them as "
            "DIR/<strategy>/<repeat>/results.json."
        )
    write_report(comparison, args.output_dir, args.wide)
    return comparison.exit_code


def describe(run: RecordedRun) -> str:
    """Describe the outcome of one run in one line, for the terminal."""
    if not run.completed:
        return f"{run.status}: {run.reason}"
    if run.results["simulated_world_size"]:
        return f"completed: {human_bytes(run.numbers['memory_bytes'])} of model states"
    speed = f"{human_rate(run.numbers['samples_per_second'])} samples/s"
    return f"completed: {speed}, loss {run.losses[0].loss:.4f} to {run.losses[-1].loss:.4f}"


def write_report(comparison: Comparison, folder: Path, wide: bool) -> None:
    """Print the report, and write the .txt, .json, .md and .png files.

    Without a completed run there is no figure, and an older one is removed.
    """
    name = f"comparison_results_{comparison.name}"
    text, data, markdown, figure = (
        folder / f"{name}.{end}" for end in ("txt", "json", "md", "png")
    )
    shown = comparison_text.as_text(comparison, wide)
    report = json.dumps(comparison_text.as_json(comparison), indent=2, ensure_ascii=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(text, shown)
        write_text(data, report + "\n")
        write_text(markdown, comparison_text.as_markdown(comparison))
        print(shown, flush=True)
        figure.unlink(missing_ok=True)
        if comparison.reference:
            from support.report import plots  # only here: importing matplotlib takes a second

            write_atomically(figure, lambda path: plots.draw(comparison, path))
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be written: {error.strerror}."
        ) from error
    print("\n".join(f"📁 {file}" for file in (text, data, markdown, figure) if file.exists()))


if __name__ == "__main__":
    process.run_command_line(main, printed=False)
