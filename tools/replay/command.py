"""--replay, from the repeated steps to replay-STEP.json."""

from __future__ import annotations

from torch import nn

from distributed_training.hooks import TrainingLoop
from distributed_training.ranks.context import DistContext
from distributed_training.run.run import Run
from distributed_training.settings.data import DataSettings
from tools.replay.folder import folder_of_run
from tools.replay.record import WAY, record_of, sequences_of, write_record
from tools.replay.repeat import repeat
from tools.replay.run_settings import RunSettings


def replay(
    run: Run, step: int, loop: TrainingLoop, data: DataSettings, ctx: DistContext
) -> nn.Module:
    """Repeat the steps of a run up to `step`, and show that step; all ranks call it.

    Returns:
        The wrapped model, whose engine must be destroyed.
    Raises:
        UserError: see `repeat`; or the file cannot be written.
    """
    folder = folder_of_run(run.folder.path)
    recorded = RunSettings.read(folder, step, ctx)
    others = recorded.check(run.manager.identity, loop.training.skip_steps)
    others += recorded.changed_since(run.state.step)
    repeated = repeat(run, step, loop, ctx)
    if not ctx.is_main:
        return run.objects.model
    facts = run.folder.facts
    now = {**{key: facts[key] for key in WAY}, "checkpoint": facts["flags"].get("resume")}
    sequences = sequences_of(repeated, run.datasets, data, run.manager.spec.tokenizer)
    max_grad_norm = loop.training.max_grad_norm
    record = record_of(repeated, sequences, now, others, recorded, max_grad_norm)
    write_record(record, folder)
    return run.objects.model
