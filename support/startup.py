"""The start of a run, before it imports torch: flags, first checks, settings of the process.

Each check fails within a second, with one line that says what to do.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from support import commands, console, process
from support.cli.check_run import check_run
from support.cli.hub import ask_hub
from support.cli.parse import read_command_line
from support.cluster import launch as launching
from support.cluster import restart, tuning
from support.commands.print_flags import print_flags
from support.errors import EXIT_COMPLETED, UserError
from support.settings.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from support.cluster.context import DistContext
    from support.cluster.failures import FailureMonitor


def start(argv: list[str]) -> tuple[Settings, launching.Launch]:
    """Read the settings and the launcher's environment, run the first checks, tune the process.

    If a check fails, the process exits with one line and code 2. With --print_config it prints the
    flags, and with --prove and --prefetch it imports torch and does what they say; it then exits.

    Returns:
        The settings, which cannot be changed, and this process's place in the run.
    """
    verbose = "--verbose" in argv
    prepare_for_failures(verbose)
    try:
        if not os.path.isdir(os.curdir):
            raise UserError("The current folder was removed: change to another one.")
        # Before the settings: the DeepSpeed file's train_batch_size depends on the world size.
        launch = launching.detect_launch()
        line = read_command_line(argv)
        settings = line.settings
        if process.RESTARTED in os.environ:
            settings = restart.restarted(line)
        quiet, verbose = settings.output.quiet, settings.debug.verbose  # also from a run file
        console.configure(launch.rank, quiet, verbose)
        commands.refuse_launcher(settings.command, launch)
        tuning.choose_hardware(settings.training.device)
        if settings.run_file.print_config:
            print_flags(line, launch)
        if settings.command.prove is not None:
            # Before the settings of this process, which the runs of --prove would inherit.
            from support.commands import prove  # imports torch

            sys.exit(prove.prove(settings))
        tuning.tune_process(
            launch, settings.model.compile, settings.training.deterministic, verbose, quiet
        )
        if settings.debug.simulate_gpus:
            launch = launching.simulated(launch, settings.debug.simulate_gpus)
        check_run(settings, is_restart=process.RESTARTED in os.environ)
        sections = settings.model, settings.data, settings.output, settings.command
        settings = replace(settings, hub=ask_hub(*sections, launch.is_main, launch.is_node_leader))
        for notice in line.notices if launch.is_main and not quiet else ():
            print(f"ℹ️  {notice}")
        if settings.command.prefetch:
            from support.commands.prefetch import prefetch  # imports torch

            prefetch(settings, launch)  # does not return
    except UserError as error:
        restart.exit_before_start(error, verbose)
    # The imports that follow create 2 million objects and no garbage: a sixth less CPU time.
    gc.disable()
    return settings, launch


def prepare_for_failures(verbose: bool) -> None:
    """Protect the output, and handle stop signals and errors while libraries are imported."""
    process.protect_output()
    if process.RESTARTED in os.environ:
        restart.handle_signals()
    else:
        process.catch_signals(process.ALSO_IF_IGNORED, launching.stopped_before_start)
    # A broken installation, or too little memory.
    sys.excepthook = lambda _kind, error, _traceback: restart.exit_before_start(
        error, verbose or console.verbose
    )


def replay(*arguments: Any) -> nn.Module:
    """Call `support.replay.command.replay`, which most runs do without."""
    from support.replay import command

    return command.replay(*arguments)


def run_on_all_ranks(
    setup_distributed: Callable[[Settings, launching.Launch, FailureMonitor], DistContext],
    train: Callable[[Settings, DistContext], nn.Module],
    settings: Settings,
    launch: launching.Launch,
) -> NoReturn:
    """Call `setup_distributed(settings, launch, monitor)`, `train(settings, ctx)`; end all ranks.

    --check and --show_sample run instead of the training. The process ends with an exit code of
    support/errors.py. An error of one rank ends the others, and is reported once.

    Args:
        setup_distributed: initializes the process group, and returns the DistContext.
        train: returns the wrapped model.
    """
    from support.choice import choose
    from support.cluster.all_ranks import run_together
    from support.model.prepare import configure_transformers

    # The imported modules live as long as the process, so they need not be searched for garbage.
    gc.freeze()
    gc.enable()

    def work(ctx: DistContext) -> tuple[nn.Module | None, int]:
        ctx.precision = tuning.choose_precision(settings.training.precision, ctx.device)
        try:
            chosen = choose.choose(settings, ctx)
        except UserError as error:
            if not (settings.command.check or settings.command.show_sample):
                raise
            chosen = settings
            console.warn(str(error))
        if settings.parallelism.to_choose and chosen.parallelism.choice:
            choose.say(settings.parallelism.to_choose, chosen.parallelism.choice)
        chosen.parallelism.configured.check_options(settings.debug.verbose)
        if command := commands.command_of(settings.command):
            return None, command(chosen, ctx)
        configure_transformers(settings.data.isolates_documents, ctx)
        if step := settings.command.replay:
            from support.replay.folder import redirected

            with redirected(chosen, ctx, step) as repeating:
                return train(repeating, ctx), EXIT_COMPLETED
        return train(chosen, ctx), EXIT_COMPLETED

    run_together(partial(setup_distributed, settings, launch), work, settings.debug.verbose)
