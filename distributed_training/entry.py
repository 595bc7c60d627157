"""From the command line to a process that may import torch, and from there to the end of the ranks.

Each check fails within a second, with one line that says what to do.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from distributed_training import console, process
from distributed_training.cli.check_run import check_run
from distributed_training.cli.checks import names_on_hub
from distributed_training.cli.choice import described
from distributed_training.cli.parse import CommandLine, read_command_line
from distributed_training.errors import EXIT_COMPLETED, UserError, explain
from distributed_training.hooks import Hooks
from distributed_training.rank_shares import AUTO
from distributed_training.ranks import launch as launching
from distributed_training.ranks import tuning
from distributed_training.settings.command import CommandSettings
from distributed_training.settings.data import DataSettings
from distributed_training.settings.model import ModelSettings
from distributed_training.settings.output import OutputSettings
from distributed_training.settings.settings import Hub, Settings

if TYPE_CHECKING:
    from torch import nn

    from distributed_training.ranks.context import DistContext
    from distributed_training.ranks.failures import FailureMonitor


def prepare_process(argv: list[str], hooks: Hooks) -> tuple[Settings, launching.Launch]:
    """Read the settings and the launcher's environment, run the first checks, tune the process.

    If a check fails, the process exits with one line and code 2. With --print_config it prints the
    flags, and with --prove and --prefetch it imports torch and does what they say; it then exits.

    Args:
        argv: the arguments of the program.
        hooks: the tools that take part in the run.
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
        line = compare_with_accelerate(read_command_line(argv))
        settings = line.settings
        if process.RESTARTED in os.environ:
            from distributed_training.ranks import restart  # of --auto_micro_batch

            settings = restart.restarted(line)
        quiet, verbose = settings.output.quiet, settings.debug.verbose  # also from a run file
        console.configure(launch.rank, quiet, verbose)
        refuse_launcher(settings.command, launch)
        require_hooks(settings, hooks)
        tuning.choose_hardware(settings.training.device)
        # Before the settings of this process, which the runs of --prove would inherit.
        run_other_command(line, launch, hooks)
        tuning.tune_process(
            launch, settings.model.compile, settings.training.deterministic, verbose, quiet
        )
        if settings.debug.simulate_gpus:
            launch = launching.simulated(launch, settings.debug.simulate_gpus)
        check_run(settings, is_restart=process.RESTARTED in os.environ)
        model, data, output = settings.model, settings.data, settings.output
        hub = find_hub(model, data, output, settings.command, launch)
        settings = replace(settings, hub=hub)
        for notice in line.notices if launch.is_main and not quiet else ():
            print(f"ℹ️  {notice}")
        if settings.command.prefetch and hooks.prefetch:
            sys.exit(hooks.prefetch(settings, launch))
    except UserError as error:
        exit_before_start(error, verbose)
    # The imports that follow create 2 million objects and no garbage: a sixth less CPU time.
    gc.disable()
    return settings, launch


def compare_with_accelerate(line: CommandLine) -> CommandLine:
    """Check that the flags have the choices of `accelerate launch`, if it started this process."""
    if process.ACCELERATE not in os.environ:
        return line
    from distributed_training.strategies import accelerate  # for its launcher only

    found = accelerate.check(line.settings.flags(), line.settings.strategy, os.environ)
    return replace(line, notices=line.notices + found)


def run_other_command(line: CommandLine, launch: launching.Launch, hooks: Hooks) -> None:
    """Do what --print_config and --prove ask for, and exit; return without these flags."""
    if line.settings.run_file.print_config:
        from distributed_training.print_flags import print_flags  # no run needs it

        print_flags(line, launch, hooks.choose)
    if line.settings.command.prove is not None and hooks.prove:
        sys.exit(hooks.prove(line.settings))


def refuse_launcher(command: CommandSettings, launch: launching.Launch) -> None:
    """Check that what runs in one process was not started by a launcher."""
    for flag in ("prove", "prefetch"):
        if getattr(command, flag) and launch.world_size > 1:
            raise UserError(f"--{flag} needs one process: start it with python, no launcher.")


def require_hooks(settings: Settings, hooks: Hooks) -> None:
    """Check that the program has the tools that the flags ask for."""
    command = settings.command
    needed = {
        "--prove": (command.prove is not None, hooks.prove),
        "--prefetch": (command.prefetch, hooks.prefetch),
        "--check": (command.check, hooks.check),
        "--show_sample": (command.show_sample, hooks.show_sample),
        "--replay": (command.replay is not None, hooks.replay),
        "--strategy auto or --batch_size auto": (
            bool(settings.parallelism.to_choose),
            hooks.choose,
        ),
        "--rank_shares auto": (settings.training.rank_shares == AUTO, hooks.create_balancer),
    }
    for flag, (is_given, hook) in needed.items():
        if is_given and hook is None:
            raise UserError(
                f"{flag} needs a tool that this program was started without: restore its folder "
                "in tools/, or leave the flag out."
            )


def prepare_for_failures(verbose: bool) -> None:
    """Protect the output, and handle stop signals and errors while libraries are imported."""
    process.protect_output()
    if process.RESTARTED in os.environ:
        from distributed_training.ranks import restart  # of --auto_micro_batch

        restart.handle_signals()
    else:
        process.catch_signals(process.ALSO_IF_IGNORED, launching.stopped_before_start)
    # A broken installation, or too little memory.
    sys.excepthook = lambda _kind, error, _traceback: exit_before_start(
        error, verbose or console.verbose
    )


def exit_before_start(error: BaseException, verbose: bool) -> NoReturn:
    """Report an error raised before the ranks can communicate, and exit with its exit code."""
    if process.RESTARTED in os.environ:
        from distributed_training.ranks import restart  # of --auto_micro_batch

        restart.record_end(explain(error))
    launching.exit_before_start(error, verbose)


def find_hub(
    model: ModelSettings,
    data: DataSettings,
    output: OutputSettings,
    command: CommandSettings,
    launch: launching.Launch,
) -> Hub:
    """Return what is known about the Hugging Face hub, which is asked if the run needs it.

    Raises:
        UserError: see `ask_hub`.
    """
    name, datasets = names_on_hub(model.model, data.dataset)
    if not (name or datasets or output.push_to_hub):
        os.environ["HF_HUB_OFFLINE"] = "1"
        return Hub(offline=True)
    from distributed_training.cli.hub import ask_hub  # its probe is for runs that need the hub

    return ask_hub(model, data, output, command, launch.is_main, launch.is_node_leader)


def run_on_all_ranks(
    setup_distributed: Callable[[Settings, launching.Launch, FailureMonitor], DistContext],
    train: Callable[[Settings, DistContext], nn.Module],
    settings: Settings,
    launch: launching.Launch,
    hooks: Hooks,
) -> NoReturn:
    """Call `setup_distributed(settings, launch, monitor)`, `train(settings, ctx)`; end all ranks.

    --check and --show_sample run instead of the training. The process ends with an exit code of
    distributed_training/errors.py. An error of one rank ends the others, and is reported once.

    Args:
        setup_distributed: initializes the process group, and returns the DistContext.
        train: returns the wrapped model.
        hooks: the tools that take part in the run.
    """
    # These import torch, which `prepare_process` must come before.
    from distributed_training.model.prepare import configure_transformers
    from distributed_training.ranks.all_ranks import run_together

    # The imported modules live as long as the process, so they need not be searched for garbage.
    gc.freeze()
    gc.enable()

    def work(ctx: DistContext) -> tuple[nn.Module | None, int]:
        command, chosen = settings.command, settings
        if settings.parallelism.to_choose and hooks.choose:
            try:
                chosen = hooks.choose(settings, ctx)
                if choice := chosen.parallelism.choice:
                    console.print0(described(settings.parallelism.to_choose, choice))
            except UserError as error:
                if not (command.check or command.show_sample):
                    raise
                console.warn(str(error))  # they use what is provisional
        chosen.strategy.check_options(chosen.debug.verbose)
        if command.check and hooks.check:
            return None, hooks.check(chosen, ctx)
        if command.show_sample and hooks.show_sample:
            return None, hooks.show_sample(chosen, ctx)
        configure_transformers(chosen.data.isolates_documents, ctx)
        if (step := command.replay) and hooks.replay:
            with hooks.replay.in_temporary_folder(chosen, ctx, step) as repeating:
                return train(repeating, ctx), EXIT_COMPLETED
        return train(chosen, ctx), EXIT_COMPLETED

    meet = partial(setup_distributed, settings, launch)
    run_together(meet, work, partial(exit_before_start, verbose=settings.debug.verbose))
