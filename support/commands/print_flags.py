"""--print_config: the flags of a run, which a run file may have."""

from typing import NoReturn

from support.cli.parse import CommandLine, read_command_line
from support.cli.run_file import print_config
from support.cluster.launch import Launch


def print_flags(argv: list[str], line: CommandLine, launch: Launch) -> NoReturn:
    """Print the flags with their sources, and exit.

    Flags that are auto have the values that the run would choose for the device of this process.

    Raises:
        UserError: the memory plan knows no such values.
    """
    if line.settings.parallelism.automatic:
        line = chosen_here(argv, line, launch)
    print_config(line.settings.flags(), line.sources)


def chosen_here(argv: list[str], line: CommandLine, launch: Launch) -> CommandLine:
    """Return the command line with the choice for the device of this process."""
    # They import torch.
    from support.cluster.context import DistContext
    from support.cluster.failures import FailureMonitor
    from support.cluster.stop import StopSignal
    from support.cluster.tuning import choose_device, choose_precision
    from support.report import automatic

    # Like a simulation of the ranks: no other process is asked.
    ctx = DistContext(launch, choose_device(launch), "fake", FailureMonitor(StopSignal()))
    ctx.precision = choose_precision(line.settings.training.precision, ctx.device)
    choice = automatic.choose(argv, line.settings, ctx).parallelism.choice
    return read_command_line(argv, chosen=choice)
