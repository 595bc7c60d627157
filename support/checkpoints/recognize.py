"""Recognize checkpoints of other programs by the names of their files; see `foreign`."""

from __future__ import annotations

import re
from pathlib import Path

from support.checkpoints.format import is_inner_path
from support.files.atomic import open_regular

ACCELERATE_FSDP = ("pytorch_model_fsdp_0", "optimizer_0")  # folders that accelerate writes


def format_of(folder: Path) -> str | None:
    """Return the program that wrote the checkpoint in a folder, or None if it is not known."""
    folder = newest_of_trainer(folder)
    if deepspeed_folder(folder):
        return "DeepSpeed"
    if fsdp_folders(folder):
        return "FSDP"
    return "Trainer" if (folder / "trainer_state.json").is_file() else None


def newest_of_trainer(folder: Path) -> Path:
    """Return the newest checkpoint-N in a Trainer's output folder, or the folder itself."""
    found = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in folder.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-[0-9]{1,12}", path.name)
        and (path / "trainer_state.json").is_file()
    }
    return found[max(found)] if found else folder


def deepspeed_folder(folder: Path) -> Path | None:
    """Return the folder with the files of a DeepSpeed checkpoint; `latest` may name it."""
    if (folder / "latest").is_file():
        name, is_folder = folder_named_in(folder / "latest")
        folder = folder / name if is_folder else folder
    return folder if any(folder.glob("*_states.pt")) else None


def folder_named_in(file: Path) -> tuple[str, bool]:
    """Return the text of a file, and whether it can be the name of a folder next to it."""
    with open_regular(file) as opened:
        name = opened.read(1000).decode(errors="replace").strip()
    return name, is_inner_path(name) and "/" not in name and len(name) <= 255


def fsdp_folders(folder: Path) -> list[Path]:
    """Return the folders with a `.metadata` of torch.distributed.checkpoint."""
    inner = (folder / name for name in ("", *ACCELERATE_FSDP))
    return [path for path in inner if (path / ".metadata").is_file()]
