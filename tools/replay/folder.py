"""The folders of a replay: it reads those of a run, and writes to a temporary one.

Only replay-STEP.json is written to the run's own output folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed_training import console
from distributed_training.checkpoints import other_runs, signature
from distributed_training.checkpoints.format import list_checkpoints, step_of
from distributed_training.checkpoints.verify import verify
from distributed_training.errors import UserError
from distributed_training.files.atomic import TemporaryFolder
from distributed_training.files.json_types import JsonObject
from distributed_training.ranks.context import DistContext
from distributed_training.run.run_folder import RESULTS, read_results
from distributed_training.settings.settings import Settings

PREFIX = ".replay-"  # of the temporary folder in the run's output folder

# Flags of a replay, which writes nothing else. The steps are the same with and without these.
WRITES_NOTHING = {
    "save_every": None,
    "save_epochs": False,
    "no_save": True,
    "load_best_at_end": False,
    "no_export": True,
    "export_hf": None,
    "push_to_hub": False,
    "report_to": (),
    "generate": (),
    "generate_every_eval": False,
    "profile": None,
    "memory_snapshot": None,
    "auto_micro_batch": False,
    "overwrite": False,
    # `check_same_run` has compared the settings. The run itself may have forced a resume.
    "resume_force": True,
}


@contextmanager
def in_temporary_folder(settings: Settings, ctx: DistContext, step: int) -> Iterator[Settings]:
    """Yield the settings of a run that repeats steps in a temporary folder; all ranks call it.

    Args:
        settings: those of the run to repeat; --output_dir is its folder.
        step: the step to show.
    Raises:
        UserError: the folder is of another run.
    """
    folder = Path(str(settings.output.output_dir))
    flags = signature.flags_signature(settings.data, settings.training, ctx.world_size)
    check_same_run(folder, flags, settings.training.skip_steps, step, ctx)
    checkpoint = newest_before(step, folder / "checkpoints", ctx)
    temporary = TemporaryFolder(folder, PREFIX) if ctx.is_main else None
    place = ctx.broadcast_from_rank0(str(temporary and temporary.path / "run"))
    resume = None if checkpoint is None else str(checkpoint)
    yield settings.replace(output_dir=place, resume=resume, **WRITES_NOTHING)
    if temporary:
        temporary.remove()


def folder_of_run(replay_folder: Path) -> Path:
    """Return the output folder of the run that is repeated in a folder of `in_temporary_folder`."""
    return replay_folder.parents[1]


def check_same_run(
    folder: Path, identity: JsonObject, skip_steps: tuple[int, ...], before: int, ctx: DistContext
) -> list[str]:
    """Check that the run in a folder trained the same model on the same data in the same order.

    Args:
        identity: the run signature, or the part of it that is known.
        skip_steps: of this replay; those from the step `before` on do not matter.
    Returns:
        A clause about each other setting that differs, which may change the loss.
    Raises:
        UserError: it did not; the message names the differences.
    """
    results = ctx.broadcast_from_rank0(read_results(folder / RESULTS) if ctx.is_main else None)
    results = results or {}
    recorded, where = results.get("run_signature") or {}, ("in that run", "now")
    found, others = [], []
    for part, clauses in (("hard", found), ("soft", found), ("told", others)):
        earlier = recorded.get(part) or {}
        clauses += other_runs.differences(earlier, identity.get(part) or {}, *where)
    left_out = results.get("skipped_steps")
    skipped = {step for step in skip_steps if step < before}
    if left_out is not None and skipped != {step for step in left_out if step < before}:
        found.append(f"--skip_steps {','.join(map(str, left_out)) or 'not given'} in that run")
    if found:
        raise UserError(
            f"--replay: the settings are not those of the run in {folder}: {'; '.join(found)}. "
            f"Use the flags of its command, which {RESULTS} has."
        )
    return others


def newest_before(step: int, checkpoints: Path, ctx: DistContext) -> Path | None:
    """Return the newest undamaged checkpoint before a step; None if there is none.

    The weights of a checkpoint contain the updates of the steps up to its own.
    """
    candidates = [path for path in list_checkpoints(checkpoints) if step_of(path) < step]
    for path in ctx.broadcast_from_rank0(candidates):
        _, problem = verify(path, ctx)
        if not problem:
            return path
        console.warn(f"Skipped the checkpoint {path}: {problem}.")
    console.print0(f"{checkpoints} has no checkpoint before step {step}: all steps are repeated.")
    return None
