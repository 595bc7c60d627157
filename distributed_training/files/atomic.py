"""Atomic writes: a file is written under a temporary name, flushed to disk, and then renamed.

A file is therefore complete at any moment. If a process is killed, its temporary files remain. A
later run removes them once it has the lock of the output folder, or of the TemporaryFolder.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import platform
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar, cast

Value = TypeVar("Value")
PARTIAL = ".partial-"  # prefix of the names of unfinished files
EXISTS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # of a rename to a name that is in use
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system without locks


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by what `write` writes to the path that it gets, in the same folder.

    Raises:
        OSError: the disk is full or not writable; `path` is unchanged.
    """
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name}")
    try:
        write(partial)
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8; see `write_atomically`."""
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def overwrite(path: Path, text: str) -> None:
    """Replace a file's content in place, not atomically: works on most disks that are full.

    Raises:
        OSError: the text needs more disk blocks than are free; the file is unchanged.
    """
    data = text.encode()
    with open(path, "rb+") as file:
        os.posix_fallocate(file.fileno(), 0, len(data))
        file.write(data)
        file.truncate()


@contextlib.contextmanager
def usual_permissions(path: Path) -> Iterator[None]:
    """Give a file that a library writes in this context the permissions that `open` gives a file.

    safetensors, for example, renames a temporary file that only its owner can read.
    """
    path.touch()
    mode = path.stat().st_mode
    yield
    if path.stat().st_mode != mode:
        path.chmod(stat.S_IMODE(mode))


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
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest_of_json(value: object) -> str:
    """Return the SHA-256 hex digest of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def only_finite(value: Value) -> Value:
    """Replace infinity and NaN in a JSON value by None, because JSON cannot represent them."""

    def clean(item: object) -> object:
        if isinstance(item, dict):
            return {key: clean(part) for key, part in item.items()}
        if isinstance(item, list):
            return [clean(part) for part in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return cast(Value, clean(value))


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: the file does not exist or cannot be read.
        ValueError: the file is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {str(error)[:100]}") from None


def set_aside(path: Path, name: str) -> Path:
    """Rename a file or folder to `name`, or if that is in use to `name`.2, `name`.3 and so on."""
    names = (f"{name}.{number}" if number > 1 else name for number in itertools.count(1))
    free = next(name for name in names if not os.path.lexists(path.with_name(name)))
    return path.rename(path.with_name(free))


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of killed runs from a folder to which only this run writes."""
    for path in folder.glob(f"{PARTIAL}*"):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder with everything in it; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


# --------------------------------------------------------------------- locks and temporary folders


def lock(path: Path) -> IO[bytes] | None:
    """Acquire a lock file without waiting, until the returned file is closed or the process ends.

    Returns:
        The open lock file; None on a file system without locks.
    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be opened for writing.
    """
    file = open(path, "a+b", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in NO_LOCKS:
            return None
        raise
    return file


# This process's temporary folders and their lock files; a lock lasts as long as its file is open.
_temporary: dict[Path, IO[bytes] | None] = {}


class TemporaryFolder:
    """A new folder with a lock file in it, which `remove` or `remove_temporary_folders` removes.

    If this process is killed, a later run on the same machine removes the folder. On some file
    systems a lock is not visible on other machines, so the folder's name has that of the machine.

    Args:
        prefix: prefix of the new folder's name. Folders in `parent` with this prefix are removed
            first if their processes have ended.
        mode: permissions of the new folder, less the umask.
    """

    def __init__(self, parent: Path, prefix: str, mode: int = 0o777):
        prefix = f"{prefix}{platform.node()[:40]}-"
        for left in parent.glob(f"{prefix}*/.lock"):
            with contextlib.suppress(OSError):  # of a living process, or of another user
                if lock(left):
                    remove(left.parent)
        self.path = parent / f"{prefix}{secrets.token_hex(6)}"
        self.path.mkdir(mode)
        _temporary[self.path] = lock(self.path / ".locking")
        os.rename(self.path / ".locking", self.path / ".lock")  # locked before others find it

    def remove(self) -> None:
        """Remove the folder and everything in it; errors are ignored."""
        remove_temporary_folder(self.path)


def remove_temporary_folder(path: Path) -> None:
    """Remove a folder if it is a TemporaryFolder of this process; errors are ignored."""
    if path in _temporary:
        if lock_file := _temporary.pop(path, None):
            lock_file.close()  # NFS keeps a file that is open
        remove(path)


def remove_temporary_folders() -> None:
    """Remove all temporary folders of this process, which is about to exit."""
    for path in list(_temporary):
        remove_temporary_folder(path)


def start_folder(folder: Path) -> TemporaryFolder:
    """Create a temporary folder next to `folder`, with an empty `new` in it for `finish_folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A name has at most 255 bytes, and a character up to four.
    temporary = TemporaryFolder(folder.parent, f".{folder.name[:40]}.partial-")
    (temporary.path / "new").mkdir()
    return temporary


def finish_folder(temporary: TemporaryFolder, folder: Path, replace: bool) -> Path:
    """Flush a new folder to disk and rename it to `folder`, or if that exists to `folder`-2, -3 …

    A rename to the name of a folder that is not empty fails, so of two processes that finish at the
    same time none replaces the other's result.

    Args:
        temporary: returned by `start_folder`; the caller removes it.
        replace: move an existing folder of this name into `temporary`.
    Returns:
        The final path.
    Raises:
        OSError: the disk is full or not writable. An existing folder keeps its name.
    """
    new, old = temporary.path / "new", temporary.path / "old"
    sync_tree(new)
    if replace and os.path.lexists(folder):
        os.rename(folder, old)
    for number in itertools.count(1):
        final = folder.with_name(f"{folder.name}-{number}") if number > 1 else folder
        try:
            os.rename(new, final)
            break
        except OSError as error:
            if error.errno not in EXISTS:
                if old.exists():
                    os.rename(old, folder)
                raise
    sync(folder.parent)
    return final
