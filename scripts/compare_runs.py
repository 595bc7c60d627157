#!/usr/bin/env python3
"""Compare runs: find where the losses begin to differ from the first run's, and the likely cause.

    python scripts/compare_runs.py runs/a runs/b
    python scripts/compare_runs.py runs/a trainer_output/checkpoint-500/trainer_state.json
    python scripts/compare_runs.py comparison_runs/tiny-gpt2

Each RUN is an output folder (results.json, metrics.jsonl), or the trainer_state.json of Hugging
Face's Trainer, whose losses are means over its logging_steps. The figure goes into the first run's
folder (or --plot FILE). A single RUN is the folder of compare_strategies.sh, with its runs in
<strategy>/<repeat>/: the report is also written to comparison_results_<name>.txt, .json, .md, .png.

Exit codes: 0 if all losses agree that the runs have in common; 1 if some differ, none could be
compared, or a strategy did not complete (unless it was skipped); 2 for wrong usage, or a folder or
file without a run; with --status, 3 if the run did not complete.
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
from support.errors import EXIT_COMPLETED, UserError, first_line, redact
from support.files.atomic import write_atomically, write_text
from support.units import human_bytes, human_rate

EXIT_NOT_COMPLETED = 3


def main() -> int:
    """Print the comparison, and write its files; return the exit code."""
    args = parse()
    from support.report import compare, comparison_text  # --help must be fast

    if args.status:
        run = compare.read_strategy_run(args.runs[0])
        print(describe(run))
        return EXIT_COMPLETED if run.completed else EXIT_NOT_COMPLETED
    if len(args.runs) == 1:
        comparison = compare.read_comparison(args.runs[0], args.tolerance)
        if not comparison.rows:
            raise UserError(f"{args.runs[0]} holds no <strategy>/<repeat>/results.json.")
    else:
        runs = [compare.read_run(path) for path in args.runs]
        tolerance = 1e-6 if args.tolerance is None else args.tolerance
        comparison = compare.compare_runs(runs, tolerance)
    text = redact(comparison_text.as_text(comparison, args.wide))
    if not args.json:
        print(text, end="", flush=True)
    has_figure = comparison.reference if comparison.of_strategies else comparison.compared
    plot = draw(comparison, args) if has_figure else None
    report = {**comparison_text.as_json(comparison), "plot": plot and str(plot)}
    data = redact(json.dumps(report, indent=2, ensure_ascii=False)) + "\n"
    if args.json:
        print(data, end="")
    files = [plot] if plot else []
    if comparison.of_strategies:
        markdown = comparison_text.as_markdown(comparison)
        for suffix, content in {".txt": text, ".json": data, ".md": markdown}.items():
            files.append(args.output_dir / f"comparison_results_{comparison.name}{suffix}")
            write_file(files[-1], lambda path, content=content: write_text(path, content))
    if files and not args.json:
        print("\n".join(f"📁 {file}" for file in files))
    return comparison.exit_code


def parse() -> kinds.Options:
    """Parse and check the command line."""
    parser = kinds.Parser.of_script(__doc__)
    add = parser.add_argument
    add("runs", type=kinds.path, metavar="RUN", nargs="+", help="two or more runs, or one folder")
    tolerance = "largest relative difference of equal losses (default: 1e-6; of strategies, by "
    add("--tolerance", type=kinds.natural_float, help=f"{tolerance}their precision)")
    figure = "the figure (.png, .svg or .pdf; default: difference_from_<last RUN's name>.png)"
    add("--plot", type=kinds.path, metavar="FILE", help=figure)
    files = "where the report on strategies goes (default: here)"
    add("--output_dir", type=kinds.path, default=Path(), help=files)
    add("--wide", action="store_true", help="more columns, wider than 80")
    add("--json", action="store_true", help="print JSON instead of text")
    status = "RUN is a run of compare_strategies.sh: print its status"
    add("--status", action="store_true", help=status)
    args = parser.parse_args()
    if len(args.runs) > 26:
        raise UserError("Name at most 26 runs.")
    if len(args.runs) == 1 and not args.runs[0].is_dir():
        raise UserError(f"{args.runs[0]}: no such folder. Name two or more runs, or one folder.")
    return args


def describe(run) -> str:
    """Describe the outcome of one run in one line, for the terminal."""
    if not run.completed:
        return f"{run.status}: {run.reason}"
    if run.results["simulated_world_size"]:
        return f"completed: {human_bytes(run.numbers['memory_bytes'])} of model states"
    speed = f"{human_rate(run.numbers['samples_per_second'])} samples/s"
    return f"completed: {speed}, loss {run.losses[0].loss:.4f} to {run.losses[-1].loss:.4f}"


def write_file(path: Path, write) -> None:
    """Write a file of the report, and its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be written: {error.strerror}.") from error


def draw(comparison, args: kinds.Options) -> Path | None:
    """Draw the figure, and return its path; None without matplotlib or a writable folder."""
    first, last = (comparison.rows[number].runs for number in (0, -1))
    if comparison.of_strategies:
        path = args.output_dir / f"comparison_results_{comparison.name}.png"
    else:
        places = [run.place.parent if run.of_trainer else run.place for run in (first[0], last[0])]
        path = places[0] / f"difference_from_{places[1].resolve().name}.png"
    path = args.plot or path
    try:
        from support.report import plots  # importing matplotlib takes a second

        write_file(path, lambda p: write_atomically(p, lambda file: plots.draw(comparison, file)))
        return path
    except (ImportError, UserError, ValueError) as error:  # ValueError: an unknown ending of --plot
        problem = f"No figure, {path}: {first_line(error)}"
    if args.plot or comparison.of_strategies:
        raise UserError(problem)
    print(f"⚠️  {redact(problem)}", file=sys.stderr)
    return None


if __name__ == "__main__":
    process.run_command_line(main)
