"""--replay, from the repeated steps to replay-STEP.json."""

from __future__ import annotations

from support.cluster.context import DistContext
from support.data.opening import Datasets
from support.replay.folder import check_same_run, folder_of_run
from support.replay.record import WAY, record_of, sequences_of, write_record
from support.replay.repeat import Loop, repeat
from support.report.run import Run
from support.settings.data import DataSettings


def replay(run: Run, loop: Loop, datasets: Datasets, data: DataSettings, ctx: DistContext) -> None:
    """Repeat the steps of a run up to `loop.step`, and show that step; all ranks call it.

    Raises:
        UserError: see `repeat`; or the file cannot be written.
    """
    folder = folder_of_run(run.folder.path)
    identity, skipped = run.manager.identity, loop.training.skip_steps
    others = check_same_run(folder, identity, skipped, loop.step, ctx)
    repeated = repeat(run, loop, ctx)
    if not ctx.is_main:
        return
    facts = run.folder.facts
    now = {**{key: facts[key] for key in WAY}, "checkpoint": facts["flags"].get("resume")}
    replayed = record_of(loop.step, repeated, now, folder, loop.training.max_grad_norm)
    replayed["changed_settings"] = others
    tokenizer = run.manager.spec.tokenizer
    replayed["sequences"] = sequences_of(repeated, datasets, data, facts["dataset"], tokenizer)
    write_record(replayed, folder)
