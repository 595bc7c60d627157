"""Commands of the training script that do not train.

check             --check: tests what a run needs of this machine and its network
check_line        the result of one check
check_machine     checks of the software, the GPU and the limits, and of the hub
check_disks       checks of the disks
check_memory      the memory estimate next to the memory of the machine
check_network     the communication between the ranks
print_flags       --print_config: prints the flags of a run as a run file
prefetch          --prefetch: downloads the model and the dataset and tokenizes the dataset
prove             --prove: makes one step in several ways and compares them
prove_difference  how two of these steps differ
show_sample       --show_sample: prints a training sequence as tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from support.errors import UserError
from support.settings.command import CommandSettings

if TYPE_CHECKING:
    from support.cluster.context import DistContext
    from support.cluster.launch import Launch
    from support.settings.settings import Settings


def refuse_launcher(command: CommandSettings, launch: Launch) -> None:
    """Check that the commands of one process were not started by a launcher."""
    for flag in ("prove", "prefetch"):
        if getattr(command, flag) and launch.world_size > 1:
            raise UserError(f"--{flag} needs one process: start it with python, no launcher.")


def command_of(command: CommandSettings) -> Callable[[Settings, DistContext], int] | None:
    """Return --check or --show_sample, to be called on all ranks instead of training, or None.

    It is a function of (settings, ctx) that returns the exit code.
    """
    if command.check:
        from support.commands.check import check

        return check
    if command.show_sample:
        from support.commands.show_sample import show_sample

        return show_sample
    return None
