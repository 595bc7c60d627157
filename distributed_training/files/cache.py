"""Caches: folders of prepared files that runs, users and hosts share, and those of Hugging Face.

A prepared folder is written once and verified at every use: its `meta.json` has the SHA-256 digests
of its files, and the facts that the writer stores about them.
"""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

from distributed_training import console
from distributed_training.errors import UserError
from distributed_training.files.atomic import read_json, sha256_of, start_folder, sync_tree

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
            # Another folder would not help.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.EFBIG):
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


def huggingface_home() -> Path:
    """Return the folder with the caches of the Hugging Face libraries (HF_HOME)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of tokenized datasets and of the embedded tokenizer (--cache_dir)."""
    return Path(cache_dir) if cache_dir else huggingface_home() / "distributed_training"
