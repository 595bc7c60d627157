"""Folders of prepared files that several runs, users and hosts may share: written once, verified at
every use.

A folder has its files and `meta.json`, which holds their sizes and SHA-256 digests and what the
writer says of them. A folder that does not match its `meta.json` is written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from support.errors import UserError
from support.files.atomic import TemporaryFolder, digest_of_json, read_json, sha256_of, sync_folder

META = "meta.json"


class Damaged(Exception):
    """A folder of the cache does not hold what was written; the text says what is wrong."""


class Cache:
    """Folders of prepared files by name.

    Args:
        root: the folder that holds them, shared by all runs with the same --cache_dir.
        temporary: gets the folder that is written to, to be removed if the run ends meanwhile.
        say: prints a line for the user.
    """

    def __init__(self, root: Path, temporary: list[str], say: Callable[[str], None]):
        self.root, self.temporary, self.say = root, temporary, say

    def get(self, name: str, write: Callable[[Path], dict]) -> tuple[Path, dict]:
        """The folder `name` and the facts about it: found and verified, or written now.

        Args:
            name: must change whenever the content would, so that all runs write the same files
                under it.
            write: fills an empty folder with files and returns the facts, as JSON.
        Raises:
            UserError: the cache cannot be read or written; or what `write` raises.
        """
        folder = self.root / name
        try:
            facts = self._read(folder)
        except Damaged as damage:
            self.say(f"The cached folder {folder} is damaged ({damage}): writing it again.")
            facts = None
        return folder, self._write(folder, write) if facts is None else facts

    def _read(self, folder: Path) -> dict | None:
        """The facts of a folder that is whole; None if there is no such folder.

        Raises:
            Damaged: it is there, and its files are not those that were written.
            UserError: this user may not read it.
        """
        try:
            folder.stat()
            facts, files = _read_meta(folder / META)
            for name, wanted in files.items():
                _verify(folder / name, **wanted)
        except PermissionError as error:
            raise UserError(
                f"The cache {error.filename} may not be read by this user: use --cache_dir."
            ) from error
        except OSError as error:
            if not os.path.lexists(folder):
                return None  # or there can be none, which shows when it is written
            raise Damaged(
                f"{Path(error.filename or folder).name}: {error.strerror or error}"
            ) from error
        return facts

    def _write(self, folder: Path, write: Callable[[Path], dict]) -> dict:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # Not tempfile.mkdtemp: its mode is 0700 whatever the umask says, and other users could
            # not read the folder.
            temporary = TemporaryFolder(self.root, ".writing-")
        except OSError as error:
            raise self._not_writable(error) from error
        self.temporary += temporary.paths
        try:
            facts = write(temporary.path)
            _write_meta(temporary.path, facts)
            self._publish(temporary.path, folder)
        except OSError as error:
            raise self._not_writable(error) from error
        finally:
            temporary.remove()
            self.temporary[:] = [path for path in self.temporary if path not in temporary.paths]
        return facts

    def _publish(self, written: Path, folder: Path) -> None:
        """Give a written folder its name, in the place of a damaged one if there is one."""
        try:
            os.rename(written, folder)
        except OSError:
            if self._is_whole(folder):
                return  # another run was faster
            # Of a damaged folder each file is replaced by itself: a run that uses the folder
            # meanwhile finds every file at every moment, and keeps what it has mapped.
            for file in sorted(written.iterdir(), key=lambda file: file.name == META):
                os.replace(file, folder / file.name)
            sync_folder(folder)
        sync_folder(self.root)

    def _is_whole(self, folder: Path) -> bool:
        try:
            return self._read(folder) is not None
        except Damaged:
            return False

    def _not_writable(self, error: OSError) -> UserError:
        return UserError(
            f"The cache {self.root} cannot be written ({error.strerror or error}): use --cache_dir."
        )


def _read_meta(path: Path) -> tuple[dict, dict]:
    """The facts, and {name: {size, sha256}} of the files."""
    try:
        meta = read_json(path)
        content = {"facts": meta["facts"], "files": meta["files"]}
        whole = meta["sha256"] == digest_of_json(content)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path.name} is not whole") from error
    if not whole:
        raise Damaged(f"{path.name} was changed")
    return content["facts"], content["files"]


def _verify(path: Path, size: int, sha256: str) -> None:
    """
    Raises:
        Damaged: the file is not as it was written.
        OSError: it is not there, or cannot be read.
    """
    found = path.stat().st_size
    if not path.is_file() or found != size:
        raise Damaged(f"{path.name} has {found:,} bytes instead of {size:,}")
    if sha256_of(path) != sha256:
        raise Damaged(f"{path.name} was changed")


def _write_meta(folder: Path, facts: dict) -> None:
    """Flush a folder's files to disk, and write their sizes and digests."""
    files = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        files[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    content = {"facts": facts, "files": files}
    with open(folder / META, "w", encoding="utf-8") as file:
        json.dump({"sha256": digest_of_json(content), **content}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
