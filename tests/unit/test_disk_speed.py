"""--check measures a disk with complete writes, and closes its file after an error."""

import errno
import os
import time

import pytest

from support.commands import check
from support.units import MB


@pytest.fixture(autouse=True)
def buffered(monkeypatch):
    """Not every file system of a test machine can do direct I/O."""
    monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)


def test_short_writes_are_completed(tmp_path, monkeypatch):
    sizes, writev = [], os.writev

    def half(file, pieces):
        written = writev(file, [memoryview(pieces[0])[: 2 * MB]])
        sizes.append(os.fstat(file).st_size)
        return written

    monkeypatch.setattr(os, "writev", half)
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    written, read = check._disk_speed(str(tmp_path), size=16 * MB)
    assert sizes[-1] == 16 * MB and written == read == 16 * MB  # in one second of this clock
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["writev", "readv", "fsync"])
def test_file_is_closed_after_an_error(tmp_path, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    open_before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        check._disk_speed(str(tmp_path), size=8 * MB)
    assert sorted(os.listdir("/proc/self/fd")) == open_before


def test_file_that_ends_early_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "readv", lambda *_: 0)
    with pytest.raises(OSError) as raised:
        check._disk_speed(str(tmp_path), size=8 * MB)
    assert raised.value.errno == errno.EIO
