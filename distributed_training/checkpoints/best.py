"""The best evaluation of a resumed run: whether its loss still counts, and its checkpoint."""

import os
import shutil
from pathlib import Path

from distributed_training import console
from distributed_training.checkpoints.find import FoundCheckpoint
from distributed_training.checkpoints.folder import CheckpointFolder
from distributed_training.checkpoints.format import EVALUATED, step_folder
from distributed_training.checkpoints.other_runs import WHERE, differences
from distributed_training.files import atomic
from distributed_training.files.json_types import JsonObject
from distributed_training.ranks.context import DistContext

# Entries of the run signature that decide which sequences are evaluated, and on which tokens.
OF_SEQUENCES = """
    validation validation_tokens_sha256 seq_length isolate_documents packing train_on
    document_start template""".split()
# Also those of the dataset, if the sequences are held out of it.
OF_DATASET = ("dataset", "tokens_sha256", "validation_split")


def best_of(
    found: FoundCheckpoint, current: JsonObject, keeps_best: bool, ctx: DistContext
) -> tuple[JsonObject | None, Path]:
    """Return the best evaluation of a checkpoint, and the checkpoint of its step.

    Args:
        current: the signature of the run that resumes.
        keeps_best: the run needs the checkpoint.
    Returns:
        None as the first item if a later evaluation is the best.
    """
    counters = found.manifest["counters"]
    best, path = counters["best"], found.path
    if best is None:
        return None, path
    if not evaluates_the_same(found.manifest["identity"], current):
        console.warn(
            f"--resume: other sequences are evaluated than before: the best loss so far, "
            f"{best['loss']:.4f} of step {best['step']}, is not compared with theirs."
        )
        return None, path
    if best["step"] != counters["step"]:
        path = step_folder(path.parent, best["step"])
    if keeps_best and not ctx.broadcast_from_rank0(path.is_dir()):
        console.warn(f"{path} is missing: a later evaluation is the best.")
        return None, path
    return best, path


def evaluates_the_same(saved: JsonObject, current: JsonObject) -> bool:
    """Return whether the evaluations of two runs are of the same sequences, by their signatures."""
    names = [*OF_SEQUENCES, *(() if current["soft"].get("validation") else OF_DATASET)]
    now = {name: value for name, value in current["soft"].items() if name in names}
    evaluated = {EVALUATED: current["told"].get(EVALUATED)}
    return not (
        differences(saved["soft"], now, *WHERE) or differences(saved["told"], evaluated, *WHERE)
    )


def take_over(checkpoint: Path, step: int, folder: CheckpointFolder) -> None:
    """Copy the best checkpoint of another folder; later checkpoints of `folder` are renamed.

    The files become hard links where that is possible: no run changes them.
    """
    copy = folder.path / f"{atomic.PARTIAL}best"
    atomic.remove(copy)
    shutil.copytree(checkpoint, copy, copy_function=_link)
    folder.set_aside_after(-1)
    os.replace(copy, folder.of_step(step))
    atomic.sync_tree(folder.of_step(step))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another disk, or of another user
        shutil.copyfile(source, target)
