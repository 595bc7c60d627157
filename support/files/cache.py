"""A cache of folders that several runs, users and hosts may share.

A folder is written once and verified at every use. Its `meta.json` has the sizes and SHA-256
digests of its files, and the facts that the writer stores about them. A folder that does not match
its `meta.json` is written again.
"""

from __future__ import annotations

import contextlib
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
        try:
            facts = self._read(folder)
        except Damaged as damage:
            self.print0(f"The cached folder {folder} is damaged ({damage}): writing it again.")
            facts = None
        return folder, self._write(folder, write) if facts is None else facts

    def _read(self, folder: Path) -> dict | None:
        """Return the facts of a complete folder; None if it does not exist.

        Raises:
            Damaged: the files of the folder are not those that were written.
            UserError: this user may not read the folder.
        """
        try:
            folder.stat()
            facts, files = _read_meta(folder / META)
            for name, expected in files.items():
                _verify(folder / name, **expected)
        except PermissionError as error:
            problem = f"This user may not read the cache {error.filename}: use --cache_dir."
            raise UserError(problem) from error
        except OSError as error:
            if not os.path.lexists(folder):
                return None  # if it cannot exist (a file in its path), writing raises the error
            name = Path(error.filename or folder).name
            raise Damaged(f"{name}: {error.strerror or error}") from error
        return facts

    def _write(self, folder: Path, write: Callable[[Path], dict]) -> dict:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # Not tempfile.mkdtemp: it ignores the umask and sets the mode 0700, and other users
            # could not read the folder.
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
        """Rename a written folder to its final name; a damaged folder there is replaced."""
        try:
            os.rename(written, folder)
        except OSError:
            with contextlib.suppress(Damaged):
                if self._read(folder) is not None:
                    return  # another run has written it meanwhile
            # The files of a damaged folder are replaced one by one: another run that uses the
            # folder can open every file at any time, and its memory maps stay valid.
            for file in sorted(written.iterdir(), key=lambda file: file.name == META):
                os.replace(file, folder / file.name)
            sync(folder)
        sync(self.root)

    def _not_writable(self, error: OSError) -> UserError:
        return UserError(
            f"The cache {self.root} cannot be written ({error.strerror or error}): use --cache_dir."
        )


def _read_meta(path: Path) -> tuple[dict, dict]:
    """Return (the facts, {name: {size in bytes, sha256}} of the files).

    Raises:
        Damaged: the file is incomplete, or was changed.
    """
    try:
        meta = read_json(path)
        content = {"facts": meta["facts"], "files": meta["files"]}
        whole = meta["sha256"] == digest_of_json(content)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path.name} is incomplete") from error
    if not whole:
        raise Damaged(f"{path.name} was changed")
    return content["facts"], content["files"]


def _verify(path: Path, size: int, sha256: str) -> None:
    """Check the size and the digest of a file."""
    actual_size = path.stat().st_size
    if not path.is_file() or actual_size != size:
        raise Damaged(f"{path.name} has {actual_size:,} bytes instead of {size:,}")
    if sha256_of(path) != sha256:
        raise Damaged(f"{path.name} was changed")


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
