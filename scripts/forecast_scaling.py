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
from support.errors import UserError
from support.text_tables import text_table
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
    print(forecast(args))


def forecast(args) -> str:
    """Return the table of step times, and of how much faster each number of ranks is than one."""
    from support.report.cost import Network, read_step

    step = read_step(args.alone, args.together)
    given = {64 * MB: args.bandwidth, MB: args.bandwidth_1mib}
    bandwidth = {
        message: [GB * speed for speed in speeds * (3 // len(speeds))]
        for message, speeds in given.items()
        if speeds
    }
    network = Network.measured(args.latency_ranks, args.latency / 1e6, bandwidth)
    rows = []
    for ranks in args.ranks:
        row = [str(ranks)]
        for micro_batches in args.accumulation:
            alone, _ = step.seconds(1, micro_batches, network)
            seconds, sending = step.seconds(ranks, micro_batches, network)
            faster = ranks * alone / seconds
            row += [f"{seconds:.3f} s", f"{sending / seconds:.0%}", f"{faster:.1f}×"]
        rows.append(row)
    headers = ["ranks"]
    for micro_batches in args.accumulation:
        headers.append(f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}\nstep")
        headers += ["\nsending", "\nspeed"]
    return text_table(rows, headers)


if __name__ == "__main__":
    process.run_command_line(main)
