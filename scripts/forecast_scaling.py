#!/usr/bin/env python3
"""Forecast the step time on more ranks, from two short runs and the speed of the network.

    python real_model_example.py --strategy zero2 --max_steps 12 --output_dir runs/alone
    torchrun --nproc_per_node=2 real_model_example.py --strategy zero2 --max_steps 12 \\
        --output_dir runs/together
    python scripts/forecast_scaling.py runs/alone runs/together --bandwidth 0.111 --latency 239

The second run shows what a step sends, on any network, also between two processes of a laptop.
`real_model_example.py --check` on two or more hosts measures bandwidth and latency. Exit codes: 0;
2 for wrong usage, or runs that do not fit together.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import process

if __name__ == "__main__":
    process.catch_signals()

from support.cli import argument_types as kinds
from support.console import text_table
from support.errors import UserError
from support.report.cost import Network, read_step
from support.units import GB, MB


def main() -> None:
    """Read the arguments and print the forecast."""
    parser = kinds.Parser.of_script(__doc__)
    add = parser.add_argument
    add("alone", type=kinds.path, metavar="ALONE", help="folder of a run on one rank")
    add("together", type=kinds.path, metavar="TOGETHER", help="of the same run on several ranks")
    speed = "the three numbers in GB/s that --check prints, or one for all"
    rate = kinds.positive_float
    add("--bandwidth", type=rate, required=True, nargs="+", metavar="GB/S", help=speed)
    small = "those that it prints for messages of 1 MiB (default: as with 64 MiB)"
    add("--bandwidth_1mib", type=rate, nargs="+", metavar="GB/S", help=small)
    latency = "µs that --check prints, on --latency_ranks ranks (default: %(default)s)"
    add("--latency", type=kinds.natural_float, default=0.0, metavar="US", help=latency)
    of = "ranks of that --check (default: %(default)s)"
    add("--latency_ranks", type=kinds.ranks, default=2, metavar="N", help=of)
    more = "ranks to forecast (default: 1 2 4 8 16)"
    add("--ranks", type=kinds.ranks, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help=more)
    steps = "micro-batches per step (default: 1 8)"
    add("--accumulation", type=kinds.batch, nargs="+", default=[1, 8], metavar="N", help=steps)
    args = parser.parse_args()
    for name in ("bandwidth", "bandwidth_1mib"):
        if len(getattr(args, name) or [0]) not in (1, 3):
            raise UserError(f"--{name} takes one number, or those of the three collectives.")
    if args.latency_ranks < 2:
        raise UserError("--latency_ranks must be 2 or more: one rank sends nothing.")
    step = read_step(args.alone, args.together)
    given = {64 * MB: args.bandwidth, MB: args.bandwidth_1mib or []}
    bandwidth = {
        message: [GB * speed for speed in speeds * (3 // len(speeds))]
        for message, speeds in given.items()
        if speeds
    }
    network = Network.measured(args.latency_ranks, args.latency / 1e6, bandwidth)
    headers, rows = ["ranks"], [[str(ranks)] for ranks in args.ranks]
    for micro_batches in args.accumulation:
        plural = "es" * (micro_batches > 1)
        headers += [f"{micro_batches} micro-batch{plural}\nstep", "\nsending", "\nspeed"]
        alone, _ = step.seconds(1, micro_batches, network)
        for ranks, row in zip(args.ranks, rows, strict=True):
            seconds, sending = step.seconds(ranks, micro_batches, network)
            row += [
                f"{seconds:.3f} s",
                f"{sending / seconds:.0%}",
                f"{ranks * alone / seconds:.1f}×",
            ]
    print(text_table(rows, headers))


if __name__ == "__main__":
    process.run_command_line(main)
