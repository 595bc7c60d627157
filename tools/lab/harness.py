"""What a harness does on each of its ranks: call the student's program, write what was seen.

    torchrun --nproc_per_node=2 tasks/TASK/harness.py PROGRAM.PY OUT

Rank R writes OUT/R.json. An error of the program is one of the results.
"""

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from tools.lab.programs import LOST

Run = Callable[[ModuleType, int], dict]  # (the program, the rank) -> what was seen


def main(run: Run) -> None:
    """Call `run` on this rank, with the arguments of the command line."""
    program, out = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    if not write(program, out, run):
        sys.exit(1)  # torchrun ends the other rank, which may wait for this one
    dist.destroy_process_group()


def write(program: Path, out: Path, run: Run) -> bool:
    """Write what `run` has seen of a program, or the program's error.

    Returns:
        Whether the program ran without an error.
    """
    rank, found = dist.get_rank(), dict[str, object]()
    try:
        found = run(load(program), rank)
    except Exception as error:
        found = {"error": describe(error, program)}
    (out / f"{rank}.json").write_text(json.dumps(found))
    return "error" not in found


def describe(error: Exception, program: Path) -> str:
    """Return the type and the message of an error, and the line of the program that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(program)]
    line = f", line {frames[-1].lineno} of {program.name}" if frames else ""
    if "gloo" in str(error):  # a path in gloo's source, which says nothing to a student
        return f"{LOST}{line}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{line}"


def load(program: Path) -> ModuleType:
    """Import the student's program."""
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
