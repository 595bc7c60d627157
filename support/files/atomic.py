"""Atomic writes: a file is written under a temporary name, flushed to disk, and then renamed.

A file is therefore complete at any moment. If a process is killed, its temporary files remain. A
later run removes them once no process can be writing to them, which is determined by a lock:

    output folder of a run   the folder's lock file: only one run at a time uses the folder
    any other folder         a TemporaryFolder, which has its own lock file
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
from typing import BinaryIO

PARTIAL = ".partial-"  # prefix of the names of unfinished files
# Names of unfinished files of a killed run in its output folder and in checkpoints/; the first two
# patterns are for names that older versions used.
LEFTOVERS = re.compile(
    r"\.(results|metrics|latest|best)\.\d+(\.jsonl?)?|\.step-\d+\.partial"
    r"|\.partial-([0-9a-f]{8}-.+|step-[0-9]{8})"
)
SMALL_FILE_BYTES = 256 << 20  # large enough for a results.json that lists every bad row
DEEPEST_JSON = 50  # levels of nesting; the files of this project and of DeepSpeed have less than 10
EMPTY_LOCK_SECONDS = 3600
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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


def digest_of(file: BinaryIO) -> str:
    """Return the SHA-256 hex digest of an open file, from its current position to its end."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def digest_of_json(value) -> str:
    """Return the SHA-256 hex digest of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def only_finite(value):
    """Replace infinity and NaN in a JSON value by None, because JSON cannot represent them."""
    if isinstance(value, dict):
        return {key: only_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [only_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -------------------------------------------------------------------------- files of unknown origin


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; see `_open_descriptor`."""
    return open(_open_descriptor(path, os.O_RDONLY), "rb")


def _open_descriptor(path: Path, flags: int) -> int:
    """Open a regular file.

    A pipe is refused because opening it would block until another process opens its other end, and
    a symbolic link because it may refer to a file elsewhere.

    Raises:
        OSError: the file does not exist, cannot be opened, or is not a regular file.
    """
    try:
        flags |= os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_json(path: Path, most: int = SMALL_FILE_BYTES):
    """Return the value in a JSON file of at most `most` bytes.

    Raises:
        OSError: the file does not exist, cannot be read, or is not a regular file.
        ValueError: the file is empty, is not UTF-8 or not JSON, is nested in more than DEEPEST_JSON
            levels, or is larger than `most`.
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
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        reason = f"it is not JSON: {str(error)[:100]}" if content.strip() else "it is empty"
        raise ValueError(reason) from None
    if depth(value) > DEEPEST_JSON:
        raise ValueError("it is nested too deeply")
    return value


def depth(value) -> int:
    """Return the levels of nesting of a JSON value, which may exceed Python's recursion limit."""
    levels, level = 0, [value]
    while level:
        levels += 1
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [i for item in inner for i in (item.values() if isinstance(item, dict) else item)]
    return levels


def set_aside(path: Path, name: str) -> Path:
    """Rename a file or folder to `name`, or if that is in use to `name`.2, `name`.3 and so on."""
    new_path, number = path.with_name(name), 1
    while os.path.lexists(new_path):
        number += 1
        new_path = path.with_name(f"{name}.{number}")
    os.rename(path, new_path)
    return new_path


# ------------------------------------------------------------------------------ locks and leftovers


def lock(path: Path, create: bool = True) -> BinaryIO | None:
    """Acquire a lock file without waiting.

    The lock lasts until the returned file is closed. The kernel also releases it when this process
    ends in any way.

    Returns:
        The open lock file; None on a file system without locks.
    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be opened for writing, or is not a regular file.
    """
    # Other users may write to the folder, too, so it may be something else than a regular file.
    descriptor = _open_descriptor(path, os.O_RDWR | (os.O_CREAT if create else 0))
    file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115 (the caller closes it)
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
_locks: dict[Path, BinaryIO] = {}


class TemporaryFolder:
    """A new folder that is moved or removed at the end.

    If this process is killed, a later run removes the folder. This process locks the file
    `<prefix><random>.lock` next to the folder, and writes the name of the machine into it. The
    kernel releases the lock when the process ends. On some file systems a lock is not visible on
    other machines, so a lock file that another machine wrote counts as locked.

    Args:
        prefix: prefix of the new folder's name. Folders in `parent` with this prefix are removed
            first if their processes have ended.
        mode: permissions of the new folder, less the umask.
    Attributes:
        paths: the paths to remove at the end, for `TemporaryPaths`.
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
            except BlockingIOError:  # another process checks now whether the folder is abandoned
                time.sleep(0.001)

    def remove(self) -> None:
        """Remove the folder and everything in it, and the lock file; errors are ignored."""
        remove(self.path)
        remove(self._lock)
        if file := _locks.pop(self.path, None):
            file.close()


def start_folder(folder: Path) -> TemporaryFolder:
    """Create a temporary folder next to `folder`, with an empty `new` in it for `finish_folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A name has at most 255 bytes, and a character up to four.
    temporary = TemporaryFolder(folder.parent, f".{folder.name[:40]}.partial-")
    (temporary.path / "new").mkdir()
    return temporary


def finish_folder(temporary: TemporaryFolder, folder: Path, replace: bool) -> Path:
    """Flush a new folder to disk and rename it to `folder`.

    If that name is taken, the new name is `folder`-2, `folder`-3 …

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


def _this_machine() -> dict:
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else None
    return {"host": platform.node(), "boot": boot}


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the temporary folders in `parent` of this user whose processes have ended."""
    names = []
    with contextlib.suppress(OSError):
        names = os.listdir(parent)
    for name in names:
        path = parent / name
        is_lock = name.startswith(prefix) and name.endswith(".lock")
        if is_lock and path.with_suffix("") not in _locks:
            # The lock file was removed, is locked, is of another user, or has another content.
            with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    """Remove a temporary folder and its lock file, if the process that created it has ended.

    Raises:
        OSError: the process is alive, or the lock file cannot be opened.
        ValueError, AttributeError, RecursionError: the lock file does not name a machine.
    """
    file = lock(path, create=False)
    if file is None:
        return
    with file:
        content = file.read(1000)
        if not content:  # the process has just created it, or was killed before it wrote
            if time.time() - os.fstat(file.fileno()).st_mtime > EMPTY_LOCK_SECONDS:
                remove(path)
            return
        owner, machine = json.loads(content), _this_machine()
        same_machine = owner.get("host") == machine["host"] or (
            machine["boot"] and owner.get("boot") == machine["boot"]
        )
        if same_machine and os.fstat(file.fileno()).st_uid == os.getuid():
            remove(path.with_suffix(""))
            remove(path)
