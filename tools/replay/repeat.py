"""Repeats the steps of a run up to one, and measures that step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from distributed_training import console
from distributed_training.checkpoints.loading import PieceReader
from distributed_training.checkpoints.verify import read_manifest
from distributed_training.data.batches import StepBatch, StepBatches
from distributed_training.errors import NotFinite, UserError
from distributed_training.hooks import TrainingLoop
from distributed_training.ranks.context import DistContext
from distributed_training.run.balancing import FixedShares
from distributed_training.run.run import Run
from distributed_training.settings.training import TrainingSettings
from distributed_training.strategies import gradients
from tools.replay import layers
from tools.replay.sequences import Place, TokenLosses, alone, token_losses
from tools.replay.step_recorder import RecordedStep, StepRecorder

MOST_TRIES = 24  # of the gradient of a sequence in fp16, each with half of the loss scale


@dataclasses.dataclass(frozen=True)
class Repeated:
    """What was measured of a step. `tokens` and `norms` have the sequences of all ranks."""

    step: int
    numbers: RecordedStep | None  # None: an error ended the step
    outcome: str  # "updated", "skipped" in fp16, or "stopped": the run ended here
    reason: str | None  # why it was skipped or stopped
    loss_scale: float | None  # in fp16, of this step
    layers: list[layers.Layer]  # none if no update was made
    tokens: dict[Place, TokenLosses]
    numbers_of: dict[Place, int]  # of the sequences in the dataset; none for a stream
    norms: dict[Place, float]  # of a sequence's part of the gradient; none if stopped


def repeat(run: Run, step: int, loop: TrainingLoop, ctx: DistContext) -> Repeated:
    """Repeat the steps of a run up to `step`, and measure this one; all ranks call it.

    The step is made by the training loop itself. The weights before it are saved, so that the
    gradient of each sequence can be computed afterwards.

    Raises:
        UserError: the run has no such step, or --skip_steps leaves it out.
    """
    training = loop.training
    step_batch = repeat_before(run, step, loop, ctx)
    manager = run.manager
    manager.save_now(run.state, announced=False)  # in the temporary folder
    tokens = token_losses(run.objects.model, loop.autocast, step_batch, ctx)
    scale = loss_scale(run)
    log = StepRecorder.like(run.log)
    error = ""
    try:
        loop.train_epoch(run._replace(log=log), [step_batch], training, ctx)
    except NotFinite as stopped:  # all ranks raise it
        error = str(stopped)
    ctx.monitor.training_ends()  # what follows has no steps whose time could be watched
    outcome, reason = outcome_of(step, log.recorded, error, ctx.precision)
    changes: list[layers.Layer] = []
    if outcome == "updated" and log.recorded:
        changes = compare_layers(run, step - 1, log.recorded.grad_norm)
    tokens = merged(ctx.all_gather(tokens))
    norms: dict[Place, float] = {}
    if outcome != "stopped":
        manager.load_saved(step - 1)
        norms = gradient_norms(run, step, loop, step_batch, [*tokens], ctx)
    return Repeated(
        step=step,
        numbers=log.recorded,
        outcome=outcome,
        reason=reason,
        loss_scale=scale,
        layers=changes,
        tokens=tokens,
        numbers_of=merged(ctx.all_gather(numbers_in_dataset(step_batch, ctx.rank))),
        norms=norms,
    )


def repeat_before(run: Run, step: int, loop: TrainingLoop, ctx: DistContext) -> StepBatch:
    """Repeat the steps before `step`, and return this rank's batch of it."""
    training, state = loop.training, run.state
    if step > state.total_steps:
        raise UserError(f"--replay {step}: this run has {state.total_steps} steps.")
    if step in training.skip_steps:
        raise UserError(f"--replay {step}: the run left this step out (--skip_steps).")
    if not run.folder.is_shared:
        raise UserError(
            "--replay saves the weights before the step, and the nodes do not share the disk of "
            "--output_dir: copy the folder to a disk that they share."
        )
    while state.step < step - 1:
        loop.train_epoch(run, until(step - 1, loop.remaining(), run, training), training, ctx)
    run.log.flush()
    console.print0(f"🔁 Repeating step {step}")
    return next(iter(loop.remaining()))


def until(
    last: int, steps: StepBatches, run: Run, training: TrainingSettings
) -> Iterator[StepBatch]:
    """Yield the step batches up to that of the step `last`, without those of --skip_steps."""
    for step_batch in steps:
        if run.state.step + 1 in training.skip_steps:
            run.skip_step()
        else:
            yield step_batch
        if run.state.step >= last:
            return


def loss_scale(run: Run) -> float | None:
    """Return the loss scale of the next step; None without loss scaling."""
    state = gradients.scaler_state(run.objects.scaler, run.objects.optimizer)
    return state.get("scale", state.get("cur_scale"))


def outcome_of(
    step: int, numbers: RecordedStep | None, error: str, precision: str
) -> tuple[str, str | None]:
    """Return what became of a step ("updated", "skipped" or "stopped"), and why."""
    if numbers is None:
        return "stopped", error
    norm = 0.0 if numbers.grad_norm is None else numbers.grad_norm
    is_finite = math.isfinite(norm) and norm >= 0  # DeepSpeed's norm of an overflow is -1
    if precision == "fp16" and math.isfinite(numbers.loss) and not is_finite:
        return "skipped", "a gradient overflowed in fp16"
    if math.isfinite(numbers.loss) and is_finite:
        return "updated", None
    return "stopped", str(gradients.not_finite(numbers.loss, step))


def compare_layers(run: Run, before: int, grad_norm: float | None) -> list[layers.Layer]:
    """Return how the step has changed each layer.

    Args:
        before: the step whose checkpoint has the states before it.
    """
    contents = run.manager.contents
    path = run.manager.folder.of_step(before)
    manifest, _ = read_manifest(path)  # each rank reads what this run has just written
    names = layers.layer_names(run.objects.module, contents.shards.shapes)
    reader = PieceReader(path, manifest)
    return layers.changes_of_layers(contents.shards, reader, names, grad_norm)


def gradient_norms(
    run: Run,
    step: int,
    loop: TrainingLoop,
    step_batch: StepBatch,
    places: list[Place],
    ctx: DistContext,
) -> dict[Place, float]:
    """Return the norm of each sequence's own gradient, per token of the sequence.

    The training loop makes a step with each sequence alone, at a learning rate of 0. In fp16 such
    a gradient may overflow, because its divisor is the tokens of one sequence: then the loss scale
    is smaller at the next try.
    """
    training = dataclasses.replace(loop.training, lr=0.0)
    found = {}
    with console.bar("Sequences", len(places), "sequence") as bar:
        for place in sorted(places):
            for _ in range(MOST_TRIES if ctx.precision == "fp16" else 1):
                log = StepRecorder.like(run.log)
                state = dataclasses.replace(run.state, step=step - 1)
                alone_run = run._replace(log=log, state=state, balance=FixedShares())
                loop.train_epoch(alone_run, [alone(step_batch, place, ctx.rank)], training, ctx)
                assert log.recorded is not None  # train_epoch logs each step
                norm = log.recorded.grad_norm
                if norm is not None and math.isfinite(norm) and norm >= 0:
                    found[place] = norm
                    break
            bar.update()
    return found


def numbers_in_dataset(step_batch: StepBatch, rank: int) -> dict[Place, int]:
    """Return the number of each sequence of this rank in the dataset; none for a stream."""
    return {
        Place(rank, micro_batch, row): int(number)
        for micro_batch, numbers in enumerate(step_batch.numbers or ())
        for row, number in enumerate(numbers)
    }


def merged(parts: list[dict]) -> dict:
    """Return the entries of all ranks."""
    return {key: value for part in parts for key, value in part.items()}
