"""The folders of a replay: it reads those of a run, and writes to a temporary one.

Only replay-STEP.json is written to the run's own output folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed_training import console
from distributed_training.checkpoints import signature
from distributed_training.checkpoints.format import list_checkpoints, step_of
from distributed_training.checkpoints.verify import verify
from distributed_training.files.atomic import TemporaryFolder
from distributed_training.ranks.context import DistContext
from distributed_training.settings.settings import Settings
from tools.replay.run_settings import RunSettings

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
    # `RunSettings.check` has compared the settings. The run itself may have forced a resume.
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
    recorded = RunSettings.read(folder, step, ctx)
    settings = recorded.taken(settings, ctx.world_size)
    flags = signature.flags_signature(settings.data, settings.training, ctx.world_size)
    recorded.check(flags, settings.training.skip_steps)
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
