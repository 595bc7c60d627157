"""Limits on the time and memory of chat templates.

A template comes with a downloaded model, and may loop without end or fill the memory. transformers
renders templates in Jinja's sandbox, which prevents access to files and to Python, and limits
`range`. It limits neither time nor memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator

from support import patches
from support.errors import UserError

SECONDS = 20  # CPU time for one row
BYTES = 4 << 30  # memory for one row
MOST_BITS, MOST_ITEMS = 1 << 14, 1 << 24  # of a result of `*` or `**`: an integer; a text or list
MOST_CHARACTERS = 1 << 22  # of a rendered row, plus 100 for each character of the row's messages


class EndlessTemplate(UserError):
    """An error of a chat template that computes too long."""


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
    """Limit the time and memory that a template uses.

    The limits apply in the main thread only, because Python handles signals in no other thread.

    Raises:
        EndlessTemplate: the template used more than SECONDS of CPU time.
        MemoryError: the template used more than BYTES of memory.
    """
    patches.limit_template_operators({"*": _product, "**": _power})
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started = time.thread_time()

    def look(_number, _frame) -> None:
        # Not wall time: it also passes while the machine is suspended or busy with other processes.
        if time.thread_time() - started > SECONDS:
            raise EndlessTemplate(f"it computes for more than {SECONDS} s")

    previous_handler = signal.signal(signal.SIGALRM, look)
    memory_limits = _limit_memory()
    try:
        signal.setitimer(signal.ITIMER_REAL, 1, 1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        if memory_limits:
            resource.setrlimit(resource.RLIMIT_AS, memory_limits)


def check_length(text: str, messages: list[dict]) -> str:
    """Return the text that a template rendered, if it is not much longer than the conversation.

    Args:
        text: the rendered text.
        messages: the conversation.
    Raises:
        ValueError: the text is too long; tokenizing takes hundreds of times the memory of the text.
    """
    row = sum(len(message["content"]) for message in messages)
    if len(text) > MOST_CHARACTERS + 100 * row:
        raise ValueError(f"it makes a text of {len(text):,} characters of {row:,}")
    return text


def _limit_memory() -> tuple[int, int] | None:
    """Limit the address space of this process to BYTES more than it uses now.

    Returns:
        The previous (soft, hard) limits in bytes; None where the limit cannot be set.
    """
    # Only Linux has /proc, and macOS refuses the limit.
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            wanted = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + BYTES
        old_limits = resource.getrlimit(resource.RLIMIT_AS)
        allowed = [limit for limit in old_limits if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *allowed]), old_limits[1]))
        return old_limits
    return None
