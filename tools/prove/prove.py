"""--prove: one step on the user's model and data, made in several ways that must be equal.

Each way is a run of real_model_example.py, or of tools/prove/trainer_step.py, in which
transformers.Trainer makes the step. The checkpoints after the step are compared.
"""

import math
import os
import sys
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

import torch

from distributed_training import PROJECT, programs
from distributed_training.cli.flags import GROUPS
from distributed_training.cli.run_file import as_yaml
from distributed_training.errors import (
    EXIT_COMPLETED,
    EXIT_FAILED,
    OutOfMemory,
    TrainingError,
    UserError,
)
from distributed_training.files.atomic import TemporaryFolder, remove
from distributed_training.ranks import gpus
from distributed_training.ranks.launch import free_port
from distributed_training.ranks.stop import StopSignal
from distributed_training.records.recorded_run import last_error
from distributed_training.settings.settings import DEFAULTS, Settings
from distributed_training.strategies.strategy import FlagValues
from distributed_training.text_tables import text_table
from tools.prove import prove_difference as difference

PYTHON = sys.executable  # tests replace it
SCRIPT = PROJECT / "real_model_example.py"
TRAINER = PROJECT / "tools" / "prove" / "trainer_step.py"
SEQUENCES = 8  # at least
# Of the user's flags, those that determine the step.
KEPT = {*GROUPS["Model"], *GROUPS["Data"], *GROUPS["Strategy"]}
KEPT |= {"device", "verbose"}
KEPT |= {"lr", "weight_decay", "adam_beta1", "adam_beta2", "seed", "deterministic"}
SETTINGS = {  # any --lr_scheduler begins with --lr, so one step needs no setting for it
    "max_steps": 1,
    "save_every": 1,
    "eval": False,
    "no_export": True,
    "merge_lora": False,
    "quiet": True,
    "precision": "fp32",
    "dropout": 0.0,
    "lora_dropout": 0.0,
    # Adam divides its first update by |gradient| + epsilon. With 1e-8 an element whose gradient is
    # only rounding (the bias of keys) would move by the learning rate.
    "adam_epsilon": 1e-4,
}
ALONE = {"strategy": "dp", **dict.fromkeys(("ds_config", "nvme_path", "fsdp_config", "fsdp"))}
OF_A_LAUNCH = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()

HEADERS = ["way", "loss", "differ-\nence", "gradient's\nnorm", "differ-\nence"]
HEADERS += ["gradient's\ndifference", "largest in", "update's\ndifference"]


class Way(NamedTuple):
    """One way to make the step."""

    name: str
    command: list[Path | str]  # arguments of Python
    flags: FlagValues  # those that differ from the user's


def prove(settings: Settings) -> int:
    """Make the step in all ways, print how they differ, and return the exit code."""
    StopSignal().install()  # a signal raises an exception, so that everything is cleaned up
    settings = settings.replace(max_grad_norm=settings.training.max_grad_norm or 1.0)
    gpus.require_usable()
    # Without a number the flag is True.
    wanted = settings.command.prove
    ranks = gpus.usable_gpus() or 2 if wanted is True else int(wanted or 0)
    print("🔎 One step in fp32, without dropout", flush=True)
    temporary = TemporaryFolder(Path(gettempdir()), "distributed_training_prove_", mode=0o700)
    rows, problems, reference = [], [], None
    try:
        flags = settings.flags()
        kept = {name: flags[name] for name in (*KEPT, "fsdp", "max_grad_norm")}
        for number, way in enumerate(ways_of(settings.parallelism.strategy, ranks)):
            print(f"⏳ {way.name}", flush=True)
            output = temporary.path / str(number)
            run(way, kept, output)
            step = difference.step_of(output, settings.training)
            reference = reference or step
            differences, norm, worst = difference.compare_steps(
                reference, step, settings.training.lr
            )
            numbers = [f"{value:.1e}" if number else "–" for value in differences.values()]
            row = [way.name, f"{step.loss:.7f}", numbers[0], f"{norm:.6f}", *numbers[1:3]]
            rows.append([*row, worst if number else "", numbers[3]])
            if problem := difference.describe_problem(way.name, differences, worst, step.adds):
                problems.append(problem)
            if number:
                remove(output)  # the disk holds two checkpoints at most
    finally:
        temporary.remove()
    limits = [f"{limit:.0e}" for limit in difference.TOLERANCES.values()]
    rows.append(["tolerance", "", limits[0], "", limits[1], limits[2], "", limits[3]])
    print(f"\n{text_table(rows, HEADERS)}\n{difference.LEGEND}")
    equal = f"✅ Equal: all {len(rows) - 1} ways make the same step."
    print("\n".join(problems or [equal]))
    return EXIT_FAILED if problems else EXIT_COMPLETED


def ways_of(strategy: str, ranks: int) -> list[Way]:
    """Return the ways to make the step, the reference first."""
    size = math.ceil(SEQUENCES / (2 * ranks))  # two micro-batches of each rank
    count = 2 * ranks * size
    work = {"num_samples": count}
    at_once = {**work, **ALONE, "batch_size": count}
    accumulated = {**work, **ALONE, "batch_size": 1, "gradient_accumulation_steps": count}
    split = {**work, "batch_size": size, "gradient_accumulation_steps": 2}
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    torchrun = [*torchrun, f"--master_port={free_port()}"] if ranks > 1 else []
    whole, parts = f"{count} at once", f"{count} × 1 accumulated"
    name = f"{ranks} rank{'s' * (ranks > 1)} of {strategy}, 2 × {size} each"
    return [
        Way(f"1 process, {whole}", [SCRIPT], at_once),
        Way(f"1 process, {parts}", [SCRIPT], accumulated),
        Way(name, [*torchrun, SCRIPT], split),
        # With transformers' own activation, not the same function in one kernel.
        Way(f"Trainer, {whole}", [TRAINER], {**at_once, "fused_gelu": False}),
        Way(f"Trainer, {parts}", [TRAINER], {**accumulated, "fused_gelu": False}),
    ]


def run(way: Way, kept: FlagValues, output: Path) -> None:
    """Run a way as a child process, which writes to the folder `output`.

    Args:
        kept: flags of the user, which the way may change.
    """
    flags = {**DEFAULTS, **kept, **SETTINGS, **way.flags, "output_dir": str(output)}
    run_file = output.with_suffix(".yaml")
    run_file.write_text(as_yaml(flags, sources={}), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCH}
    env["TMPDIR"] = str(output.parent)  # torchrun leaves a folder there
    if torch.cuda.is_available():
        env["NVIDIA_TF32_OVERRIDE"] = "0"  # TF32 rounds to 5e-4
        if "strategy" in way.flags:  # one process; Trainer would use all GPUs
            env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = [PYTHON, *map(str, way.command), "--config", str(run_file)]
    code, log = programs.run_program(command, env)
    if code:
        if kept["verbose"]:
            print(log)
        kind: type[UserError] = {2: UserError, 3: OutOfMemory}.get(code, TrainingError)
        raise kind(f"{way.name}: {last_error(log) or f'exit code {code}'}")
