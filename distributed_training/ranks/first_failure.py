"""The first failure of a run: its entry in the store, on which all ranks agree."""

import contextlib
import re

import torch.distributed as dist

from distributed_training.errors import (
    EXIT_FAILED,
    EXIT_PREEMPTED,
    OutOfMemory,
    Stopped,
    TrainingError,
    UserError,
)

KEY = "failure"  # of the entry
LONGEST_MESSAGE = 2000  # characters of an error in the store, which accepts no large values
ENTRY = r"(\d+) on rank \d+, thread \d+: (.*)"  # exit code, message
RESTART = "restart"  # begins the entry if all ranks start again instead


class FirstFailure:
    """The entry of the first failure. After the end of the store there is none."""

    def __init__(self, store: dist.Store):
        self.store = store

    def claim(self, own: str) -> bool:
        """Write an entry unless there is one; return whether `own` is the first, also if lost."""
        own = own[:LONGEST_MESSAGE].encode(errors="replace").decode()
        with contextlib.suppress(RuntimeError):  # the store has ended
            return self.store.compare_set(KEY, "", own).decode() == own
        return True

    def read(self) -> str:
        """Return the entry, or "" if there is none."""
        with contextlib.suppress(RuntimeError):  # the store has ended
            if self.store.check([KEY]):
                return self.store.get(KEY).decode()
        return ""

    def error(self, own: UserError) -> UserError:
        """Return the error of the rank that failed first; `own` if there is none.

        On a disk of its own that rank cannot write results.json: rank 0 records the error.
        """
        found = re.fullmatch(ENTRY, self.read(), re.DOTALL)
        if found is None:
            return own
        kinds = (UserError, OutOfMemory, Stopped)
        kind = next((kind for kind in kinds if kind.exit_code == int(found[1])), TrainingError)
        return kind(found[2])

    @property
    def exit_code(self) -> int:
        """The exit code of a rank that ends because of the first failure on another one."""
        return EXIT_PREEMPTED if self.read().startswith(f"{EXIT_PREEMPTED} ") else EXIT_FAILED

    @property
    def is_restart(self) -> bool:
        """Whether all ranks start again."""
        return self.read().startswith(RESTART)
