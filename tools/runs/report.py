"""Write one HTML page about a run, or about a comparison of strategies.

    python scripts/report.py runs/mine
    python scripts/report.py comparison_runs/tiny-gpt2 --out comparison.html

The page is a single file without scripts and without links to other files, for a mail or a web
server; without matplotlib it has no charts. Secrets are replaced by ***. Exit codes: 0; 2 for wrong
usage, a folder without a run, or a page that cannot be written.
"""

import sys

from distributed_training.cli.parser import Parser
from distributed_training.console import visible
from distributed_training.errors import UserError
from distributed_training.files.atomic import write_text
from distributed_training.settings import flag_types


def main() -> None:
    """Read the arguments, and write the page."""
    parser = Parser.of_script(__doc__)
    run = "output folder of a run, or comparison_runs/NAME"
    parser.add_argument("run", type=flag_types.path, metavar="RUN", help=run)
    where = "the page (default: report.html in RUN)"
    parser.add_argument("--out", type=flag_types.path, metavar="FILE", help=where)
    args = parser.parse_args()
    from tools.runs.page import page_of  # --help must be fast

    page, target = page_of(args.run), args.out or args.run / "report.html"
    for notice in page.notices:
        print(visible(f"⚠️  {notice}"), file=sys.stderr)
    try:
        write_text(target, page.text)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}. Use --out FILE.") from error
    print(f"📁 {target}")
    if page.outliers:
        *found, command = page.outliers
        print("📍 Steps that stand out:", *found, sep="\n   ")
        print(visible(f"🔁 To look at the first one: {command}"))
    elif page.is_run:
        print("📍 No step stands out.")
