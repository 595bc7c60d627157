"""Commands of the training script that do not train.

check        --check: tests what a run needs of this machine and its network
prefetch     --prefetch: downloads the model and the dataset and tokenizes the dataset
prove        --prove: makes one step in several ways and compares them
show_sample  --show_sample: prints a training sequence as tokens
"""

from collections.abc import Callable

from support.settings.settings import Settings


def command_of(settings: Settings) -> Callable | None:
    """Return --check or --show_sample, to be called on all ranks instead of training, or None.

    It is a function of (args, ctx) that returns the exit code.
    """
    if settings.command.check:
        from support.commands.check import check as command
    elif settings.command.show_sample:
        from support.commands.show_sample import show_sample as command
    else:
        return None
    return command
