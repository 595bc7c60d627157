#!/usr/bin/env python3
"""List the calls in an optimizer step for which the host waits for the GPU.

    python tools/benchmarks/synchronizing_calls.py calls.json --strategy dp --max_steps 20 …

The arguments after the file are those of real_model_example.py. Steps 6 to 15 are recorded:
torch.cuda.set_sync_debug_mode warns of calls inside PyTorch's operations, and the explicit calls
(torch.cuda.synchronize, Event.synchronize, Stream.synchronize) are wrapped. PyTorch reports calls
that autograd makes in its own threads at the line that called backward.
"""

import functools
import json
import runpy
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
FIRST, LAST = 6, 15  # optimizer steps, without accumulation


class Watch:
    """A counter of synchronizing calls, from the backward pass of step FIRST to that of LAST + 1.

    Args:
        file: path of the result, a JSON file:
            {"steps": n, "calls": [{"count": in all steps, "call": …, "project": …}]}.
    """

    def __init__(self, file: Path):
        self.file, self.backwards, self.watching = file, 0, False
        self.seen: Counter[tuple[str, str]] = Counter()

    def note(self) -> None:
        """Count one call, by its own line and the innermost line of this project that led to it."""
        own = (__file__, warnings.__file__)
        stack = [f for f in traceback.extract_stack() if f.filename not in own]
        inner = [f for f in stack if not _place(f).startswith("/") and "site-" not in f.filename]
        self.seen[_place(stack[-1]), _place(inner[-1]) if inner else "—"] += 1

    def warn(self, message, *_rest, **_more) -> None:
        """Count the warnings about synchronizing calls; replaces warnings.showwarning."""
        if "synchronizing CUDA operation" in str(message):
            self.note()

    def before_backward(self, set_mode) -> None:
        """Start to count at the backward pass of step FIRST, and stop after LAST.

        Args:
            set_mode: torch.cuda.set_sync_debug_mode.
        """
        self.backwards += 1
        if self.backwards == FIRST:
            warnings.simplefilter("always")
            warnings.showwarning = self.warn
            set_mode("warn")
            self.watching = True
        elif self.backwards == LAST + 1:
            set_mode("default")
            self.watching = False
            calls = [
                {"count": n, "call": call, "project": line}
                for (call, line), n in self.seen.most_common()
            ]
            self.file.write_text(json.dumps({"steps": LAST + 1 - FIRST, "calls": calls}, indent=1))


def _place(frame: traceback.FrameSummary) -> str:
    """Return "file:line", without the folders of site-packages or of this project."""
    name = frame.filename.split("site-packages/")[-1].removeprefix(f"{PROJECT}/")
    return f"{name}:{frame.lineno}"


def noting(watch: Watch, function):
    """Wrap `function` so that its calls are counted while `watch` is counting."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if watch.watching:
            watch.note()
        return function(*args, **kwargs)

    return wrapped


def main() -> None:
    """Wrap the synchronizing functions, then run the script with the remaining arguments."""
    import torch

    watch, script = Watch(Path(sys.argv[1]).resolve()), PROJECT / "real_model_example.py"
    for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
        owner.synchronize = noting(watch, owner.synchronize)
    backward = torch.Tensor.backward

    @functools.wraps(backward)
    def watched(tensor, *args, **kwargs):
        watch.before_backward(torch.cuda.set_sync_debug_mode)
        return backward(tensor, *args, **kwargs)

    torch.Tensor.backward = watched
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path.insert(0, str(PROJECT))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
