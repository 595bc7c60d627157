"""The micro-batches of a run in one order, the same for any number of ranks and any strategy."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from support import console
from support.data.sequences import MicroBatch, Sequences
from support.data.stream_state import StreamState
from support.loss_chunks import IGNORED
from support.settings.training import TrainingSettings
from support.train_state import NEW_RUN, EvaluationPlan, TrainState


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


class TrainingData(Protocol):
    """Sequences, or a Stream."""

    @property
    def num_sequences(self) -> int:
        """The number of sequences in an epoch."""


def train_state(
    counters: dict, train: TrainingData, training: TrainingSettings, world_size: int
) -> TrainState:
    """Return the state of training from the counters of a checkpoint, or from NEW_RUN."""
    sequences = max(1, train.num_sequences)  # --eval_only may have none
    steps = total_steps(training, world_size, sequences, counters["step"], counters["samples"])
    return TrainState(
        total_steps=0 if training.eval_only else steps,
        num_sequences=sequences,
        global_batch=training.global_batch(world_size),
        evaluations=EvaluationPlan(
            training.eval, training.eval_every, training.early_stopping_patience
        ),
        first_step=counters["step"],
        **{name: counters[name] for name in NEW_RUN},
    )


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


def with_bar(steps: Iterator[StepBatch], what: str, count: int) -> Iterator[StepBatch]:
    """Yield the step batches, and show a progress bar of `count` of them."""
    with console.bar(what, count, "batch") as bar:
        for step_batch in steps:
            yield step_batch
            bar.update()


def copy_ahead(steps: Iterator[StepBatch], device: torch.device) -> Iterator[StepBatch]:
    """Read one step batch ahead and copy it to a GPU without blocking, while the GPU computes."""

    def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.pin_memory().to(device, non_blocking=True)

    ahead = None
    for step_batch in steps:
        if device.type == "cuda":
            on_device = [tuple(map(copy, micro)) for micro in step_batch.micro_batches]
            step_batch.micro_batches = on_device  # type: ignore[assignment]
        if ahead:
            yield ahead
        ahead = step_batch
    if ahead:
        yield ahead
