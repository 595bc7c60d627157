"""When a run evaluates, ends an epoch and stops early; what a checkpoint saves of it."""

from types import SimpleNamespace

from support.cli.parse import parse_arguments
from support.data.batches import train_state
from support.train_state import TrainState


def state_of(**values) -> TrainState:
    return TrainState(total_steps=6, num_sequences=10, global_batch=4, **values)


def test_the_last_step_of_an_epoch_has_the_remaining_sequences():
    state, by_steps, seen = state_of(), state_of(eval_every=4), []
    while not state.finished:
        state.advance()
        by_steps.advance()
        due = (state.evaluation_is_due, by_steps.evaluation_is_due)
        seen.append((state.samples, state.epoch, *due))
    assert seen == [
        *((4, 1, False, False), (8, 1, False, False), (10, 2, True, False)),
        *((14, 2, False, True), (18, 2, False, False), (20, 3, True, True)),
    ]


def test_early_stopping_counts_evaluations_without_improvement():
    state = state_of(patience=2, eval_every=1)
    state.add_evaluation(1.0)  # before training: not the best
    seen = []
    for loss in (2.0, 2.5, 1.5, float("nan"), 1.6):
        state.advance()
        state.add_evaluation(loss)
        seen.append((state.best["waited"], state.stopped_early))
        if loss == 1.5:
            state.add_evaluation(loss)  # a resumed run may repeat it, which does not count
    assert seen == [(0, False), (1, False), (0, False), (1, False), (2, True)]
    assert state.best["loss"] == 1.5 and state.best["step"] == 3 and state.finished


def test_a_resumed_run_continues_the_counters():
    args = parse_arguments(["--batch_size", "4", "--max_steps", "6"])
    state = state_of(tokens=64, training_seconds=1.0, first_loss=3.0, last_loss=2.0)
    state.advance()
    saved = state.counters()
    assert saved["step"] == 1 and saved["samples"] == 4 and saved["tokens"] == 64
    resumed = train_state(saved, SimpleNamespace(num_sequences=10), args, world_size=1)
    assert resumed.counters() == saved and resumed.first_step == 1
