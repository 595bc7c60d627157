"""The start of a run, before it imports torch: arguments, first checks, settings of the process.

Each check fails within a second, with one line that says what to do.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from support import process
from support.cli import paths
from support.cli.arguments import Arguments
from support.cli.hub import ask_hub
from support.cli.parse import as_typed, ignored_flags, parse_arguments
from support.cli.run_file import as_yaml
from support.cluster import launch as launching
from support.cluster import tuning
from support.cluster.launch import Launch
from support.cluster.restart import continue_restarted
from support.errors import EXIT_COMPLETED, MissingRequirement, UserError
from support.known_models import EMBEDDED_MODEL
from support.memory import architectures
from support.optimizers import OPTIMIZERS
from support.redaction import redact


def start(argv: list[str]) -> tuple[Arguments, Launch]:
    """Read the arguments and the launcher's environment, run the first checks, tune the process.

    If a check fails, the process exits with one line and code 2. With --print_config it prints the
    flags, and with --prefetch it imports torch and downloads what the run reads; both then exit.

    Returns:
        The arguments, which cannot be changed, and this process's place in the run.
    """
    process.protect_output()
    verbose = "--verbose" in argv
    # For errors while libraries are imported: a broken installation, or too little memory.
    sys.excepthook = lambda _kind, error, _traceback: launching.exit_before_start(error, verbose)
    try:
        if not os.path.isdir(os.curdir):
            raise UserError("The current folder was removed: change to another one.")
        # Before the arguments: the DeepSpeed file's train_batch_size depends on the world size.
        launch = launching.detect_launch()
        args = continue_restarted(parse_arguments(argv))
        if args.print_config:
            print(redact(as_yaml(args)), end="")
            process.check_output()
            sys.exit(EXIT_COMPLETED)
        if args.prove is not None:
            prove(args, launch)  # does not return
        tuning.tune_process(args, launch)
        if args.simulate_gpus:
            launch = launching.simulated(launch, args.simulate_gpus)
        check_model_path(args)
        paths.check_data_paths(args)
        if args.prefetch and launch.world_size > 1:
            raise UserError(
                "--prefetch fills the cache from one process: start it with python, "
                "without a launcher."
            )
        # These two write no results, and may run where the run's disks and packages are missing.
        if not (args.prefetch or args.show_sample):
            check_run(args)
        hub_offline, hub_problem = ask_hub(args, launch.is_main, launch.is_node_leader)
        args = args.replace(hub_offline=hub_offline, hub_problem=hub_problem)
        for line in ignored_flags(args) if launch.is_main and not args.quiet else ():
            print(f"ℹ️  {line}")
        if args.prefetch:
            from support.commands.prefetch import prefetch  # imports torch

            prefetch(args, launch)  # does not return
    except UserError as error:
        error.args = (as_typed(str(error), argv),)
        launching.exit_before_start(error, verbose)
    # The imports that follow create 2 million objects and no garbage. Searching them for garbage
    # takes a sixth of the time: 5.5 s of CPU time with the collector, 4.6 s without.
    gc.disable()
    return args, launch


def prove(args: Arguments, launch: Launch) -> NoReturn:
    """Run --prove, before the settings of this process, which its children would inherit.

    Raises:
        UserError: a launcher started this process, or a run failed.
    """
    if launch.world_size > 1:
        raise UserError(
            "--prove starts its own ranks: start it with python, without a launcher, and give "
            f"their number: --prove {launch.world_size}."
        )
    from support.commands import prove  # imports torch

    sys.exit(prove.prove(args))


def end_of_imports() -> None:
    """Enable the garbage collector, which `start` has disabled.

    It need not search the objects of the imported modules, which live as long as the process.
    """
    gc.freeze()
    gc.enable()


def check_run(args: Arguments) -> None:
    """Check what the run needs: writable folders, an NVMe folder, packages."""
    # --check may be given with the folders of an existing run. A restarted program has its own.
    if not args.check and process.RESTARTED not in os.environ:
        paths.check_output_dir(args)
        paths.check_export_folder(args)
        paths.check_logging_dir(args)
    if args.resume and not Path(args.resume).exists():
        raise UserError(f"--resume {args.resume}: there is no such checkpoint.")
    paths.check_nvme_path(args)
    check_packages(args)


def check_packages(args: Arguments) -> None:
    """Check that the optional packages that the flags need are installed."""
    packages = {
        **{f"--report_to {name}": name for name in args.report_to},
        "--lora_r": "peft" if args.lora_r else None,
        f"--optim {args.optim}": OPTIMIZERS[args.optim].package,
        "--load_in_4bit": "bitsandbytes" if args.load_in_4bit else None,
    }
    for flag, package in packages.items():
        if package and importlib.util.find_spec(package) is None:
            raise MissingRequirement(f"{flag} needs {package}: pip install {package}.")


def check_model_path(args: Arguments) -> None:
    """Check that a model given as a folder exists and is a Hugging Face model.

    Raises:
        UserError: there is no such folder, or it holds adapters only, no config.json or an invalid
            one; or --model_revision is given for a model that is not on the hub.
    """
    is_local = paths.is_local_model(args.model)
    if args.model_revision and (is_local or args.model == EMBEDDED_MODEL):
        raise UserError(
            f"--model_revision is for models on the hub, and --model {args.model} is none: leave "
            "it out."
        )
    if not is_local:
        return
    folder = Path(args.model)
    if not folder.is_dir():
        raise UserError(f"--model {args.model}: no such folder.")
    if not (folder / "config.json").is_file():
        problem = "the folder has no config.json, so it holds no Hugging Face model."
        if (folder / "hf" / "config.json").is_file():
            problem = f"this is the folder of a run, whose trained model is in {folder / 'hf'}."
        if (folder / "adapter_config.json").is_file():
            problem = (
                "the folder holds adapters only. Export the whole model with --merge_lora, or "
                "continue the run that trained them (--resume, with its --model and --lora_r)."
            )
        elif (folder / "hf" / "config.json").is_file():
            problem = f"it is the folder of a run: use its model, --model {folder / 'hf'}."
        raise UserError(f"--model {args.model}: {problem}")
    architectures.check_config(str(folder / "config.json"))
