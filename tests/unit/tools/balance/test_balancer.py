"""--rank_shares auto: the shares that the ranks choose, and the timer of their forward passes."""

import pytest
import torch

from distributed_training.train_state import TrainState
from tools.balance.balancer import GAIN, MEASURED, WARM_UP, Balancer, choose
from tools.balance.timer import ForwardTimer


def test_the_ranks_choose_shares_that_end_together():
    choice = choose([6, 6], [1.0, 2.0], None)
    assert choice.counts == [8, 4] and choice.gain == pytest.approx(1.5)
    assert choose([8, 4], [1.0, 2.0], None).counts == [8, 4]
    assert choose([6, 6], [1.0, 1.08], None).gain < GAIN  # a difference that needs no change
    # No more than fits the memory of a rank, but not fewer than it has computed.
    assert choose([6, 6], [1.0, 10.0], [7, 12]).counts == [7, 5]
    assert choose([6, 6], [1.0, 10.0], [3, 12]).counts == [6, 6]


class Ranks:
    """Two ranks, of which the other is `slower` times as slow."""

    def __init__(self, slower: float):
        self.slower, self.exchanged = slower, 0

    def all_gather(self, seconds):
        self.exchanged += 1
        return [seconds, seconds * self.slower]


class Timer:
    """A timer that needs a second for a token."""

    start = end_step = lambda self: None

    def stop(self):
        return 1.0


def steps_of_a_run(slower: float, steps: int) -> tuple[Ranks, TrainState, list]:
    ranks, reports = Ranks(slower), []
    state = TrainState(steps, 10**6, global_batch=12)
    state.ranks.change(1, [6, 6])
    balancer = Balancer(ranks, state, Timer(), lambda *report: reports.append(report))
    for _ in range(steps):
        state.advance()
        balancer.after_step()
    return ranks, state, reports


def test_a_choice_is_used_two_steps_later_and_kept_while_it_fits():
    """The batch of the next step has been read when the ranks choose."""
    _, state, reports = steps_of_a_run(slower=2.0, steps=100)
    [(record, text)] = reports
    first = WARM_UP + MEASURED + 2
    assert state.ranks.at(first - 1) == [6, 6]
    assert state.ranks.at(first) == state.ranks.at(100) == [8, 4]
    assert record["step"] == WARM_UP + MEASURED and record["rank_sequences"] == [8, 4]
    assert f"from step {first} on" in text and "8 : 4" in text


def test_equal_ranks_change_nothing_and_measure_more_more_rarely():
    ranks, state, reports = steps_of_a_run(slower=1.03, steps=1000)
    assert state.ranks.at(1000) == [6, 6] and ranks.exchanged < 15
    [(record, text)] = reports  # says once that they are equal
    assert record["rank_sequences"] == [6, 6] and "keep 6 : 6" in text


class Model(torch.nn.Sequential):
    """A model of two layers, whose first one gets the ids."""

    def get_input_embeddings(self):
        return self[0]


@pytest.mark.parametrize("gathered", [(), (torch.nn.Embedding, torch.nn.Linear)])
def test_the_timer_measures_training_and_leaves_no_hook(gathered):
    """Of layers that gather parameters each is timed alone."""
    model = Model(torch.nn.Embedding(9, 2), torch.nn.Linear(2, 2))
    timer = ForwardTimer(model, lambda m: isinstance(m, gathered), torch.device("cpu"))
    assert timer.modules == ([*model] if gathered else [model])
    timer.start()
    for _ in range(3):
        model(torch.ones(2, 5, dtype=torch.int64))
        timer.end_step()
    model.eval()
    model(torch.ones(2, 5, dtype=torch.int64))  # an evaluation is not timed
    assert timer._tokens == [10, 10, 10, 0] and timer.stop() > 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
