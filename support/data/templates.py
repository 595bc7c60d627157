"""Limits for chat templates: one comes with a model from elsewhere, and may loop without end or
fill the memory.

transformers renders templates in Jinja's sandbox, which keeps them from files and from Python, and
limits `range`. It limits neither time nor memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator

from jinja2.sandbox import SandboxedEnvironment

from support.errors import UserError

SECONDS = 20  # of computing, for one row
BYTES = 4 << 30  # of memory, for one row
MOST_BITS, MOST_ITEMS = 1 << 14, 1 << 24  # of what `*` and `**` make
MOST_CHARACTERS = (
    1 << 22
)  # that a template adds to a row, and for each of the row's characters 100 more


class EndlessTemplate(UserError):
    """A chat template computes too long."""


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


# A single operation on huge numbers or texts cannot be interrupted, so it is refused. Interception
# is Jinja's own means; it also keeps the compiler from computing constants. transformers makes its
# environment itself, so it is set for the class.
SandboxedEnvironment.intercepted_binops = frozenset({"*", "**"})
SandboxedEnvironment.default_binop_table = {
    **SandboxedEnvironment.default_binop_table,
    "*": _product,
    "**": _power,
}


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Limit the time and memory of what a template computes; in the main thread only, where signals
    arrive.

    Raises:
        EndlessTemplate: it took SECONDS.
        MemoryError: it took BYTES.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started = time.thread_time()

    def look(_number, _frame) -> None:
        # Not wall time: a suspended or busy machine is no fault of the template.
        if time.thread_time() - started > SECONDS:
            raise EndlessTemplate(f"it computes for more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, look)
    memory = _limit_memory()
    try:
        signal.setitimer(signal.ITIMER_REAL, 1, 1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, memory)


def check_length(text: str, messages: list[dict]) -> str:
    """The text that a template made of a conversation.

    Raises:
        ValueError: it is much longer than the conversation, and tokenizing it would take hundreds
            of times its memory.
    """
    row = sum(len(message["content"]) for message in messages)
    if len(text) > MOST_CHARACTERS + 100 * row:
        raise ValueError(f"it makes a text of {len(text):,} characters of {row:,}")
    return text


def _limit_memory() -> tuple[int, int] | None:
    """Allow this process BYTES more address space than it has; returns the limits before, None
    where it cannot be done.
    """
    with contextlib.suppress(
        OSError, ValueError
    ):  # only Linux has /proc, and macOS refuses the limit
        with open("/proc/self/statm") as file:
            wanted = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + BYTES
        before = resource.getrlimit(resource.RLIMIT_AS)
        allowed = [limit for limit in before if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *allowed]), before[1]))
        return before
    return None
