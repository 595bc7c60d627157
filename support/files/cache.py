"""A cache of folders that several runs, users and hosts may share.

A folder is written once and verified at every use: its `meta.json` has the sizes and SHA-256
digests of its files, and the facts that the writer stores about them.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

from support.errors import UserError
from support.files.atomic import read_json, sha256_of, start_folder, sync, sync_tree

META = "meta.json"


class Damaged(Exception):
    """An error of a cached folder whose files are not those that were written; has the reason."""


class Cache:
    """A cache of folders of prepared files.

    Args:
        root: the folder that contains them, shared by all runs with the same --cache_dir.
        temporary: paths that the run removes if it ends early; includes the folder in progress.
        print0: prints a line for the user.
    """

    def __init__(self, root: Path, temporary: list[str], print0: Callable[[str], None]):
        self.root, self.temporary, self.print0 = root, temporary, print0

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
        except PermissionError as error:
            problem = f"This user may not read the cache {error.filename}: use --cache_dir."
            raise UserError(problem) from error
        except Damaged as damage:
            self.print0(f"The cached folder {folder} is damaged ({damage}): writing it again.")
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
        self.temporary += temporary.paths
        new = temporary.path / "new"
        try:
            facts, files = write(new), {}
            for path in sorted(new.iterdir()):
                files[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
            (new / META).write_text(json.dumps({"facts": facts, "files": files}), encoding="utf-8")
            sync_tree(new)
            if replace:
                os.rename(folder, temporary.path / "old")
            try:
                os.rename(new, folder)
            except OSError:
                if not folder.is_dir():  # otherwise another run has written it meanwhile
                    raise
            sync(folder.parent)
        finally:
            temporary.remove()
            self.temporary[:] = [path for path in self.temporary if path not in temporary.paths]
        return facts


def _read(folder: Path) -> dict:
    """Return the facts of a folder, after checking its files.

    Raises:
        Damaged: the files of the folder are not those that were written.
        PermissionError: this user may not read the folder.
    """
    try:
        meta = read_json(folder / META)
        for name, expected in meta["files"].items():
            actual_size = (folder / name).stat().st_size
            if actual_size != expected["size"]:
                raise Damaged(f"{name} has {actual_size:,} bytes instead of {expected['size']:,}")
            if sha256_of(folder / name) != expected["sha256"]:
                raise Damaged(f"{name} was changed")
        return meta["facts"]
    except PermissionError:
        raise
    except OSError as error:
        name = Path(error.filename or folder).name
        raise Damaged(f"{name}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{META} is incomplete") from error
