"""--replay, from the repeated steps to replay-STEP.json."""

from __future__ import annotations

from torch import nn

from support.cluster.context import DistContext
from support.data.opening import Datasets
from support.replay.folder import check_same_run, folder_of_run
from support.replay.record import WAY, record_of, sequences_of, write_record
from support.replay.repeat import Loop, repeat
from support.report.run import Run
from support.settings.data import DataSettings


def replay(
    run: Run, how: tuple, datasets: Datasets, data: DataSettings, ctx: DistContext
) -> nn.Module:
    """Repeat the steps of a run up to --replay, and show that step; all ranks call it.

    Args:
        how: the fields of `repeat.Loop`.
    Returns:
        The wrapped model, whose engine must be destroyed.
    Raises:
        UserError: see `repeat`; or the file cannot be written.
    """
    loop, folder = Loop(*how), folder_of_run(run.folder.path)
    identity, skipped = run.manager.identity, loop.training.skip_steps
    others = check_same_run(folder, identity, skipped, loop.step, ctx)
    repeated = repeat(run, loop, ctx)
    if not ctx.is_main:
        return run.objects.model
    facts = run.folder.facts
    now = {**{key: facts[key] for key in WAY}, "checkpoint": facts["flags"].get("resume")}
    sequences = sequences_of(repeated, datasets, data, run.manager.spec.tokenizer)
    max_grad_norm = loop.training.max_grad_norm
    write_record(record_of(repeated, sequences, now, others, folder, max_grad_norm), folder)
    return run.objects.model
