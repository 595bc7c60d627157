"""Repeats the steps of a run up to one, and measures that step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from support import console
from support.balance.balancer import Balancer
from support.checkpoints.loading import PieceReader
from support.checkpoints.verify import read_manifest
from support.cluster.context import DistContext
from support.data.batches import StepBatch, StepBatches
from support.errors import NotFinite, UserError
from support.replay import layers
from support.replay.sequences import Place, TokenLosses, alone, token_losses
from support.replay.step_recorder import RecordedStep, StepRecorder
from support.report.run import Run
from support.settings.training import TrainingSettings
from support.strategies import gradients

MOST_TRIES = 24  # of the gradient of a sequence in fp16, each with half of the loss scale


class Loop(NamedTuple):
    """The training loop of the script for a run, and the step that it repeats last."""

    step: int
    training: TrainingSettings
    train_epoch: Callable[[Run, StepBatches, TrainingSettings, DistContext], None]
    remaining: Callable[[], StepBatches]  # the step batches of the epoch from the next step on
    casting: AbstractContextManager  # for forward passes


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


def repeat(run: Run, loop: Loop, ctx: DistContext) -> Repeated:
    """Repeat the steps of a run up to `loop.step`, and measure this one; all ranks call it.

    The step is made by the training loop itself. The weights before it are saved, so that the
    gradient of each sequence can be computed afterwards.

    Raises:
        UserError: the run has no such step, or --skip_steps leaves it out.
    """
    step, training = loop.step, loop.training
    step_batch = repeat_before(run, loop, ctx)
    manager = run.manager
    manager.save(run.state, announced=False)  # in the temporary folder
    tokens = token_losses(run.objects.model, loop.casting, step_batch, ctx)
    scale = loss_scale(run)
    log = StepRecorder(run.meter)
    error = ""
    try:
        loop.train_epoch(recorded_by(log, run), [step_batch], training, ctx)
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
        norms = gradient_norms(run, loop, step_batch, [*tokens], ctx)
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


def repeat_before(run: Run, loop: Loop, ctx: DistContext) -> StepBatch:
    """Repeat the steps before `loop.step`, and return this rank's batch of it."""
    step, training = loop.step, loop.training
    state = run.state
    if step > state.total_steps:
        raise UserError(f"--replay {step}: this run has {state.total_steps} steps.")
    if step in training.skip_steps:
        raise UserError(f"--replay {step}: --skip_steps leaves this step out.")
    if not ctx.shares_output:
        raise UserError(
            "--replay saves the weights before the step, and the nodes do not share the disk of "
            "--output_dir: copy the folder to a disk that they share."
        )
    while state.step < step - 1:
        loop.train_epoch(run, until(step - 1, loop.remaining(), run, training), training, ctx)
    run.log.flush()
    console.print0(f"🔁 Repeating step {step}")
    return next(iter(loop.remaining()))


def recorded_by(log: StepRecorder, run: Run) -> Run:
    """Return the run with a recorder, of which a training loop uses no more than it has."""
    return run._replace(log=log)  # type: ignore[arg-type]


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
    run: Run, loop: Loop, step_batch: StepBatch, places: list[Place], ctx: DistContext
) -> dict[Place, float]:
    """Return the norm of each sequence's own gradient, per token of the sequence.

    The training loop makes a step with each sequence alone, at a learning rate of 0. In fp16 such
    a gradient may overflow, because its divisor is the tokens of one sequence: then the loss scale
    is smaller at the next try.
    """
    training = dataclasses.replace(loop.training, lr=0.0)
    idle = Balancer(ctx, run.state, None, run.log.log_shares)
    found = {}
    with console.bar("Sequences", len(places), "sequence") as bar:
        for place in sorted(places):
            for _ in range(MOST_TRIES if ctx.precision == "fp16" else 1):
                log = StepRecorder(run.meter)
                state = dataclasses.replace(run.state, step=loop.step - 1)
                alone_run = recorded_by(log, run)._replace(state=state, balance=idle)
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
