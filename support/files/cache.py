"""A cache of folders that several runs, users and hosts may share.

A folder is written once and verified at every use. Its `meta.json` has the sizes and SHA-256
digests of its files, and the facts that the writer stores about them. A folder that does not match
its `meta.json` is written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from support.errors import UserError
from support.files.atomic import TemporaryFolder, digest_of_json, read_json, sha256_of, sync

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
        if os.path.lexists(folder):
            try:
                return folder, _read(folder)
            except Damaged as damage:
                self.print0(f"The cached folder {folder} is damaged ({damage}): writing it again.")
            except PermissionError as error:
                problem = f"This user may not read the cache {error.filename}: use --cache_dir."
                raise UserError(problem) from error
        try:
            return folder, self._write(folder, write)
        except OSError as error:
            raise UserError(
                f"The cache {self.root} cannot be written ({error.strerror or error}): "
                "use --cache_dir."
            ) from error

    def _write(self, folder: Path, write: Callable[[Path], dict]) -> dict:
        self.root.mkdir(parents=True, exist_ok=True)
        # Not tempfile.mkdtemp: its mode 0700 would keep other users out.
        temporary = TemporaryFolder(self.root, ".writing-")
        self.temporary += temporary.paths
        try:
            facts = write(temporary.path)
            _write_meta(temporary.path, facts)
            _publish(temporary.path, folder)
        finally:
            temporary.remove()
            self.temporary[:] = [path for path in self.temporary if path not in temporary.paths]
        return facts


def _publish(written: Path, folder: Path) -> None:
    """Rename a written folder to its final name; a damaged folder there is replaced."""
    try:
        os.rename(written, folder)
    except OSError:  # another run has written it meanwhile, or it is damaged
        # The files are replaced one by one: another run that uses the folder can open every file
        # at any time, and its memory maps stay valid.
        for file in sorted(written.iterdir(), key=lambda file: file.name == META):
            os.replace(file, folder / file.name)
        sync(folder)
    sync(folder.parent)


def _read(folder: Path) -> dict:
    """Return the facts of a folder, after checking its files.

    Raises:
        Damaged: the files of the folder are not those that were written.
        PermissionError: this user may not read the folder.
    """
    try:
        meta = read_json(folder / META)
        if meta["sha256"] != digest_of_json({"facts": meta["facts"], "files": meta["files"]}):
            raise Damaged(f"{META} was changed")
        for name, expected in meta["files"].items():
            actual_size = (folder / name).stat().st_size
            if actual_size != expected["size"]:
                raise Damaged(f"{name} has {actual_size:,} bytes instead of {expected['size']:,}")
            if sha256_of(folder / name) != expected["sha256"]:
                raise Damaged(f"{name} was changed")
    except PermissionError:
        raise
    except OSError as error:
        name = Path(error.filename or folder).name
        raise Damaged(f"{name}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{META} is incomplete") from error
    return meta["facts"]


def _write_meta(folder: Path, facts: dict) -> None:
    """Flush a folder's files to disk, and write `meta.json` with their sizes and digests."""
    files = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        files[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    content = {"facts": facts, "files": files}
    meta = json.dumps({"sha256": digest_of_json(content), **content})
    (folder / META).write_text(meta, encoding="utf-8")
    sync(folder / META)
    sync(folder)
