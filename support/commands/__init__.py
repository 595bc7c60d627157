"""Commands of the training script that do not train.

check        --check: tests what a run needs of this machine and its network
prefetch     --prefetch: downloads the model and the dataset and tokenizes the dataset
prove        --prove: makes one step in several ways and compares them
show_sample  --show_sample: prints a training sequence as tokens
"""

from collections.abc import Callable


def command_of(args) -> Callable | None:
    """Return the command that the flags choose instead of training, to be called on all ranks.

    Returns:
        A function of (args, ctx) that returns the exit code; None to train.
    """
    if args.check:
        from support.commands.check import check

        return check
    if args.show_sample:
        from support.commands.show_sample import show_sample

        return show_sample
    return None
