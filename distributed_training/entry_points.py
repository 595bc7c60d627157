"""The commands that pip installs (pyproject.toml): each runs a program of this project by its path.

A launcher starts the same file on every rank, and the script finds tools/ next to itself.
"""

import os
import sys
from functools import partial
from typing import NoReturn

from distributed_training.about import PROJECT


def run(program: str) -> NoReturn:
    """Replace this process by a program of the project, with the same arguments."""
    os.environ.setdefault("PYTHON", sys.executable)  # for compare_strategies.sh
    interpreter = "bash" if program.endswith(".sh") else sys.executable
    os.execvp(interpreter, [interpreter, str(PROJECT / program), *sys.argv[1:]])


train = partial(run, "real_model_example.py")
compare_strategies = partial(run, "compare_strategies.sh")
chat = partial(run, "scripts/chat.py")
build_ops = partial(run, "scripts/build_ops.py")
compare_runs = partial(run, "scripts/compare_runs.py")
convert_checkpoint = partial(run, "scripts/convert_checkpoint.py")
distributed_setup = partial(run, "scripts/distributed_setup.py")
hand_over = partial(run, "scripts/hand_over.py")
plan_memory = partial(run, "scripts/plan_memory.py")
report = partial(run, "scripts/report.py")
