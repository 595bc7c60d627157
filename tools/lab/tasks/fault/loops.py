"""Task 3: copies of the project whose training loop differs in one place.

A change replaces lines of `train_epoch_ddp` or of what it calls in real_model_example.py.
"""

import shutil
from pathlib import Path
from random import Random

from distributed_training import PROJECT
from distributed_training.errors import TrainingError
from tools.lab.pairs import as_lines, make_pairs
from tools.lab.task import Place

LOOPS = ("a", "b", "c")
SCRIPT = "real_model_example.py"
# What a run needs, and what it does not need of it.
COPIED = ("distributed_training", "tools")
LEFT_OUT = ("__pycache__", "lab", "faults", "benchmarks", "docs")

SYNC = "set_gradient_sync(model, is_last)  # the ranks reduce the gradients once per step\n"
COMPUTE = "step_loss += compute(micro_batch, valid_tokens, factor, run.meter.mark)\n"
BACKWARD = "    (loss * factor).backward()\n"
CLEAR = "        optimizer.zero_grad(set_to_none=True)\n"
START = "        set_learning_rate(optimizer, lr)\n"
FP32 = "        step_loss = torch.zeros((), device=ctx.device)\n"
FP64 = FP32.replace("(), ", "(), dtype=torch.float64, ")
# Name → what is replaced, by what. What occurs twice is replaced where it occurs first, in
# train_epoch_ddp.
FAULTS = {
    "mean_of_means": [
        (
            COMPUTE,
            "own_tokens = (micro_batch[1][:, 1:] != IGNORED).sum().clamp(min=1)\n"
            "            parts = len(step_batch.micro_batches) * ctx.world_size\n"
            f"            {COMPUTE.replace('valid_tokens', 'own_tokens * parts')}",
        )
    ],
    "last_micro_batch_only": [(SYNC, f"{CLEAR.strip()}\n            {SYNC}")],
    "wrong_micro_batch_exchanged": [(SYNC, SYNC.replace("is_last", "micro_step == 0"))],
    "divided_by_the_ranks": [(BACKWARD, BACKWARD.replace(" * factor", ""))],
}
HARMLESS = {
    "every_micro_batch_exchanged": [(SYNC, SYNC.replace("is_last", "True"))],
    "cleared_before_the_step": [(CLEAR, ""), (START, f"{CLEAR}{START}")],
    "loss_in_fp64": [(FP32, FP64)],
}


def drawn(seed: int) -> dict[str, str]:
    """Return the change of each loop; a seed gives one of them a fault."""
    random = Random(f"loops {seed}")
    changes = [random.choice(sorted(FAULTS)), *random.sample(sorted(HARMLESS), 2)]
    random.shuffle(changes)
    return dict(zip(LOOPS, changes, strict=True))


def changed(script: str, name: str) -> str:
    """Return the text of the script with a change.

    Raises:
        TrainingError: the script no longer has the lines that the change replaces.
    """
    for old, new in (FAULTS | HARMLESS)[name]:
        if old not in script:
            raise TrainingError(f"The lab is older than {SCRIPT}: its change {name} does not fit.")
        script = script.replace(old, new, 1)
    return script


def prepare(place: Place) -> None:
    """Write the copies, and data whose sequences have different numbers of tokens."""
    script = (PROJECT / SCRIPT).read_text(encoding="utf-8")
    for loop, name in drawn(place.seed).items():
        copy_project(place.folder / loop)
        (place.folder / loop / SCRIPT).write_text(changed(script, name), encoding="utf-8")
    (place.folder / "pairs.jsonl").write_text(as_lines(make_pairs(64, seed=0)), encoding="utf-8")


def copy_project(target: Path) -> None:
    """Copy what a run needs, without the script."""
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    for name in COPIED:
        shutil.copytree(PROJECT / name, target / name, ignore=ignored)
    for file in PROJECT.glob("ds_config_*.json"):
        shutil.copy(file, target)
