"""--replay, from the repeated steps to replay-STEP.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.cluster.context import DistContext
from support.data.opening import Datasets
from support.replay.folder import check_same_run, folder_of_run
from support.replay.record import WAY, record_of, sequences_of, write_record
from support.replay.repeat import Loop, repeat
from support.report.run import Run

if TYPE_CHECKING:
    from support.settings.settings import Settings


def replay(run: Run, loop: Loop, datasets: Datasets, settings: Settings, ctx: DistContext) -> None:
    """Repeat the steps of a run up to --replay, and show that step; all ranks call it.

    Raises:
        UserError: see `repeat`; or the file cannot be written.
    """
    step = settings.command.replay
    assert step is not None  # the caller has checked it
    folder = folder_of_run(settings.output.output_dir)
    check_same_run(folder, run.manager.identity, ctx)
    repeated = repeat(step, run, loop, settings.training, ctx)
    if not ctx.is_main:
        return
    facts, data = run.folder.facts, settings.data
    now = {**{key: facts[key] for key in WAY}, "checkpoint": settings.output.resume}
    replayed = record_of(step, repeated, now, folder, settings.training.max_grad_norm)
    tokenizer = run.manager.spec.tokenizer
    replayed["sequences"] = sequences_of(repeated, datasets, data, facts["dataset"], tokenizer)
    write_record(replayed, folder)
