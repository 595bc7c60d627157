"""The folders of a replay: it reads those of a run, and writes to a temporary one.

Only replay-STEP.json is written to the run's own output folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support import console
from support.checkpoints import find
from support.checkpoints.format import list_checkpoints, step_of
from support.cluster.context import DistContext
from support.files.atomic import TemporaryFolder
from support.settings.settings import Settings

PREFIX = ".replay-"  # of the temporary folder in the run's output folder

# What a replay does not write. The steps are the same with and without these flags.
WRITES_NOTHING = {
    **{"save_every": None, "save_epochs": False, "no_save": True, "load_best_at_end": False},
    **{"no_export": True, "export_hf": None, "push_to_hub": False, "report_to": ()},
    **{"generate": (), "generate_every_eval": False, "profile": None, "memory_snapshot": None},
    **{"auto_micro_batch": False, "resume_force": False, "overwrite": False},
}


@contextmanager
def redirected(settings: Settings, ctx: DistContext, step: int) -> Iterator[Settings]:
    """Yield the settings of a run that repeats steps in a temporary folder; all ranks call it.

    Args:
        settings: those of the run to repeat; --output_dir is its folder.
        step: the step to show.
    """
    folder = Path(str(settings.output.output_dir))
    checkpoint = newest_before(step, folder / "checkpoints", ctx)
    temporary = TemporaryFolder(folder, PREFIX) if ctx.is_main else None
    place = ctx.broadcast_from_rank0(str(temporary and temporary.path / "run"))
    resume = None if checkpoint is None else str(checkpoint)
    yield settings.replace(output_dir=place, resume=resume, **WRITES_NOTHING)
    if temporary:
        temporary.remove()


def folder_of_run(output_dir: str | None) -> Path:
    """Return the output folder of the run that is repeated in `output_dir`."""
    return Path(str(output_dir)).parents[1]


def newest_before(step: int, checkpoints: Path, ctx: DistContext) -> Path | None:
    """Return the newest undamaged checkpoint before a step; None if there is none.

    The weights of a checkpoint contain the updates of the steps up to its own.
    """
    candidates = [path for path in list_checkpoints(checkpoints) if step_of(path) < step]
    for path in ctx.broadcast_from_rank0(candidates):
        _, problem = find.verify(path, ctx)
        if not problem:
            return path
        console.warn(f"Skipped the checkpoint {path}: {problem}.")
    console.print0(f"{checkpoints} has no checkpoint before step {step}: all steps are repeated.")
    return None
