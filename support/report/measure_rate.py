"""plan_memory.py --measure: a short run of the planned work on this machine, for its rate."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

from support import PROJECT, process
from support.errors import TrainingError, UserError
from support.memory.workload import Workload
from support.report.compare import last_error
from support.report.cost import read_run

STEPS = 10  # of which a run excludes the first two from its rate


def measure(flags: list[str], work: Workload) -> tuple[str, dict]:
    """Train a few steps from random weights on generated text, in a temporary folder.

    It runs on as many GPUs as this machine has, at most as many as planned, or in one CPU process.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError("--measure needs PyTorch: pip install -r requirements.txt.") from error
    ranks = min(torch.cuda.device_count(), work.world_size) or 1
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # One word is at least one token. A tenth of the text is held out for evaluation.
        tokens = STEPS * ranks * work.batch_size * work.accumulation * work.seq_length
        (folder / "text.txt").write_text("the " * (2 * tokens), encoding="utf-8")
        flags = [*flags, "--from_scratch", "--max_steps", str(STEPS)]
        command = [*launcher, str(PROJECT / "real_model_example.py"), *flags]
        print(
            f"⏳ Measuring {STEPS} steps: {shlex.join(command[len(launcher) :])}", file=sys.stderr
        )
        command += ["--dataset", f"{folder}/text.txt", "--output_dir", f"{folder}/run"]
        command += ["--cache_dir", f"{folder}/cache", "--no_eval", "--no_export", "--no_save"]
        exit_code, log = process.run_program(command)
        if exit_code:
            raise TrainingError(f"--measure: the run failed: {last_error(log)}")
        _, results = read_run("--measure", f"{folder}/run")
    return "--measure", results
