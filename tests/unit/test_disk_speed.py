"""--check measures a disk, and leaves nothing behind."""

import errno
import os

import pytest

from support.commands import check
from support.units import MB


@pytest.fixture(autouse=True)
def buffered(monkeypatch):
    """Not every file system of a test machine can do direct I/O."""
    monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)


def test_a_disk_is_measured(tmp_path):
    written, read = check._disk_speed(str(tmp_path), size=16 * MB)
    assert written > 0 and read > 0 and not any(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["writev", "readv", "fsync"])
def test_file_is_closed_after_an_error(tmp_path, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    open_before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        check._disk_speed(str(tmp_path), size=8 * MB)
    assert sorted(os.listdir("/proc/self/fd")) == open_before
