"""Compare runs: find where the losses begin to differ from the first run's, and the likely cause.

    python scripts/compare_runs.py runs/a runs/b
    python scripts/compare_runs.py runs/a trainer_output/checkpoint-500/trainer_state.json
    python scripts/compare_runs.py comparison_runs/tiny-gpt2

Each RUN is an output folder (results.json, metrics.jsonl), or the trainer_state.json of Hugging
Face's Trainer, whose losses are means over its logging_steps. The figure goes into the first run's
folder (or --plot FILE). A single RUN is the folder of compare_strategies.sh, with its runs in
<strategy>/<repeat>/: the report is also written to comparison_results_<name>.txt, .json, .md, .png.

Exit codes: 0 if all losses and gradient norms agree that the runs have in common; 1 if some differ,
none could be compared, or a strategy did not complete (unless it was skipped); 2 for wrong usage,
or a folder or file without a run; with --status, 3 if the run did not complete.
"""

import json
import sys
from functools import partial
from pathlib import Path

from distributed_training.cli.parser import Options, Parser
from distributed_training.console import visible
from distributed_training.errors import EXIT_COMPLETED, UserError, first_line, redact
from distributed_training.files.atomic import write_atomically, write_text
from distributed_training.settings import flag_types

EXIT_NOT_COMPLETED = 3


def main() -> int:
    """Print the comparison, and write its files; return the exit code."""
    args = parse()
    # Not at the top: --help must be fast.
    from distributed_training.records import compare, loss_figure
    from tools.runs import comparison_text

    if args.status:
        return print_status(args.runs[0])
    if len(args.runs) == 1:
        comparison = compare.read_comparison(args.runs[0], args.tolerance)
        if not comparison.runs:
            raise UserError(f"{args.runs[0]} holds no <strategy>/<repeat>/results.json.")
        report = args.output_dir / f"comparison_results_{comparison.name}"
        figure = report.with_name(f"{report.name}.png")
    else:
        comparison = compare.compare_runs(*args.runs, tolerance=args.tolerance)
        first, last = (
            run.place.parent if run.of_trainer else run.place
            for run in (comparison.runs[0], comparison.runs[-1])
        )
        figure = first / f"difference_from_{last.resolve().name}.png"
    text = redact(comparison_text.as_text(comparison, args.wide))
    data = redact(json.dumps(comparison_text.as_json(comparison), indent=2))
    print(data if args.json else visible(text), end="\n" if args.json else "", flush=True)
    files, problem = {}, ""
    if comparison.compared or (comparison.of_strategies and comparison.reference):
        if problem := loss_figure.why_no_figure():
            print(f"⚠️  There is no figure: {problem}", file=sys.stderr)
        else:
            files[args.plot or figure] = partial(write_atomically, write=partial(draw, comparison))
    if comparison.of_strategies:
        markdown = redact(comparison_text.as_markdown(comparison, with_figure=not problem))
        for suffix, content in {".txt": text, ".json": f"{data}\n", ".md": markdown}.items():
            files[report.with_name(report.name + suffix)] = partial(write_text, text=content)
    for file, write in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file)
        except (OSError, ValueError) as error:  # ValueError: an unknown ending of --plot
            reason = getattr(error, "strerror", None) or first_line(error)
            if args.plot or comparison.of_strategies:
                raise UserError(f"{file} cannot be written: {reason}.") from error
            print(f"⚠️  No figure: {file} cannot be written: {reason}", file=sys.stderr)
        else:
            print(f"📁 {file}", file=sys.stderr if args.json else sys.stdout)
    return comparison.exit_code


def draw(comparison, path: Path) -> None:
    """Draw the figure."""
    from tools.runs import plots

    plots.draw(comparison, path)


def print_status(place: Path) -> int:
    """Print the row of a run, or the header of a comparison's rows; return the exit code."""
    from distributed_training.records import compare
    from tools.runs import comparison_text

    if (place / "planned.txt").is_file():
        print(comparison_text.progress_header(compare.planned_of(place)))
        return EXIT_COMPLETED
    run, planned = compare.read_row(place), compare.planned_of(place.parent.parent)
    print(visible(redact(comparison_text.progress_row(run, planned))))
    return EXIT_COMPLETED if run.status == "completed" else EXIT_NOT_COMPLETED


def parse() -> Options:
    """Parse and check the command line."""
    parser = Parser.of_script(__doc__)
    add = parser.add_argument
    add(
        "runs",
        type=flag_types.path,
        metavar="RUN",
        nargs="+",
        help="two or more runs, or one folder",
    )
    tolerance = "largest relative difference of equal losses; of gradient norms ten times as much "
    tolerance += "(default: what rounding explains in the precision, such as 1e-4 in fp32)"
    add("--tolerance", type=flag_types.natural_float, help=tolerance)
    figure = "the figure (.png, .svg or .pdf; default: difference_from_<last RUN's name>.png)"
    add("--plot", type=flag_types.path, metavar="FILE", help=figure)
    files = "where the report on strategies goes (default: here)"
    add("--output_dir", type=flag_types.path, default=Path(), help=files)
    add("--wide", action="store_true", help="more columns, wider than 80")
    add("--json", action="store_true", help="print JSON instead of text")
    status = (
        "RUN is a run of compare_strategies.sh: print its row of the table; of the folder of all "
    )
    status += "runs: the header of these rows"
    add("--status", action="store_true", help=status)
    args = parser.parse_args()
    if len(args.runs) == 1 and not args.runs[0].is_dir():
        raise UserError(f"{args.runs[0]}: no such folder. Name two or more runs, or one folder.")
    return args
