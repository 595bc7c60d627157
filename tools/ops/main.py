"""Compile DeepSpeed's C++ ops before the first run needs them. Nothing is compiled twice.

    python scripts/build_ops.py                    # for all strategies; make ops does the same
    python scripts/build_ops.py offload            # for one: only offload and infinity need any

On a cluster, run it on the login node, or on a compute node if its CPU differs. No GPU and no CUDA
toolkit are needed. The ops are in ~/.cache/torch_extensions (or TORCH_EXTENSIONS_DIR), in a folder
for each combination of versions and CPU. Exit codes: 0; 1 if an op cannot be compiled; 2 for wrong
usage.
"""

import argparse
import sys

from distributed_training.cli.parser import Parser
from distributed_training.errors import EXIT_FAILED, MissingRequirement
from distributed_training.strategies.deepspeed import ops, requirements
from distributed_training.strategies.table import STRATEGIES


def main() -> None:
    """Read the arguments, and compile what is missing."""
    parser = Parser.of_script(__doc__)
    every_op = [*dict.fromkeys(op for row in STRATEGIES.values() for op in row.needed_ops())]
    choices = [*STRATEGIES, *every_op]
    parser.add_argument("names", nargs="*", metavar="STRATEGY", help="a strategy, or an op's name")
    # A run passes its process, so that the compilation ends when the run does.
    parser.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parent:
        ops.end_with(args.parent)
    names = args.names or every_op
    if unknown := [name for name in names if name not in choices]:
        parser.error(f"{unknown[0]} is not one of {', '.join(choices)}")
    chosen = {op for name, row in STRATEGIES.items() if name in names for op in row.needed_ops()}
    wanted = [op for op in every_op if op in chosen | set(names)]
    try:
        requirements.check_builds([op for op in wanted if not ops.is_compiled(op)])
        if ops.build_ops(wanted):
            return
    except MissingRequirement as error:
        print(f"❌ {error}")
    except OSError as error:
        print(f"❌ {error}: set TORCH_EXTENSIONS_DIR to a folder that can be written")
    sys.exit(EXIT_FAILED)
