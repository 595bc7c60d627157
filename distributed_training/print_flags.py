"""--print_config: the flags of a run, which a run file may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from distributed_training.cli.choice import FOLLOWS
from distributed_training.cli.parse import CommandLine, complete
from distributed_training.cli.run_file import print_config
from distributed_training.errors import UserError
from distributed_training.ranks.launch import Launch

if TYPE_CHECKING:
    from distributed_training.ranks.context import DistContext
    from distributed_training.settings.settings import Settings


Choose = Callable[["Settings", "DistContext"], "Settings"]  # see hooks.Hooks.choose


def print_flags(line: CommandLine, launch: Launch, choose: Choose | None) -> NoReturn:
    """Print the flags with their sources, and exit.

    Flags that are auto have the values that a run of this process alone would choose.

    Args:
        choose: chooses the values of flags that are auto.
    Raises:
        UserError: there is no such value, or there are several processes.
    """
    if line.settings.parallelism.to_choose and choose:
        line = chosen_here(line, launch, choose)
    flags, sources = line.settings.flags(), line.sources
    shown = {n: None if sources.get(n) == FOLLOWS else value for n, value in flags.items()}
    print_config(shown, sources)


def chosen_here(line: CommandLine, launch: Launch, choose: Choose) -> CommandLine:
    """Return the command line with the choice for the device of this process."""
    if launch.world_size > 1:
        raise UserError(
            "--print_config with auto needs one process, because the ranks do not meet: start it "
            "with python. A run prints what it chooses, and records it in results.json."
        )
    # They import torch.
    from distributed_training.ranks.context import DistContext
    from distributed_training.ranks.failures import FailureMonitor
    from distributed_training.ranks.stop import StopSignal
    from distributed_training.ranks.tuning import choose_device, choose_precision

    device, monitor = choose_device(launch), FailureMonitor(StopSignal())
    precision = choose_precision(line.settings.training.precision, device)
    ctx = DistContext(launch, device, "gloo", monitor, precision=precision)
    return complete(line.settings.as_given, choose(line.settings, ctx).parallelism.choice)
