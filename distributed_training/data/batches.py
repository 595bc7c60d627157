"""The micro-batches of a run in one order, the same for any number of ranks and any strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from distributed_training import console
from distributed_training.data.sequences import MicroBatch, Sequences
from distributed_training.errors import UserError
from distributed_training.loss_chunks import IGNORED
from distributed_training.rank_shares import AUTO, RankCounts, divide, of_each_rank
from distributed_training.ranks.context import DistContext
from distributed_training.settings.training import TrainingSettings
from distributed_training.train_state import NEW_RUN, EvaluationPlan, TrainState

if TYPE_CHECKING:
    from distributed_training.data.stream_state import StreamState


def steps_of(num_sequences: int, batch: int) -> int:
    """Return the number of optimizer steps, of which the last may be smaller."""
    return -(-num_sequences // batch)


def total_steps(
    training: TrainingSettings, world_size: int, num_sequences: int, step: int = 0, samples: int = 0
) -> int:
    """Return the number of optimizer steps of the whole run, including those before a resume.

    Args:
        num_sequences: sequences in an epoch.
        step, samples: optimizer steps made before the resume, and the sequences used in them.
    """
    if training.epochs is None and training.max_steps:
        return training.max_steps
    batch = training.global_batch(world_size)
    samples_left = max(0, (training.epochs or 1) * num_sequences - samples)
    epochs_left, rest = divmod(samples_left, num_sequences)
    total = step + epochs_left * steps_of(num_sequences, batch) + steps_of(rest, batch)
    return min(total, training.max_steps or total)


@dataclass
class StepBatch:
    """The step batch of one rank: its micro-batches of one optimizer step.

    A micro-batch is (inputs, labels, positions), each int64 [batch_size, length]. Labels are the
    inputs, or IGNORED for tokens without a loss. Positions are None unless documents are isolated;
    then they restart in each document.
    """

    micro_batches: list[MicroBatch]
    tokens: int  # number of tokens in them, without padding
    state: StreamState | None = None  # with --streaming: after this step
    # The numbers of the sequences of each micro-batch in the dataset; a stream has none.
    numbers: list[np.ndarray] | None = None


StepBatches = Iterable[StepBatch]


class TrainingData(Protocol):
    """Sequences, or a Stream."""

    @property
    def num_sequences(self) -> int:
        """The number of sequences in an epoch."""


def train_state(
    counters: dict,
    train: TrainingData,
    training: TrainingSettings,
    ctx: DistContext,
    rank_limits: list[int] | None = None,
) -> TrainState:
    """Return the state of training from the counters of a checkpoint, or from NEW_RUN.

    Args:
        rank_limits: with --rank_shares auto the sequences of a micro-batch that fit the memory of
            each rank; None: not known, or without it.
    """
    sequences = max(1, train.num_sequences)  # --eval_only may have none
    steps = total_steps(training, ctx.world_size, sequences, counters["step"], counters["samples"])
    check_skipped_steps(training.skip_steps, counters, steps)
    saved = {name: counters[name] for name in NEW_RUN}
    history = saved.pop("rank_sequences")
    first = initial_counts(training, ctx, rank_limits)
    if training.rank_shares != AUTO or not all(
        fits(entry["sequences"], first, rank_limits) for entry in history
    ):
        history = []  # for other ranks, GPUs or batches
    return TrainState(
        total_steps=0 if training.eval_only else steps,
        num_sequences=sequences,
        global_batch=training.global_batch(ctx.world_size),
        evaluations=EvaluationPlan(
            training.eval, training.eval_every, training.early_stopping_patience
        ),
        ranks=RankCounts(history or [{"from_step": 1, "sequences": first}], rank_limits),
        **saved,
    )


def check_skipped_steps(requested: tuple[int, ...], counters: dict, total_steps: int) -> None:
    """Check that the run has the steps of --skip_steps, and has not made them yet.

    Raises:
        UserError: it has fewer steps; or the weights of the checkpoint that is resumed contain the
            update of one of them.
    """
    if beyond := [step for step in requested if step > total_steps]:
        raise UserError(f"--skip_steps {beyond[0]}: this run has {total_steps} steps.")
    made = [step for step in requested if step <= counters["step"]]
    if trained := [step for step in made if step not in counters["skipped_steps"]]:
        raise UserError(
            f"--skip_steps {trained[0]}: the checkpoint is of step {counters['step']} and contains "
            f"the update of step {trained[0]}. Resume from an older one: --resume "
            f"OUTPUT_DIR/checkpoints/step-N with N below {trained[0]}."
        )


def fits(rank_counts: list[int], others: list[int], rank_limits: list[int] | None) -> bool:
    """Return whether the ranks may have these sequences of a micro-batch instead of `others`."""
    limits = rank_limits or [sum(others)] * len(others)
    return (
        len(rank_counts) == len(others)
        and sum(rank_counts) == sum(others)
        and all(1 <= count <= limit for count, limit in zip(rank_counts, limits, strict=True))
    )


def initial_counts(
    training: TrainingSettings, ctx: DistContext, rank_limits: list[int] | None = None
) -> list[int]:
    """Return the sequences of each rank in a micro-batch at the start of a run: --rank_shares.

    Args:
        rank_limits: sequences that fit each rank; ignored if they leave no room for all sequences.
    Raises:
        UserError: the number of shares fits neither the ranks nor the nodes.
    """
    try:
        shares = of_each_rank(training.rank_shares, ctx.nodes.of_rank)
    except ValueError as error:
        raise UserError(f"--rank_shares: {error}.") from error
    count = training.batch_size * ctx.world_size
    if rank_limits and sum(rank_limits) < count:
        rank_limits = None
    # Each rank takes part in the collectives of each micro-batch, so it gets a sequence.
    return [*divide(count, shares, at_least=1, at_most=rank_limits)]


def divide_over_ranks(indices: np.ndarray, rank_counts: list[int]) -> list[np.ndarray]:
    """Divide a micro-batch in the shares of a whole one, which has `rank_counts` sequences."""
    is_whole = len(indices) == sum(rank_counts)  # the usual case; `divide` would return the same
    counts = rank_counts if is_whole else divide(len(indices), rank_counts)
    return np.split(indices, np.cumsum(counts)[:-1])


def fill_up(sequences: Sequences, indices: np.ndarray, rows: int) -> MicroBatch:
    """Read a micro-batch [rows, length]; missing sequences become rows that the loss ignores."""
    inputs, labels, positions = sequences.read(indices)
    padding = (0, 0, 0, rows - len(indices))
    if positions is not None:
        positions = F.pad(positions, padding)
    return F.pad(inputs, padding), F.pad(labels, padding, value=IGNORED), positions


def seed_dropout(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed the random numbers of dropout, which differ for each rank and micro-batch.

    A resumed run draws the same ones as an uninterrupted run.
    """
    numbers = np.random.SeedSequence([seed, step, micro_step, rank])
    torch.manual_seed(int(numbers.generate_state(1, np.uint64)[0]) >> 1)


def with_bar(
    steps: Iterator[StepBatch], what: str, num_sequences: int, batch: int
) -> Iterator[StepBatch]:
    """Yield the step batches of so many sequences, and show a progress bar."""
    with console.bar(what, steps_of(num_sequences, batch), "batch") as bar:
        for step_batch in steps:
            yield step_batch
            bar.update()


def copy_ahead(steps: Iterator[StepBatch], device: torch.device) -> Iterator[StepBatch]:
    """Read one step batch ahead and copy it to a GPU without blocking, while the GPU computes."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    ahead = None
    for step_batch in steps:
        if device.type == "cuda":
            on_device: list[MicroBatch] = [
                (copy(inputs), copy(labels), None if positions is None else copy(positions))
                for inputs, labels, positions in step_batch.micro_batches
            ]
            step_batch = replace(step_batch, micro_batches=on_device)
        if ahead:
            yield ahead
        ahead = step_batch
    if ahead:
        yield ahead
