"""Run a student's program on several CPU ranks, with a time limit, and read what was seen."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil

from distributed_training.errors import UserError
from tools.lab.verdict import Finding, wrong

RANKS = 2  # of a harness, unless its task names another number
SECONDS = 120  # a step of a tiny model takes seconds, also on two slow cores
COLLECTIVES = "Does every rank call the same collectives, in the same order?"
LOST = "an error of a collective: the connection to another rank was lost"


class Ended(NamedTuple):
    """A program that has ended."""

    code: int
    output: str


def run_on_ranks(program: Path, *arguments: str | Path, ranks: int, seconds=SECONDS) -> Ended:
    """Run a program under torchrun, one thread for each rank.

    Raises:
        UserError: it took longer than `seconds`; all of its processes have been ended.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc_per_node={ranks}", str(program), *map(str, arguments)]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"Your program did not end within {seconds:.0f} s. {COLLECTIVES} A rank that calls one "
            "alone waits for the others."
        ) from None
    finally:
        end_with_children(process)
    return Ended(process.returncode, output)


def end_with_children(process: subprocess.Popen) -> None:
    """End a program and the ranks that it started; torchrun's are not in its process group."""
    if process.poll() is not None:
        return
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    for child in below:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    process.kill()
    process.communicate()


def watch(harness: Path, program: Path, ranks: int = RANKS) -> tuple[list[dict], str]:
    """Run a harness on the student's program; return what each rank wrote, and the output.

    Raises:
        UserError: the program is missing, or took too long.
    """
    if not program.is_file():
        raise UserError(f"{program} is missing: the task starts with this file.")
    with TemporaryDirectory() as out:
        ended = run_on_ranks(harness, program.resolve(), out, ranks=ranks)
        return read_ranks(Path(out), ranks), ended.output


def read_ranks(folder: Path, ranks: int = RANKS) -> list[dict]:
    """Return what each rank of a harness wrote to a folder; {} if it wrote nothing."""
    files = (folder / f"{rank}.json" for rank in range(ranks))
    return [json.loads(file.read_text()) if file.is_file() else {} for file in files]


def failure(ranks: list[dict], output: str, what: str) -> Finding | None:
    """Return why a program has shown nothing; None if all ranks have written what was seen.

    Args:
        ranks: what each rank wrote.
        output: what the program printed.
        what: the student's functions, as the subject of a sentence.
    """
    errors = [found["error"] for found in ranks if "error" in found]
    own = [error for error in errors if not error.startswith(LOST)]
    if own:  # the others lost the rank that ended with it: their error says less
        return wrong("error", f"{what} raised {own[0]}")
    # Gloo ends a process whose two ends of a transfer have different sizes.
    if errors or (not all(ranks) and "gloo::" in output):
        text = f"{what} raised {errors[0] if errors else LOST}. {COLLECTIVES}"
        next_one = (
            "The call that a rank leaves out meets its next one, which can have another size."
        )
        return wrong("unequal_collectives", f"{text} {next_one}")
    if not all(ranks):
        return wrong("error", f"The program failed: {output.strip()[-300:]}")
    return None


def distance(a: list[float], b: list[float]) -> float:
    """Return the norm of the difference of two gradients, relative to that of the second."""
    return math.dist(a, b) / max(math.hypot(*b), 1e-300)
