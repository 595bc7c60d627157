"""The cost of a run and its Slurm jobs, computed from rates and durations."""

import itertools
import math
from types import SimpleNamespace

import pytest

from support.cluster.slurm import seconds_of
from support.data.batches import total_steps
from support.errors import UserError
from support.memory.architectures import find_architecture
from support.memory.workload import Workload, adapters
from support.report import cost, peak_flops
from support.report.cost import Rate, slurm_budget
from support.units import GB

NO_WORK = dict.fromkeys(("tokens", "epochs", "max_steps"))


@pytest.mark.parametrize("sequences, epochs, batch", [(37, 2, 8), (8, 1, 8), (9, 3, 4), (1, 1, 4)])
def test_work_is_that_of_a_run(sequences, epochs, batch):
    args = SimpleNamespace(**NO_WORK | {"tokens": 32 * sequences + 31, "epochs": epochs})
    args.seq_length, args.batch_size, args.gradient_accumulation_steps = 32, batch // 2, 1
    tokens, steps = cost.amount_of_work(args, batch, 32)
    assert tokens == 32 * sequences * epochs
    assert steps == total_steps(args, 2, sequences)
    by_steps = SimpleNamespace(**NO_WORK | {"max_steps": steps})
    assert cost.amount_of_work(by_steps, batch, 32) == (32 * batch * steps, steps)


@pytest.mark.parametrize(
    "name, lookups, layers, hidden",
    [("gpt2", 1024 * 768, 12, 768), ("Llama-2-7B", 32000 * 4096, 32, 4096)],
)
def test_assumed_rate_follows_from_the_flop_of_a_token(name, lookups, layers, hidden):
    """6N + 12LHT, where N is without the tables that are only looked up (PaLM, appendix B)."""
    model = find_architecture(name)
    flop = 6 * (model.total - lookups) + 12 * layers * hidden * 512
    args = SimpleNamespace(device="A100", mfu=None)
    rate = cost.assumed_rate(args, Workload(model, 4, 8, 512))
    assert rate.source == "assumed" and "40 %" in rate.basis
    assert rate.tokens_per_second == pytest.approx(0.4 * 312e12 / flop)
    lora = adapters(model, 8, None)
    adapted = cost.assumed_rate(args, Workload(model, 4, 8, 512, lora=lora))
    assert adapted.tokens_per_second == pytest.approx(rate.tokens_per_second * 1.5, rel=0.1)
    with pytest.raises(UserError, match="--precision fp16"):  # a T4 has no bf16
        cost.assumed_rate(SimpleNamespace(device="T4", mfu=None), Workload(model, 4, 8, 512))


def test_a_network_adds_the_time_of_sending_to_each_step():
    work = Workload(find_architecture("gpt2"), 4, 8, 512, accumulation=2)
    rate = Rate(8192, "measured", "here", "", length=512)  # a step of one second
    slower = cost.on_network(rate, work, sent=6 * GB, bandwidth=2)
    assert slower.tokens_per_second == 8192 / 4 and "75%" in slower.basis
    assert cost.on_network(rate, work, sent=0, bandwidth=2).tokens_per_second == 8192


def test_devices_by_their_short_names():
    names = {"a100": 312, "A100-SXM4-80GB": 312, "rtx 4090": 165.2, "MI250X": 191.5}
    for name, half in names.items():
        assert peak_flops.find_by_short_name(name).half == pytest.approx(half)
    for name, known in {"H100": "H100 PCIe", "Z80": "A100", "V100": "V100S"}.items():
        with pytest.raises(UserError, match=f"{name}.*{known}"):
            peak_flops.find_by_short_name(name)


# ------------------------------------------------------------------------------------- Slurm jobs


def test_time_between_saves_is_that_of_young_and_daly():
    _, interval, _ = slurm_budget(1e5, 10.0, 7200, 36_000.0)
    assert interval == pytest.approx(math.sqrt(2 * 10 * 36_000))


def jobs_one_by_one(train, save, usable, interval):
    """The number of jobs, followed save by save."""
    done = jobs = 0
    while True:
        jobs, now = jobs + 1, 0
        while now < usable:
            chunk = min(interval, train - done, usable - now)
            now, done = now + chunk + save, done + chunk
            if done >= train - 1e-6:
                return jobs


def test_jobs_are_as_many_as_if_each_is_followed():
    scenes = itertools.product((50, 5_000, 123_456), (1, 40), (3_600, 20_000), (2e3, 1e7))
    for train, save, usable, mtbf in scenes:
        jobs, interval, trained = slurm_budget(train, save, usable, mtbf)
        followed = jobs_one_by_one(train, save, usable, interval)
        assert jobs == pytest.approx(followed, abs=1, rel=0.02) and trained < usable
    with pytest.raises(UserError, match="--time_limit"):
        slurm_budget(50, 1, -1, 2e3)


def test_time_limits_as_slurm_reads_them():
    assert seconds_of("48:00:00") == seconds_of("2-00:00:00") == 172_800
    for text in ("0", "00:00:00", "1:2:3:4"):
        with pytest.raises(UserError, match="--time_limit"):
            seconds_of(text)
