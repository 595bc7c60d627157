#!/usr/bin/env python3
"""Compile DeepSpeed's C++ ops before the first run needs them. Nothing is compiled twice.

    python scripts/build_ops.py                    # for all strategies; make ops does the same
    python scripts/build_ops.py offload            # for one: only offload and infinity need any

On a cluster, run it on the login node, or on a compute node if its CPU differs. No GPU and no CUDA
toolkit are needed. The ops are in ~/.cache/torch_extensions (or TORCH_EXTENSIONS_DIR), in a folder
for each combination of versions and CPU. Exit codes: 0; 1 if an op cannot be compiled; 2 for wrong
usage.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process

if __name__ == "__main__":
    process.catch_signals()

from support.cli import argument_types as kinds
from support.errors import EXIT_FAILED, MissingRequirement
from support.strategies import ops, requirements
from support.tables import STRATEGIES


def main() -> None:
    """Read the arguments, and compile what is missing."""
    parser = kinds.Parser.of_script(__doc__)
    parser.add_argument("names", nargs="*", metavar="STRATEGY", help="a strategy, or an op's name")
    parser.add_argument("--verbose", action="store_true", help="show the compiler's output")
    args = parser.parse_args()
    every_op = ops.needed_ops(STRATEGIES["infinity"])
    for name in args.names:
        if name not in [*STRATEGIES, *every_op]:
            parser.error(f"{name} is neither a strategy nor one of {', '.join(every_op)}")
    names = args.names or ["infinity"]
    chosen = {op for name in names if name in STRATEGIES for op in ops.needed_ops(STRATEGIES[name])}
    wanted = [op for op in every_op if op in chosen | set(names)]
    end_compilers_with_this_process()
    try:
        requirements.check_builds([op for op in wanted if not ops.is_compiled(op)])
        is_complete = ops.build_ops(wanted, functools.partial(print, flush=True), args.verbose)
    except (MissingRequirement, OSError) as error:
        print(f"❌ {error}")
        is_complete = False
    if not is_complete:
        sys.exit(EXIT_FAILED)


def end_compilers_with_this_process() -> None:
    """Install a handler that ends the compilers when a signal ends this process."""
    import psutil

    def end(number: int, _frame) -> None:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


if __name__ == "__main__":
    process.run_command_line(main)
