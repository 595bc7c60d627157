"""Checks of the files and folders that the flags name, before anything else is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support.cli.arguments import Arguments, datasets_of
from support.cli.ds_config import configured_strategy
from support.errors import UserError
from support.files.folders import files_of
from support.files.user_files import read_text

DATA_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz")
EVENT_FILES = "events.out.tfevents.*"  # TensorBoard's


def is_local_model(name: str) -> bool:
    """Return whether --model is a folder or is written like a path, and is no name on the hub."""
    return os.path.isdir(name) or name.startswith((".", "/")) or name.count("/") > 1


def is_local_dataset(name: str) -> bool:
    """Return whether --dataset is a file or folder, or is written like one; else it is a name."""
    if name in ("pydocs", "wikitext"):
        return False
    return (
        os.path.exists(name)
        or name.startswith((".", "/"))
        or name.endswith(DATA_SUFFIXES)
        or name.count("/") > 1
    )


def check_data_paths(args: Arguments) -> None:
    """Check that files and folders of data, and the chat template, exist and can be read.

    Raises:
        UserError: a file is missing, not readable or empty, --include has no folder, or a flag for
            datasets of the hub is given for another one.
    """
    local = [name for name, _ in datasets_of(args) if is_local_dataset(name)]
    paths = [("--dataset", name) for name in local]
    paths += [("--validation_file", args.validation_file)] if args.validation_file else []
    for flag, name in paths:
        for file in files_of(Path(name), f"{flag} {name}", args.include):
            if not os.access(file, os.R_OK):
                raise UserError(f"{flag} {name}: {file} may not be read by this user.")
        if os.path.isfile(name) and not os.path.getsize(name):
            raise UserError(f"{flag} {name} is empty.")
    _check_hub_flags(args)
    if args.include and not any(Path(name).is_dir() for _, name in paths):
        raise UserError(
            f"--include {args.include} chooses among the files of a folder, and there is none: "
            "leave it out."
        )
    if args.chat_template:
        read_text("--chat_template", args.chat_template)


def _check_hub_flags(args: Arguments) -> None:
    """Check that flags for datasets of the hub have one to apply to.

    Raises:
        UserError: there is none; or there are several, and each would need its own value.
    """
    hub = [name for name, _ in datasets_of(args) if name != "pydocs" and not is_local_dataset(name)]
    for flag in ("train_split", "eval_split", "dataset_revision"):
        if getattr(args, flag) and not hub:
            raise UserError(
                f"--{flag} is for datasets of the hub, and --dataset {args.dataset} is none: leave "
                "it out (--validation_file and --validation_split choose what is evaluated)."
            )
    for flag in ("dataset_config", "dataset_revision"):
        if getattr(args, flag) and len(hub) > 1:
            raise UserError(f"--{flag} is for one dataset of the hub, and there are {len(hub)}.")


def check_output_dir(args: Arguments) -> None:
    """Check that --output_dir is writable, and holds no other run unless the flags allow it."""
    if args.output_dir is None:
        return
    folder = Path(args.output_dir)
    check_place("--output_dir", folder)
    if not (args.overwrite or args.resume is not None) and holds_a_run(folder):
        raise UserError(
            f"--output_dir {folder} holds another run: --resume continues it, --overwrite "
            "replaces it; or name another folder."
        )


def check_place(flag: str, folder: Path) -> None:
    """Check that a folder exists and is writable, or can be created.

    Args:
        flag: the flag that names it, for messages.
        folder: the folder; its parents need not exist.
    """
    for ancestor in (folder.absolute(), *folder.absolute().parents):
        if ancestor.is_symlink() and not ancestor.exists():
            raise UserError(
                f"{flag} {folder}: {ancestor} is a link to nothing, or to itself: "
                "name another folder."
            )
        if ancestor.exists():
            break
    if not ancestor.is_dir():
        raise UserError(f"{flag} {folder}: {ancestor} is a file: name a folder.")
    if not os.access(ancestor, os.W_OK):
        raise UserError(f"{flag} {folder}: {ancestor} is not writable.")


def holds_a_run(folder: Path) -> bool:
    """Return whether a folder holds a run, other than one that failed before it trained.

    A results.json that cannot be read counts as a run.
    """
    results = folder / "results.json"
    if not results.is_file():  # reading a pipe would block
        return os.path.lexists(results)
    try:
        status = json.loads(results.read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True
    trained = (folder / "checkpoints").exists() or any(
        file.stat().st_size for file in folder.glob("metrics.jsonl")
    )
    return status != "failed" or trained


def check_export_folder(args: Arguments) -> None:
    """Check the folder of the export, which is replaced as a whole.

    Raises:
        UserError: the folder is not writable; it is or contains something that the run needs; or it
            is not empty, unless it holds an earlier export and --overwrite or --resume is given.
    """
    if args.no_export or args.eval_only or not (args.export_hf or args.output_dir):
        return
    folder = Path(args.export_hf or f"{args.output_dir}/hf").absolute()
    description = f"--export_hf {args.export_hf}" if args.export_hf else f"The export, {folder},"
    if not folder.is_file():
        check_place("--export_hf" if args.export_hf else "The export,", folder)
    needed = [
        ("the current folder", "."),
        ("--output_dir", args.output_dir),
        ("--resume", args.resume),
        ("--model", args.model if is_local_model(args.model) else None),
        *(("--dataset", name) for name, _ in datasets_of(args) if is_local_dataset(name)),
    ]
    for name, path in needed:
        if path and folder.resolve() in (needed_path := Path(path).resolve(), *needed_path.parents):
            raise UserError(
                f"{description} would replace {name}: name another folder with --export_hf."
            )
    if folder.exists() and (not folder.is_dir() or os.path.ismount(folder)):
        raise UserError(
            f"{description} is a {'file' if folder.is_file() else 'mount point'}: "
            "name a folder in it or next to it."
        )
    if args.export_hf and folder.is_dir() and any(folder.iterdir()):
        described = (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
        exported = described and (folder / "README.md").is_file()
        if not exported or not (args.overwrite or args.resume is not None):
            raise UserError(
                f"{description} is not empty: name another folder"
                + ("; or --overwrite." if exported else ".")
            )


def check_logging_dir(args: Arguments) -> None:
    """Check that --logging_dir is writable and has no curves of another run.

    TensorBoard would show them as part of this run.

    Raises:
        UserError: it is not writable, or has curves and neither --resume nor --overwrite is given.
    """
    if args.logging_dir is None or "tensorboard" not in args.report_to:
        return
    folder = Path(args.logging_dir)
    check_place("--logging_dir", folder)
    if not (args.overwrite or args.resume is not None) and any(folder.glob(EVENT_FILES)):
        raise UserError(
            f"--logging_dir {folder} holds the curves of another run: name another folder, "
            "or --overwrite."
        )


def check_nvme_path(args: Arguments) -> None:
    """Check that infinity's folder exists; `make_nvme_folder` checks its size later."""
    if (
        configured_strategy(args).uses_nvme
        and args.nvme_path is not None
        and not Path(args.nvme_path).is_dir()
    ):
        raise UserError(
            f"--nvme_path {args.nvme_path}: no such folder. Create it, "
            "or name a folder on a local NVMe disk."
        )
