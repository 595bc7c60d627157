"""The cost of a run and its Slurm jobs, computed from rates and durations."""

from types import SimpleNamespace

import pytest

from distributed_training.errors import UserError
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.units import GB
from distributed_training.workload.rate import Rate, assumed_rate
from distributed_training.workload.workload import Workload, adapters
from tools.plan import network_cost
from tools.plan.cost import save_times, slurm_budget


@pytest.mark.parametrize(
    "name, lookups, layers, hidden",
    [("gpt2", 1024 * 768, 12, 768), ("Llama-2-7B", 32000 * 4096, 32, 4096)],
)
def test_assumed_rate_follows_from_the_flop_of_a_token(name, lookups, layers, hidden):
    """6N + 12LHT, where N is without the tables that are only looked up (PaLM, appendix B)."""
    model = find_architecture(name)
    flop = 6 * (model.total - lookups) + 12 * layers * hidden * 512
    rate = assumed_rate("A100", None, Workload(model, 4, 8, 512))
    assert rate.source == "assumed" and "40 %" in rate.basis
    assert rate.tokens_per_second == pytest.approx(0.4 * 312e12 / flop)
    lora = adapters(model, 8, None)
    adapted = assumed_rate("A100", None, Workload(model, 4, 8, 512, lora=lora))
    assert adapted.tokens_per_second == pytest.approx(rate.tokens_per_second * 1.5, rel=0.1)
    with pytest.raises(UserError, match="--precision fp16"):  # a T4 has no bf16
        assumed_rate("T4", None, Workload(model, 4, 8, 512))


def test_a_network_adds_the_time_of_sending_to_each_step():
    work = Workload(find_architecture("gpt2"), 4, 8, 512, accumulation=2)
    rate = Rate(8192, "measured", "here", "", length=512)  # a step of one second
    slower = network_cost.on_network(rate, work, sent=6 * GB, bandwidth=2)
    assert slower.tokens_per_second == 8192 / 4 and "75%" in slower.basis
    assert network_cost.on_network(rate, work, sent=0, bandwidth=2).tokens_per_second == 8192


# ------------------------------------------------------------------------------------- Slurm jobs


def test_at_a_signal_the_whole_save_counts_and_between_signals_what_training_waits():
    run = {"checkpoint_seconds": [0.5, 0.25], "saves": {"count": 2, "write_seconds": 9.0}}
    assert save_times(SimpleNamespace(save_seconds=None), run) == (0.5, 4.5)
    del run["saves"]  # of an earlier version, which wrote while training waited
    assert save_times(SimpleNamespace(save_seconds=None), run) == (0.5, 0)
    assert save_times(SimpleNamespace(save_seconds=60.0), run) == (60, 0)


def test_time_between_saves_and_jobs():
    """The time between two saves is that of Young and Daly, √(2 · save · MTBF)."""
    found = slurm_budget(train=9_000, save=200, usable=4_000, mtbf=900)
    assert found == (3, 600, 3_000)  # jobs, seconds between saves, seconds of training in a job
    with pytest.raises(UserError, match="--time_limit"):
        slurm_budget(50, 1, -1, 2e3)
