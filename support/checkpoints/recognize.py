"""Recognize checkpoints of other programs by the names of their files; see `foreign`."""

from __future__ import annotations

import re
from pathlib import Path


def newest_of_trainer(folder: Path) -> Path:
    """Return the newest checkpoint-N in a Trainer's output folder, or the folder itself."""
    found = {
        int(path.parent.name.removeprefix("checkpoint-")): path.parent
        for path in folder.glob("checkpoint-*/trainer_state.json")
        if re.fullmatch(r"checkpoint-[0-9]{1,12}", path.parent.name)
    }
    return found[max(found)] if found else folder


def deepspeed_folder(folder: Path) -> Path | None:
    """Return the folder with the files of a DeepSpeed checkpoint; `latest` may name it."""
    inner = named_in(folder / "latest") or folder
    return inner if any(inner.glob("*_states.pt")) else None


def named_in(file: Path) -> Path | None:
    """Return the folder next to a file whose name the file contains, or None."""
    name = file.read_text(errors="replace").strip() if file.is_file() else ""
    is_name = re.fullmatch(r"[\w.-]{1,255}", name) and name not in (".", "..")
    return file.parent / name if is_name and (file.parent / name).is_dir() else None


def fsdp_folders(folder: Path) -> list[Path]:
    """Return the folders with a `.metadata` of torch.distributed.checkpoint; accelerate has two."""
    inner = (folder / name for name in ("", "pytorch_model_fsdp_0", "optimizer_0"))
    return [path for path in inner if (path / ".metadata").is_file()]
