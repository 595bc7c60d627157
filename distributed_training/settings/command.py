"""What the program does instead of a run, and the file of its settings."""

from dataclasses import dataclass
from typing import ClassVar

from distributed_training.settings import flag_types
from distributed_training.settings.fields import flag, switch


@dataclass(frozen=True, kw_only=True)
class CommandSettings:
    """What the program does instead of a run."""

    title: ClassVar[str] = "Instead of a run"

    check: bool = switch(
        False,
        "try everything that the run needs of this machine and its network, and train nothing",
        excludes="simulate_gpus",
    )
    prefetch: bool = switch(
        False,
        "download and tokenize what the run needs, and train nothing",
        excludes="check show_sample simulate_gpus",
    )
    show_sample: bool = switch(
        False,
        "print the first training sequence, and which of its tokens are trained",
        excludes="check simulate_gpus",
    )
    # All ways of --prove make the first step on the same sequences, in fp32.
    prove: int | bool | None = flag(
        None,
        flag_types.ranks,
        "make one step in several ways, also on N ranks and with Trainer, and compare it",
        metavar="N",
        nargs="?",
        const=True,
        excludes=(
            "check prefetch show_sample eval_only simulate_gpus resume streaming load_in_4bit"
        ),
    )
    replay: int | None = flag(
        None,
        flag_types.steps,
        "repeat the steps of the run in --output_dir up to this one, and show its sequences, "
        "their losses and gradients; the run stays as it is",
        metavar="STEP",
        excludes="check prefetch show_sample prove eval_only simulate_gpus",
        needs="output_dir",
    )


@dataclass(frozen=True, kw_only=True)
class RunFileSettings:
    """The file with settings, and the command that prints one."""

    title: ClassVar[str] = "Run file"

    config: str | None = flag(
        None,
        flag_types.place,
        "YAML with these flags; the command line overrides it",
        metavar="FILE",
    )
    print_config: bool = switch(
        False, "print every setting with its source, as such a file, and exit"
    )
