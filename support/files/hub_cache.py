"""The folders in which the Hugging Face libraries and this project cache files.

They are computed without huggingface_hub: its import takes a second, reads HF_HUB_OFFLINE only
once, and fails with an invalid HF_ENDPOINT.
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def login_command() -> str:
    """Return the command that logs in to the hub; its name changed in huggingface_hub 0.34."""
    from importlib.metadata import version

    from packaging.version import Version

    renamed = Version(version("huggingface_hub")) >= Version("0.34")
    return "hf auth login" if renamed else "huggingface-cli login"


def huggingface_home() -> Path:
    """Return the folder with the caches of the Hugging Face libraries (HF_HOME)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of tokenized datasets and of the embedded tokenizer (--cache_dir)."""
    if cache_dir:
        return Path(cache_dir)
    return huggingface_home() / "distributed_training"


def cached_repository(kind: str, name: str | None) -> bool:
    """Return whether the cache holds a repository; True also for no repository.

    Args:
        kind: "models" or "datasets".
        name: of the repository, or None.
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
    """Return which kinds of files the cached snapshot of a model lacks.

    Other programs cache parts of a model, for example the weights only.

    Args:
        revision: a branch, a tag or a commit.
    Returns:
        Descriptions for a message, such as "tokenizer files"; empty also if the cache does not know
        the revision.
    """
    folder = _cached_model(name)
    try:
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        return []  # the cache holds a commit without a branch; the libraries decide
    # exists(): an interrupted download leaves dangling links.
    files = {file.name for file in snapshot.glob("*") if file.exists()}
    kinds = {
        "config.json": r"config\.json",
        "tokenizer files": r"tokenizer\.json|vocab.*|.*\.model|.*\.tiktoken",
        "weights": r".*\.safetensors|pytorch_model.*\.bin",
    }
    if not with_weights:
        del kinds["weights"]
    return [kind for kind, names in kinds.items() if not any(re.fullmatch(names, f) for f in files)]
