"""Files that are whole at any moment: written under another name, flushed to disk, and then
renamed.

What a process writes under another name remains when the process is killed. A later run removes it
once nobody can be writing to it any more. How that is known depends on the place:

    a run's output folder    its lock file: only one run at a time uses the folder, so no other run
                             is writing there
    anywhere else            a TemporaryFolder, which has a lock file of its own
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
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
from typing import BinaryIO

PARTIAL = ".partial-"  # how the names of unfinished files begin
# What a killed run leaves in its output folder and in checkpoints/; the first two are names that
# older versions gave.
LEFTOVERS = re.compile(
    r"\.(results|metrics|latest|best)\.\d+(\.jsonl?)?|\.step-\d+\.partial"
    r"|\.partial-([0-9a-f]{8}-.+|step-[0-9]{8})"
)
SMALL_FILE_BYTES = 256 << 20  # results.json names every row that was left out
DEEPEST_JSON = (
    50  # levels of nesting; what this project writes and DeepSpeed's files have less than 10
)
EMPTY_LOCK_SECONDS = 3600
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file next to `path`, which gets the name only when it is whole and on
    disk.

    Raises:
        OSError: the disk is full, or not writable; `path` is as it was.
    """
    beside = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name}")
    try:
        with naming(path):
            write(beside)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError: a write that finds no space does not name its file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def overwrite(path: Path, text: str) -> None:
    """Replace a file's content in its own blocks, which works on most file systems when the disk is
    full.

    Raises:
        OSError: the text needs more blocks, and there are none; the file is as it was.
    """
    data = text.encode("utf-8")
    with open(path, "rb+") as file:
        os.posix_fallocate(file.fileno(), 0, len(data))
        file.write(data)
        file.truncate()


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder with everything in it to disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return digest_of(file)


def digest_of(file: BinaryIO) -> str:
    """Hex digest (SHA-256) of what is left to read of an open file."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def digest_of_json(value) -> str:
    """Hex digest (SHA-256) of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def only_finite(value):
    """JSON has no word for infinity or not-a-number: null stands for them."""
    if isinstance(value, dict):
        return {key: only_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [only_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -------------------------------------------------------------------------- files of unknown origin


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe, which would wait for its other end, or a link to
    another place is refused.

    Raises:
        OSError: there is no such file, or it is not a regular one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_json(path: Path, most: int = SMALL_FILE_BYTES):
    """The value in a JSON file.

    Args:
        path: the file.
        most: bytes; a larger file is not read.
    Raises:
        OSError: there is no such file, or it is not a regular one.
        ValueError: it holds no JSON, JSON that is nested too deeply to be passed on, or more than
            `most` bytes.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        value = None
    except ValueError as error:
        raise ValueError(
            f"it is no JSON: {str(error)[:100]}" if content.strip() else "it is empty"
        ) from None
    else:
        if depth(value) <= DEEPEST_JSON:
            return value
    raise ValueError("it is nested too deeply")


def depth(value) -> int:
    """Levels of nesting of a JSON value; not recursive, for values that are nested deeply."""
    levels, level = 0, [value]
    while level:
        levels += 1
        inner = [
            item.values() if isinstance(item, dict) else item
            for item in level
            if isinstance(item, dict | list)
        ]
        level = [item for items in inner for item in items]
    return levels


def set_aside(path: Path, name: str) -> Path:
    """Rename a file or folder within its folder to `name`, or to `name`.2, `name`.3 … if that is
    taken; returns the new path.

    Raises:
        OSError: the folder is not writable.
    """
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    aside = next(
        path.with_name(free) for free in names if not os.path.lexists(path.with_name(free))
    )
    os.rename(path, aside)
    return aside


# ------------------------------------------------------------------------------ locks and leftovers


def lock(path: Path, create: bool = True) -> BinaryIO | None:
    """Take a lock that lasts until the returned file is closed, at the latest until this process
    ends, however it ends.

    Args:
        path: the lock file.
        create: whether to make it if it is not there.
    Returns:
        The open lock file; None on a file system without locks.
    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be opened for writing, or there is something else in its place.
    """
    # Neither follow a link to another file nor wait for a pipe's other end: others may write to the
    # folder, too.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o666)
    file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115 (it stays open)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise
    return file


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished files and checkpoints of runs that were killed from a folder that only this
    run may write to."""
    if folder.is_dir():
        for entry in os.scandir(folder):
            if LEFTOVERS.fullmatch(entry.name):
                remove(Path(entry.path))


def remove(path: Path) -> None:
    """Remove a file or a folder, as well as it can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


# Of this process's temporary folders: a lock lasts as long as its file is open.
_locks: dict[Path, BinaryIO] = {}


class TemporaryFolder:
    """A new folder whose contents are moved away or removed at the end; if this process is killed,
    a later run removes it.

    `<prefix><random>.lock` next to the folder is locked while this process lives, and says on which
    machine. The kernel releases the lock with the process. On some file systems other machines do
    not see locks, so a lock file that another machine wrote counts as locked.

    Args:
        parent: an existing folder.
        prefix: of its name. What earlier owners of this prefix left in `parent` is removed first.
        mode: of the new folder, less the umask.
    Attributes:
        path: the folder.
        paths: all that is to be removed at the end, for `Run.temporary`.
    Raises:
        OSError: `parent` is not writable.
    """

    def __init__(self, parent: Path, prefix: str, mode: int = 0o777):
        remove_abandoned(parent, prefix)
        self.path = parent / f"{prefix}{secrets.token_hex(6)}"
        self._lock = Path(f"{self.path}.lock")
        self.paths = [str(self.path), str(self._lock)]
        file = self._take_lock()
        try:
            if file:
                _locks[self.path] = file
                file.write(json.dumps(_this_machine()).encode())
            os.mkdir(self.path, mode)
        except OSError:
            self.remove()
            raise

    def _take_lock(self) -> BinaryIO | None:
        while True:
            try:
                return lock(self._lock)
            except BlockingIOError:  # another process looks at this moment whether it is abandoned
                time.sleep(0.001)

    def remove(self) -> None:
        """Remove the folder with everything in it, and the lock file."""
        remove(self.path)
        remove(self._lock)
        if file := _locks.pop(self.path, None):
            file.close()


def _this_machine() -> dict:
    return {
        "host": platform.node(),
        "boot": BOOT_ID.read_text().strip() if BOOT_ID.exists() else None,
    }


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove temporary folders of this user whose owners are known to be dead."""
    try:
        names = [entry.name for entry in os.scandir(parent)]
    except OSError:
        return
    for name in names:
        path = parent / name
        if (
            name.startswith(prefix)
            and name.endswith(".lock")
            and path.with_suffix("") not in _locks
        ):
            try:
                _remove_if_abandoned(path)
            # It is gone, in use, of another user, or not one of ours.
            except (OSError, ValueError, AttributeError, RecursionError):
                continue


def _remove_if_abandoned(path: Path) -> None:
    """
    Raises:
        OSError: the owner lives, or the lock file cannot be opened.
        ValueError, AttributeError: the lock file does not say on which machine its owner ran.
    """
    file = lock(path, create=False)
    if file is None:
        return
    with file:
        content = file.read(1000)
        if not content:  # of a process that has just made it, or that was killed there
            if time.time() - os.fstat(file.fileno()).st_mtime > EMPTY_LOCK_SECONDS:
                remove(path)
            return
        owner, here = json.loads(content), _this_machine()
        same = owner.get("host") == here["host"] or (
            here["boot"] and owner.get("boot") == here["boot"]
        )
        if same and os.fstat(file.fileno()).st_uid == os.getuid():
            remove(path.with_suffix(""))
            remove(path)
