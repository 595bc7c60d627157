"""Atomic writes: a file is written under a temporary name, flushed to disk, and then renamed.

A file is therefore complete at any moment. If a process is killed, its temporary files remain. A
later run removes them once it has the lock of the output folder, or of the TemporaryFolder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

PARTIAL = ".partial-"  # prefix of the names of unfinished files
LEFTOVERS = re.compile(r"\.partial-([0-9a-f]{8}-.+|step-[0-9]{8})")  # of a run that was killed
SMALL_FILE_BYTES = 256 << 20  # large enough for a results.json that lists every bad row


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by what `write` writes to the path that it gets, in the same folder.

    Raises:
        OSError: the disk is full or not writable; `path` is unchanged.
    """
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name}")
    try:
        with naming(path):
            write(partial)
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8; see `write_atomically`."""
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that has none, for instance of a write to a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def overwrite(path: Path, text: str) -> None:
    """Replace a file's content in place, which works on most file systems when the disk is full.

    The disk blocks of the file are used again. Unlike `write_text` this is not atomic.

    Raises:
        OSError: the text needs more disk blocks than are free; the file is unchanged.
    """
    data = text.encode("utf-8")
    with open(path, "rb+") as file:
        os.posix_fallocate(file.fileno(), 0, len(data))
        file.write(data)
        file.truncate()


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 hex digest of a file."""
    with open(path, "rb") as file:
        return digest_of(file)


def digest_of(file: IO[bytes]) -> str:
    """Return the SHA-256 hex digest of an open file, from its current position to its end."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def digest_of_json(value: Any) -> str:
    """Return the SHA-256 hex digest of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def only_finite(value: Any) -> Any:
    """Replace infinity and NaN in a JSON value by None, because JSON cannot represent them."""
    if isinstance(value, dict):
        return {key: only_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [only_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: str = "rb") -> IO[bytes]:
    """Open a regular file; a pipe, which could block, and a symbolic link are refused.

    Raises:
        OSError: the file does not exist, cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, mode, buffering=0 if "+" in mode else -1)


def read_json(path: Path, most: int = SMALL_FILE_BYTES) -> Any:
    """Return the value in a JSON file of at most `most` bytes.

    Raises:
        OSError: the file does not exist, cannot be read, or is not a regular file.
        ValueError: the file is empty, is not UTF-8 or not JSON, or is larger than `most`.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        reason = f"it is not JSON: {str(error)[:100]}" if content.strip() else "it is empty"
        raise ValueError(reason) from None


def set_aside(path: Path, name: str) -> Path:
    """Rename a file or folder to `name`, or if that is in use to `name`.2, `name`.3 and so on."""
    new_path, number = path.with_name(name), 1
    while os.path.lexists(new_path):
        number += 1
        new_path = path.with_name(f"{name}.{number}")
    os.rename(path, new_path)
    return new_path


def lock(path: Path, create: bool = True) -> IO[bytes] | None:
    """Acquire a lock file without waiting.

    The lock lasts until the returned file is closed. The kernel also releases it when this process
    ends in any way.

    Returns:
        The open lock file; None on a file system without locks.
    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be opened for writing, or is not a regular file.
    """
    file = open_regular(path, os.O_RDWR | (os.O_CREAT if create else 0), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise
    return file


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of killed runs from a folder to which only this run writes."""
    if folder.is_dir():
        for entry in os.scandir(folder):
            if LEFTOVERS.fullmatch(entry.name):
                remove(Path(entry.path))


def remove(path: Path) -> None:
    """Remove a file or a folder with everything in it; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


class TemporaryPaths(list[str]):
    """Paths of temporary folders and files to remove, at the latest when the process exits."""

    def clean_up(self, *paths: str) -> None:
        """Remove the given folders and files; without arguments all of them."""
        for path in [entry for entry in self if not paths or entry in paths]:
            with contextlib.suppress(ValueError):  # two threads may clean up at the same time
                self.remove(path)
            remove(Path(path))


# The lock files of this process's temporary folders: a lock lasts as long as its file is open.
_locks: dict[Path, IO[bytes]] = {}


class TemporaryFolder:
    """A new folder that is moved or removed at the end.

    This process locks the file `<folder>.lock`. If it is killed, a later run on the same machine
    removes the folder. On some file systems a lock is not visible on other machines, so the name of
    the machine is a part of the folder's name.

    Args:
        prefix: prefix of the new folder's name. Folders in `parent` with this prefix are removed
            first if their processes have ended.
        mode: permissions of the new folder, less the umask.
    Attributes:
        paths: the paths to remove at the end, for `TemporaryPaths`.
    """

    def __init__(self, parent: Path, prefix: str, mode: int = 0o777):
        prefix = f"{prefix}{platform.node()[:40]}-"
        remove_abandoned(parent, prefix)
        self.path = parent / f"{prefix}{secrets.token_hex(6)}"
        self._lock = Path(f"{self.path}.lock")
        self.paths = [str(self.path), str(self._lock)]
        try:
            if file := self._take_lock():
                _locks[self.path] = file
            os.mkdir(self.path, mode)
        except OSError:
            self.remove()
            raise

    def _take_lock(self) -> IO[bytes] | None:
        while True:
            # Another process may check now whether the folder is abandoned, or have removed the
            # file since this process opened it.
            try:
                file = lock(self._lock)
            except BlockingIOError:
                time.sleep(0.001)
                continue
            with contextlib.suppress(FileNotFoundError):
                if file is None or os.path.samestat(os.fstat(file.fileno()), self._lock.stat()):
                    return file
            if file is not None:
                file.close()

    def remove(self) -> None:
        """Remove the folder and everything in it, and the lock file; errors are ignored."""
        remove(self.path)
        remove(self._lock)
        if file := _locks.pop(self.path, None):
            file.close()


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the temporary folders in `parent` of this user whose processes have ended."""
    for path in parent.glob(f"{prefix}*.lock"):
        # The lock file is of a living process or of another user, or was removed meanwhile.
        with contextlib.suppress(OSError):
            file = lock(path, create=False) if path.with_suffix("") not in _locks else None
            if file is not None:
                with file:
                    if os.fstat(file.fileno()).st_uid == os.getuid():
                        remove(path.with_suffix(""))
                        remove(path)


def start_folder(folder: Path) -> TemporaryFolder:
    """Create a temporary folder next to `folder`, with an empty `new` in it for `finish_folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A name has at most 255 bytes, and a character up to four.
    temporary = TemporaryFolder(folder.parent, f".{folder.name[:40]}.partial-")
    (temporary.path / "new").mkdir()
    return temporary


def finish_folder(temporary: TemporaryFolder, folder: Path, replace: bool) -> Path:
    """Flush a new folder to disk and rename it to `folder`, or if that exists to `folder`-2, -3 …

    Renaming a folder to the name of a non-empty folder fails. Two processes that finish at the same
    time therefore cannot replace each other's result.

    Args:
        temporary: returned by `start_folder`; the caller removes it.
        replace: move an existing folder of this name into `temporary`, which removes it.
    Returns:
        The final path.
    Raises:
        OSError: the disk is full or not writable. An existing folder keeps its name.
    """
    new, old = temporary.path / "new", temporary.path / "old"
    sync_tree(new)
    if replace and os.path.lexists(folder):
        os.rename(folder, old)
    for number in range(1, 1000):
        final = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            os.rename(new, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                continue
            if old.exists():
                os.rename(old, folder)
            raise
        sync(folder.parent)
        return final
    raise FileExistsError(errno.EEXIST, "exists, and so do 1,000 numbered ones", str(folder))
