"""Limits on the time and memory of chat templates.

A template comes with a downloaded model, and may loop without end or fill the memory. transformers
renders templates in Jinja's sandbox, which prevents access to files and to Python, and limits
`range`. It limits neither time nor memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import threading
import time
from collections.abc import Iterator

from support import patches
from support.errors import UserError

SECONDS = 20  # CPU time for one row
WATCH_SECONDS = 1  # between two checks of the limits
BYTES = 4 << 30  # memory for one row
MOST_BITS, MOST_ITEMS = 1 << 14, 1 << 24  # of a result of `*` or `**`: an integer; a text or list
MOST_CHARACTERS = 1 << 22  # of a rendered row, plus 100 for each character of the row's messages


class EndlessTemplate(UserError):
    """An error of a chat template that computes for more than SECONDS."""


def _product(left, right):
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() + right.bit_length() > MOST_BITS
    ):
        raise OverflowError("a product of too many digits")
    for text, times in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(text, "__len__") and len(text) * times > MOST_ITEMS:
            raise OverflowError("a text or list that is repeated too often")
    return left * right


def _power(base, exponent):
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and base.bit_length() * abs(exponent) > MOST_BITS
    ):
        raise OverflowError("a power of too many digits")
    return base**exponent


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Limit the time and memory that a template uses, in any thread.

    Raises:
        EndlessTemplate: the template used more than SECONDS of CPU time.
        MemoryError: the template used more than BYTES of memory.
    """
    patches.limit_template_operators({"*": _product, "**": _power})
    # The kernel's limit applies to the whole process. With --streaming a second thread renders,
    # while the main thread may need memory for training.
    in_main_thread = threading.current_thread() is threading.main_thread()
    old_limits = _limit_memory() if in_main_thread else None
    done = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(threading.get_ident(), done, not in_main_thread), daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        try:  # the watcher's exception may be raised as late as here
            done.set()
            watcher.join()
        finally:
            if old_limits:
                resource.setrlimit(resource.RLIMIT_AS, old_limits)


def _watch(thread: int, done: threading.Event, watch_memory: bool) -> None:
    """Raise an exception in a thread that renders a template beyond its limits, and end.

    Args:
        done: is set when the template is rendered.
        watch_memory: also compare the growth of this process with BYTES.
    """
    # Not wall time: it also passes while the machine is suspended or busy with other processes.
    clock = time.CLOCK_MONOTONIC
    if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
        clock = time.pthread_getcpuclockid(thread)
    started, size = time.clock_gettime(clock), _address_space()
    while not done.wait(WATCH_SECONDS):
        seconds = time.clock_gettime(clock) - started
        full = watch_memory and seconds > WATCH_SECONDS and _address_space() - size > BYTES
        if full or seconds > SECONDS:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(MemoryError if full else EndlessTemplate)
            )
            return


def check_length(text: str, messages: list[dict]) -> str:
    """Return the text that a template rendered, if it is not much longer than the conversation.

    Raises:
        ValueError: the text is too long; tokenizing takes hundreds of times the memory of the text.
    """
    row = sum(len(message["content"]) for message in messages)
    if len(text) > MOST_CHARACTERS + 100 * row:
        raise ValueError(f"it makes a text of {len(text):,} characters of {row:,}")
    return text


def _address_space() -> int:
    """Return the bytes of this process's address space; 0 where there is no /proc."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _limit_memory() -> tuple[int, int] | None:
    """Limit the address space of this process to BYTES more than it uses now.

    Returns:
        The previous (soft, hard) limits in bytes; None where the limit cannot be set.
    """
    with contextlib.suppress(OSError, ValueError):  # macOS refuses the limit
        old_limits = resource.getrlimit(resource.RLIMIT_AS)
        allowed = [limit for limit in old_limits if limit != resource.RLIM_INFINITY]
        new_limit = min([_address_space() + BYTES, *allowed])
        resource.setrlimit(resource.RLIMIT_AS, (new_limit, old_limits[1]))
        return old_limits
    return None
