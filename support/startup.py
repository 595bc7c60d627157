"""The start of a run, before it imports torch: flags, first checks, settings of the process.

Each check fails within a second, with one line that says what to do.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from support import console, process
from support.cli import checks
from support.cli.hub import ask_hub
from support.cli.parse import read_command_line
from support.cluster import launch as launching
from support.cluster import restart, tuning
from support.cluster.launch import Launch
from support.errors import (
    EXIT_COMPLETED,
    EXIT_PREEMPTED,
    MissingRequirement,
    Preempted,
    UserError,
    explain,
    redact,
)
from support.files.user_files import check_readable, read_json
from support.known_models import EMBEDDED_MODEL
from support.optimizers import OPTIMIZERS
from support.settings.command import CommandSettings
from support.settings.model import ModelSettings
from support.settings.settings import Settings
from support.strategies.strategy import FlagValues

if TYPE_CHECKING:
    from torch import nn

    from support.cluster.context import DistContext
    from support.cluster.failures import FailureMonitor

# Files of a model folder that a run reads; a Trainer's checkpoint also has others.
MODEL_FILES = """
    config.json generation_config.json model*.safetensors* pytorch_model*.bin* tokenizer* vocab*
    merges.txt special_tokens_map.json added_tokens.json *.jinja *.model *.tiktoken
    """.split()


def start(argv: list[str]) -> tuple[Settings, Launch]:
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
            changed = restart.restarted_with(settings.parallelism.configured)
            settings = settings.replace(**changed)
        quiet = settings.output.quiet
        console.configure(launch.rank, quiet, verbose)
        if settings.run_file.print_config:
            print_config(settings.flags(), line.sources)
        refuse_launcher(settings.command, launch)
        tuning.choose_hardware(settings.training.device)
        if settings.command.prove is not None:
            # Before the settings of this process, which the runs of --prove would inherit.
            from support.commands import prove  # imports torch

            sys.exit(prove.prove(settings))
        tuning.tune_process(
            launch, settings.model.compile, settings.training.deterministic, verbose, quiet
        )
        if settings.debug.simulate_gpus:
            launch = launching.simulated(launch, settings.debug.simulate_gpus)
        check_run(settings)
        settings = replace(settings, hub=ask_hub(settings, launch.is_main, launch.is_node_leader))
        for notice in line.notices if launch.is_main and not quiet else ():
            print(f"ℹ️  {notice}")
        if settings.command.prefetch:
            from support.commands.prefetch import prefetch  # imports torch

            prefetch(settings, launch)  # does not return
    except UserError as error:
        exit_before_start(error, verbose)
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
    sys.excepthook = lambda _kind, error, _traceback: exit_before_start(error, verbose)


def refuse_launcher(command: CommandSettings, launch: Launch) -> None:
    """Check that the commands of one process were not started by a launcher."""
    for flag in ("prove", "prefetch"):
        if getattr(command, flag) and launch.world_size > 1:
            raise UserError(f"--{flag} needs one process: start it with python, no launcher.")


def print_config(flags: FlagValues, sources: dict[str, str]) -> NoReturn:
    """Print the flags as a run file, and exit."""
    from support.cli.run_file import as_yaml

    print(redact(as_yaml(flags, sources)), end="")
    process.check_output()
    sys.exit(EXIT_COMPLETED)


def exit_before_start(error: BaseException, verbose: bool) -> NoReturn:
    """Report an error raised before the ranks can communicate, and exit with its exit code."""
    if process.RESTARTED in os.environ:
        restart.record_end(explain(error))
    launching.exit_before_start(error, verbose)


def run_on_all_ranks(
    setup_distributed: Callable[[Settings, Launch, FailureMonitor], DistContext],
    train: Callable[[Settings, DistContext], nn.Module],
    settings: Settings,
    launch: Launch,
) -> NoReturn:
    """Call `setup_distributed(settings, launch, monitor)`, `train(settings, ctx)`; end all ranks.

    --check and --show_sample run instead of the training. The process ends with an exit code of
    support/errors.py. An error of one rank ends the others, and is reported once.

    Args:
        setup_distributed: initializes the process group, and returns the DistContext.
        train: returns the wrapped model.
    """
    from support.cluster.failures import FailureMonitor, StopSignal
    from support.cluster.tuning import choose_precision
    from support.commands import command_of
    from support.model.prepare import configure_transformers

    # The imported modules live as long as the process, so they need not be searched for garbage.
    gc.freeze()
    gc.enable()
    monitor = FailureMonitor(StopSignal())  # of this process, which ends once
    if process.RESTARTED in os.environ:
        monitor.record_with(restart.record_end)  # until the run opens its folder
    try:
        ctx = setup_distributed(settings, launch, monitor)
    except BaseException as error:
        if monitor.is_watching:
            monitor.end_failed(error)
        exit_before_start(error, settings.debug.verbose)
    try:
        settings.parallelism.configured.check_options(settings.debug.verbose)
        ctx.precision = choose_precision(settings.training.precision, ctx.device)
        if command := command_of(settings.command):
            monitor.end_together(None, command(settings, ctx))  # does not return
        configure_transformers(settings.data.isolates_documents, ctx)
        model = train(settings, ctx)
    except Preempted as preempted:
        monitor.end_together(preempted.model, EXIT_PREEMPTED)
    except BaseException as error:  # also KeyboardInterrupt: no other rank may wait for this one
        monitor.end_failed(error)
    monitor.end_together(model, EXIT_COMPLETED)


def check_run(settings: Settings) -> None:
    """Check what the run needs: model, data, writable folders, a checkpoint, packages."""
    check_model_path(settings.model)
    checks.check_data_paths(settings.data)
    # These two write no results, and may run where the run's disks and packages are missing.
    if settings.command.prefetch or settings.command.show_sample:
        return
    # --check may be given with the folders of an existing run. A restarted program has its own.
    if not settings.command.check and process.RESTARTED not in os.environ:
        eval_only = settings.training.eval_only
        checks.check_output_dir(settings.output, eval_only)
        checks.check_export_folder(settings.output, eval_only, settings.model.model, settings.data)
    if settings.output.resume and not Path(settings.output.resume).exists():
        raise UserError(f"--resume {settings.output.resume}: there is no such checkpoint.")
    checks.check_nvme_path(settings.parallelism.nvme_path)
    packages = {
        **{f"--report_to {name}": name for name in settings.output.report_to},
        "--lora_r": "peft" if settings.model.lora_r else None,
        f"--optim {settings.training.optim}": OPTIMIZERS[settings.training.optim].package,
        "--load_in_4bit": "bitsandbytes" if settings.model.load_in_4bit else None,
    }
    for flag, package in packages.items():
        if package and importlib.util.find_spec(package) is None:
            raise MissingRequirement(f"{flag} needs {package}: pip install {package}.")


def check_model_path(model_settings: ModelSettings) -> None:
    """Check that a model given as a folder exists and is a Hugging Face model.

    Raises:
        UserError: there is no such folder, or it holds no config.json or an invalid one; or
            --model_revision is given for a model that is not on the hub.
    """
    model = model_settings.model
    is_local = checks.is_local_model(model)
    if model_settings.model_revision and (is_local or model == EMBEDDED_MODEL):
        raise UserError(
            f"--model_revision is for models on the hub, and --model {model} is not one: "
            "leave it out."
        )
    if is_local and not Path(model).is_dir():
        raise UserError(f"--model {model}: no such folder.")
    if is_local and not Path(model, "config.json").is_file():
        raise UserError(
            f"--model {model}: the folder has no config.json, so it is not a complete model. "
            "A run exports its model to hf/; --merge_lora exports adapters as a complete model."
        )
    if is_local:
        read_json("--model", f"{model}/config.json")
        check_readable("--model", model, MODEL_FILES)
