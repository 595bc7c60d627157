"""Plant each fault of the museum in a copy of the project, and run the check that shows it.

    python -m tools.faults                             # all faults, and 20 seeds without a fault,
                                                       # and the fault of a DeepSpeed release
    python -m tools.faults mean_of_means --seeds 1     # one fault, and one seed without it
    python -m tools.faults --list                      # the names of the faults
    make faults                                  # all, then renew docs/FAULTS.md and its figure

Exit codes: 0 if every fault is caught and no check raises an alarm without a fault, 1 if not, 2 for
wrong usage.
"""

import time

from distributed_training import programs
from distributed_training.cli.parser import Parser
from distributed_training.errors import EXIT_COMPLETED, EXIT_FAILED, UserError
from distributed_training.settings import flag_types
from tools.faults.catalogue import FAULTS
from tools.faults.fault import Fault

SEEDS = 20


def main() -> int:
    """Run the museum, print what was found, and return the exit code."""
    parser = Parser.of_script(__doc__)
    parser.prog = "python -m tools.faults"
    parser.add_argument("names", metavar="NAME", nargs="*", help="a fault (default: all)")
    seeds = "runs of each check without a fault, with other seeds and data"
    parser.add_argument("--seeds", type=flag_types.natural_int, default=SEEDS, help=seeds)
    write = "write tools/faults/results.json, docs/FAULTS.md and docs/faults.png (all faults only)"
    parser.add_argument("--write", action="store_true", help=write)
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    args = parser.parse_args()
    faults = chosen(args.names)
    if args.list:
        print("\n".join(f"{fault.name}: {fault.title}" for fault in faults))
        return EXIT_COMPLETED
    if args.write and args.names:
        raise UserError("--write needs the results of all faults: leave out the names.")
    # Imports what runs the programs.
    from tools.faults import bench, deepspeed_release, run

    with bench.workshop_in_temporary_folder() as workshop:
        results = run.run_all(faults, args.seeds, workshop)
        # Before the release is shown, which may fail.
        print(f"\n{run.as_table(results)}\n{run.summary(results)}", flush=True)
        if not args.names:
            started = time.monotonic()
            results.release = deepspeed_release.show(workshop, run.SEED)
            results.seconds += time.monotonic() - started
    failed = bool(results.missed or results.alarms)
    if args.write and not failed:
        from tools.faults import page

        page.write(run.as_json(results))
    return EXIT_FAILED if failed else EXIT_COMPLETED


def chosen(names: list[str]) -> list[Fault]:
    """Return the faults with these names; all without a name."""
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"{unknown[0]} is not a fault: --list prints the names.")
    return [known[name] for name in names] or list(FAULTS)


if __name__ == "__main__":
    programs.run_command_line(main)
