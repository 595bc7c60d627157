"""Caches: folders of prepared files that runs, users and hosts share, and those of Hugging Face.

A prepared folder is written once and verified at every use: its `meta.json` has the SHA-256 digests
of its files, and the facts that the writer stores about them.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from support import console
from support.errors import UserError
from support.files.atomic import read_json, sha256_of, start_folder, sync_tree

META = "meta.json"


class Cache:
    """A cache of folders of prepared files.

    Args:
        root: the folder that contains them, shared by all runs with the same --cache_dir.
    """

    def __init__(self, root: Path):
        self.root = root

    def get(self, name: str, write: Callable[[Path], dict]) -> tuple[Path, dict]:
        """Return a folder and the facts about it; it is written if it is missing or damaged.

        Args:
            name: of the folder; all runs must write the same files to a folder of this name.
            write: writes files to an empty folder, and returns the facts as a JSON object.
        Raises:
            UserError: the cache cannot be read or written. Errors of `write` are raised unchanged,
                except an OSError, which counts as an error of the cache.
        """
        folder = self.root / name
        is_damaged = os.path.lexists(folder)
        try:
            if is_damaged:
                return folder, _read(folder)
        except (OSError, ValueError, KeyError, TypeError) as damage:
            console.write(f"The cached folder {folder} is damaged ({damage}): writing it again.")
        try:
            return folder, self._write(folder, write, is_damaged)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # another folder would not help
                raise
            raise UserError(
                f"The cache {self.root} cannot be written ({error.strerror or error}): "
                "use --cache_dir."
            ) from error

    def _write(self, folder: Path, write: Callable[[Path], dict], replace: bool) -> dict:
        temporary = start_folder(folder)
        new = temporary.path / "new"
        try:
            facts = write(new)
            files = {path.name: {"sha256": sha256_of(path)} for path in sorted(new.iterdir())}
            (new / META).write_text(json.dumps({"facts": facts, "files": files}), encoding="utf-8")
            sync_tree(new)
            if replace:
                os.rename(folder, temporary.path / "old")
            try:
                os.rename(new, folder)
            except OSError:
                if not folder.is_dir():  # otherwise another run has written it meanwhile
                    raise
        finally:
            temporary.remove()
        return facts


def _read(folder: Path) -> dict:
    """Return the facts of a folder; raise an exception if its files are not those written."""
    meta = read_json(folder / META)
    for name, expected in meta["files"].items():
        if sha256_of(folder / name) != expected["sha256"]:
            raise ValueError(f"{name} was changed")
    return meta["facts"]


# -------------------------------------------------------------------- the caches of Hugging Face

LOGIN_COMMAND = "hf auth login"  # before huggingface_hub 0.34: huggingface-cli login
# What a run needs of a model: names of files in a snapshot, and "weights" unless they are drawn.
MODEL_FILES = {
    "config.json": r"config\.json",
    "tokenizer files": r"tokenizer\.json|vocab.*|.*\.model|.*\.tiktoken",
    "weights": r".*\.safetensors|pytorch_model.*\.bin",
}


def huggingface_home() -> Path:
    """Return the folder with the caches of the Hugging Face libraries (HF_HOME)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of tokenized datasets and of the embedded tokenizer (--cache_dir)."""
    return Path(cache_dir) if cache_dir else huggingface_home() / "distributed_training"


def has_dataset(name: str) -> bool:
    """Return whether the cache of the `datasets` library has a dataset."""
    prepared = os.environ.get("HF_DATASETS_CACHE") or huggingface_home() / "datasets"
    names = name.replace("/", "___"), name.replace("/", "___").lower()  # of Arrow files
    return any((Path(prepared).expanduser() / part).is_dir() for part in names)


def missing_of_model(name: str, with_weights: bool, revision: str | None) -> list[str]:
    """Return which files of a model the hub's cache lacks, such as "weights of gpt2".

    Other programs cache parts of a model. Call it after HF_HUB_OFFLINE is set, because
    huggingface_hub reads it once, when it is imported.
    """
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or not a name of the hub
        return [f"model {name}"]
    # exists(): an interrupted download leaves dangling links.
    files = [file.name for file in snapshot.iterdir() if file.exists()]
    return [
        f"{kind} of {name}"
        for kind, names in MODEL_FILES.items()
        if (with_weights or kind != "weights") and not any(re.fullmatch(names, f) for f in files)
    ]
