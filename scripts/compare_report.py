#!/usr/bin/env python3
"""Report on the runs of a comparison of strategies: tables, a verdict, files and a figure.

    python scripts/compare_report.py comparison_runs/tiny-gpt2

The script reads results.json, metrics.jsonl, outcome.txt and command.txt in each folder
DIR/<strategy>/<repeat>/. It prints the report and writes comparison_results_<name>.txt, .json, .md
and .png to the current folder (or --output_dir), where <name> is the name of DIR.

Exit codes: 0; 1 if a loss curve differs by more than the tolerance, a strategy did not complete
(unless it was skipped), or no run completed; 2 for wrong usage, a folder without runs or files that
cannot be written; with --status, 3 if the run did not complete.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process

if __name__ == "__main__":
    process.catch_signals()

from support.cli import argument_types as kinds
from support.cli.arguments import Arguments
from support.errors import EXIT_COMPLETED, UserError
from support.files.atomic import write_atomically, write_text
from support.report import tables
from support.report.compare import Attempt, Comparison, read_attempt, read_comparison, state_bytes
from support.units import MB, human_rate

EXIT_NOT_COMPLETED = 3


def main() -> int:
    """Print the report, and write its files; return the exit code."""
    args = parse()
    if args.status:
        attempt = read_attempt(args.folder)
        print(describe_attempt(attempt))
        return EXIT_COMPLETED if attempt.completed else EXIT_NOT_COMPLETED
    comparison = read_comparison(args.folder, args.tolerance)
    if not comparison.rows:
        raise UserError(
            f"{args.folder} holds no runs: compare_strategies.sh leaves them as "
            "DIR/<strategy>/<repeat>/results.json."
        )
    write_report(comparison, args.output_dir)
    return comparison.exit_code


def parse() -> Arguments:
    """Parse and check the command line."""
    parser = kinds.Parser.of_script(__doc__)
    add = parser.add_argument
    folder = "folder with <strategy>/<repeat>/results.json"
    add("folder", type=kinds.path, metavar="DIR", help=folder)
    files = "where the files go (default: here)"
    add("--output_dir", type=kinds.path, default=Path(), help=files)
    tolerance = "largest relative loss difference that counts as the same model"
    add("--tolerance", type=float, help=tolerance)
    status = "DIR is one run: print its status; exit code 3 if not completed"
    add("--status", action="store_true", help=status)
    args = parser.parse_args()
    if not args.folder.is_dir():
        raise UserError(f"{args.folder}: no such folder.")
    if args.tolerance is not None and not args.tolerance > 0:
        raise UserError(f"--tolerance {args.tolerance} must be above 0.")
    return args


def describe_attempt(attempt: Attempt) -> str:
    """Describe the outcome of one run in one line, for the terminal."""
    results = attempt.results
    if not attempt.completed:
        return f"{attempt.status}: {attempt.reason}"
    if attempt.simulated_ranks:
        states = state_bytes(results["memory"]["device_categories_bytes_by_rank"][0])
        return f"completed: {states / MB:,.1f} MB of model states"
    return (
        f"completed: {human_rate(results['samples_per_second'])} samples/s, "
        f"loss {results['train_loss_first']:.4f} to {results['train_loss_last']:.4f}"
    )


def write_report(comparison: Comparison, folder: Path) -> None:
    """Print the report, and write the .txt, .json, .md and .png files.

    Without a completed run there is no figure, and an older one is removed.
    """
    name = f"comparison_results_{comparison.name}"
    files = [folder / f"{name}{suffix}" for suffix in (".txt", ".json", ".md", ".png")]
    text, data, markdown, figure = files
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(text, tables.as_file(comparison))
        write_text(data, tables.as_json(comparison))
        write_text(markdown, tables.as_markdown(comparison))
        print(tables.as_text(comparison), flush=True)
        if comparison.reference is None:
            files.remove(figure)
            figure.unlink(missing_ok=True)
        else:
            from support.report import plots  # only here: importing matplotlib takes a second

            write_atomically(figure, lambda path: plots.draw(comparison, path))
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be written: {error.strerror}."
        ) from error
    print("\n".join(f"📁 {file}" for file in files))


if __name__ == "__main__":
    process.run_command_line(main, printed=False)
