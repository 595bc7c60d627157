"""The folders in which the Hugging Face libraries and this project cache files.

They are computed without huggingface_hub, which reads HF_HUB_OFFLINE once, when it is imported, and
whose import takes a second.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# What a run needs of a model: names of files in a snapshot, and "weights" unless they are drawn.
MODEL_FILES = {
    "config.json": r"config\.json",
    "tokenizer files": r"tokenizer\.json|vocab.*|.*\.model|.*\.tiktoken",
    "weights": r".*\.safetensors|pytorch_model.*\.bin",
}


def login_command() -> str:
    """Return the command that logs in to the hub; its name changed in huggingface_hub 0.34."""
    from importlib.metadata import version  # slow to import

    release = tuple(map(int, version("huggingface_hub").split(".")[:2]))
    return "hf auth login" if release >= (0, 34) else "huggingface-cli login"


def huggingface_home() -> Path:
    """Return the folder with the caches of the Hugging Face libraries (HF_HOME)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of tokenized datasets and of the embedded tokenizer (--cache_dir)."""
    return Path(cache_dir) if cache_dir else huggingface_home() / "distributed_training"


def cached_repository(kind: str, name: str | None) -> bool:
    """Return whether the cache holds a repository; True also for no repository.

    Args:
        kind: "models" or "datasets".
    """
    if name is None:
        return True
    if kind == "models":
        return any(_cached_model(name).glob("snapshots/*/*"))
    prepared = os.environ.get("HF_DATASETS_CACHE") or huggingface_home() / "datasets"
    names = name.replace("/", "___"), name.replace("/", "___").lower()  # of Arrow files
    return any((Path(prepared).expanduser() / part).is_dir() for part in names)


def _cached_model(name: str) -> Path:
    """Return the folder of a model in the hub's cache, whether or not it exists."""
    env = os.environ
    hub = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or huggingface_home() / "hub"
    return Path(hub).expanduser() / f"models--{name.replace('/', '--')}"


def missing_of_model(name: str, with_weights: bool, revision: str = "main") -> list[str]:
    """Return which kinds of files the cached snapshot of a model lacks, such as "weights".

    Other programs cache parts of a model. Empty also if the cache does not know the revision (a
    branch, a tag or a commit): the libraries decide.
    """
    folder = _cached_model(name)
    branch = folder / "refs" / revision
    commit = branch.read_text(encoding="utf-8").strip() if branch.is_file() else revision
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        return []
    # exists(): an interrupted download leaves dangling links.
    files = [file.name for file in snapshot.glob("*") if file.exists()]
    return [
        kind
        for kind, names in MODEL_FILES.items()
        if (with_weights or kind != "weights") and not any(re.fullmatch(names, f) for f in files)
    ]
