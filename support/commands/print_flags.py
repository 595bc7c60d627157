"""--print_config: the flags of a run, which a run file may have."""

from typing import NoReturn

from support.cli.choice import FOLLOWS
from support.cli.parse import CommandLine, complete
from support.cli.run_file import print_config
from support.cluster.launch import Launch
from support.errors import UserError


def print_flags(line: CommandLine, launch: Launch) -> NoReturn:
    """Print the flags with their sources, and exit.

    Flags that are auto have the values that a run of this process alone would choose.

    Raises:
        UserError: there is no such value, or there are several processes.
    """
    if line.settings.parallelism.to_choose:
        line = chosen_here(line, launch)
    flags, sources = line.settings.flags(), line.sources
    shown = {n: None if sources.get(n) == FOLLOWS else value for n, value in flags.items()}
    print_config(shown, sources)


def chosen_here(line: CommandLine, launch: Launch) -> CommandLine:
    """Return the command line with the choice for the device of this process."""
    if launch.world_size > 1:
        raise UserError(
            "--print_config with auto needs one process, because the ranks do not meet: start it "
            "with python. A run prints what it chooses, and records it in results.json."
        )
    # They import torch.
    from support.choice.choose import choose
    from support.cluster.context import DistContext
    from support.cluster.failures import FailureMonitor
    from support.cluster.stop import StopSignal
    from support.cluster.tuning import choose_device, choose_precision

    ctx = DistContext(launch, choose_device(launch), "gloo", FailureMonitor(StopSignal()))
    ctx.precision = choose_precision(line.settings.training.precision, ctx.device)
    return complete(line.settings.as_given, choose(line.settings, ctx).parallelism.choice)
