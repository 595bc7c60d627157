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
from support.report.cost import Times, budget_of, young_daly

NO_WORK = dict.fromkeys(("tokens", "dataset_tokens", "epochs", "max_steps"))


@pytest.mark.parametrize("sequences, epochs, batch", [(37, 2, 8), (8, 1, 8), (9, 3, 4), (1, 1, 4)])
def test_work_is_that_of_a_run(sequences, epochs, batch):
    args = SimpleNamespace(**NO_WORK | {"dataset_tokens": 32 * sequences + 31, "epochs": epochs})
    args.seq_length, args.batch_size, args.gradient_accumulation_steps = 32, batch // 2, 1
    _, tokens, steps = cost.amount_of_work(args, batch)
    assert tokens == 32 * sequences * epochs
    assert steps == total_steps(args, 2, sequences)


def test_padding_is_no_work():
    """The measured rate counts tokens only, so a step of padded examples has fewer of them."""
    run = {"tokens": 20_480, "samples": 400, "seq_length": 256}
    share = cost.share_of_tokens(run)
    assert share == 0.2 and cost.share_of_tokens(run | {"tokens": None}) == 1
    args = SimpleNamespace(**NO_WORK | {"max_steps": 100}, seq_length=256)
    assert cost.amount_of_work(args, 4, share)[1:] == (20_480, 100)
    args = SimpleNamespace(**NO_WORK | {"tokens": 20_480}, seq_length=256)
    assert cost.amount_of_work(args, 4, share)[1:] == (20_480, 100)


def test_steps_and_tokens_give_the_same_work():
    by_steps = SimpleNamespace(**NO_WORK | {"max_steps": 10}, seq_length=32)
    by_tokens = SimpleNamespace(**NO_WORK | {"tokens": 10 * 8 * 32}, seq_length=32)
    assert cost.amount_of_work(by_steps, 8)[1:] == cost.amount_of_work(by_tokens, 8)[1:]


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


def test_a_device_without_the_precision_has_no_rate():
    work = Workload(find_architecture("gpt2"), 1)
    with pytest.raises(UserError, match="--precision fp16"):
        cost.assumed_rate(SimpleNamespace(device="T4", mfu=None), work)


@pytest.mark.parametrize(
    "name, half",
    [
        ("a100", 312),
        ("A100-SXM4-80GB", 312),
        ("rtx 4090", 165.2),
        ("MI250X", 191.5),
        ("H100 NVL", 835.5),
    ],
)
def test_devices_by_their_short_names(name, half):
    assert peak_flops.find_by_short_name(name).half == pytest.approx(half)


@pytest.mark.parametrize("name, known", [("H100", "H100 PCIe"), ("Z80", "A100"), ("V100", "V100S")])
def test_a_device_that_is_not_one_device(name, known):
    with pytest.raises(UserError, match=f"{name}.*{known}"):
        peak_flops.find_by_short_name(name)


# ------------------------------------------------------------------------------------- Slurm jobs


def test_interval_of_young_and_daly():
    """The interval loses less time than half and twice of it."""
    save, mtbf = 10.0, 36_000.0
    interval = young_daly(save, mtbf)
    assert interval == pytest.approx(math.sqrt(2 * 10 * 36_000))

    def lost(every):  # saves, and half an interval for each failure
        return save / every + every / 2 / mtbf

    assert lost(interval) < min(lost(interval / 2), lost(2 * interval))
    assert young_daly(100.0, 10.0) == 10.0


def jobs_one_by_one(times, limit, lead, interval):
    """The number of jobs, followed save by save."""
    saved = jobs = 0
    while jobs < 10_000:
        jobs, now, done, end = jobs + 1, times.startup, saved, limit - (lead or 0)
        while now < end:
            chunk = min(interval, times.train - done, end - now)
            now, done = now + chunk, done + chunk
            if done >= times.train - 1e-6:
                return jobs
            saved = done if lead is not None else saved
            now += times.save
            saved = done if now <= end else saved
    return None


SCENES = list(
    itertools.product((50, 5_000, 123_456), (1, 40), (3_600, 20_000), (None, 120), (2e3, 1e7))
)


@pytest.mark.parametrize("train, save, limit, lead, mtbf", SCENES)
def test_jobs_are_as_many_as_if_each_is_followed(train, save, limit, lead, mtbf):
    times = Times(train, save, step=0.7, longest_step=1, startup=33)
    plan = budget_of(times, limit, lead, mtbf)
    assert plan.jobs == jobs_one_by_one(times, limit, lead, plan.interval)
    assert plan.interval / 0.7 == pytest.approx(round(plan.interval / 0.7))  # whole steps


def test_a_job_without_time_to_train_is_refused():
    for limit, lead, save in ((150, 120, 1), (300, None, 290)):
        with pytest.raises(UserError, match="--time_limit"):
            budget_of(Times(1e4, save, startup=30), limit, lead, 1e6)
    assert budget_of(Times(100, 290, startup=30), 300, None, 1e6).jobs == 1  # needs no save


@pytest.mark.parametrize("text, seconds", [("48:00:00", 172_800), ("2-00:00:00", 172_800)])
def test_time_limits_as_slurm_reads_them(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["0", "00:00:00", "1:2:3:4"])
def test_time_limits_that_are_none(text):
    with pytest.raises(UserError, match="--time_limit"):
        seconds_of(text)
