#!/usr/bin/env python3
"""Write one HTML page about a run, or about a comparison of strategies.

    python scripts/report.py runs/mine
    python scripts/report.py comparison_runs/tiny-gpt2 --out comparison.html

The page is a single file without scripts and without links to other files, for a mail or a web
server; without matplotlib it has no charts. Secrets are replaced by ***. Exit codes: 0; 2 for wrong
usage, a folder without a run, or a page that cannot be written.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process, programs
from support.cli.parser import Parser
from support.errors import UserError
from support.files.atomic import write_text
from support.settings import flag_types


def main() -> None:
    """Read the arguments, and write the page."""
    parser = Parser.of_script(__doc__)
    run = "output folder of a run, or comparison_runs/NAME"
    parser.add_argument("run", type=flag_types.path, metavar="RUN", help=run)
    where = "the page (default: report.html in RUN)"
    parser.add_argument("--out", type=flag_types.path, metavar="FILE", help=where)
    args = parser.parse_args()
    from support.report.page import page_of  # --help must be fast

    page, target = page_of(args.run), args.out or args.run / "report.html"
    for notice in page.notices:
        print(f"⚠️  {notice}", file=sys.stderr)
    try:
        write_text(target, page.text)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}. Use --out FILE.") from error
    print(f"📁 {target}")
    if page.outliers:
        *found, command = page.outliers
        print("📍 Steps that stand out:", *found, sep="\n   ")
        print(f"🔁 To look at the first one: {command}")
    elif page.is_run:
        print("📍 No step stands out.")


if __name__ == "__main__":
    process.catch_signals()
    programs.run_command_line(main, printed=False)
