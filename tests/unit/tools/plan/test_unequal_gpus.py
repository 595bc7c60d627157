"""What fits on GPUs that differ in memory or speed, and with which sequences of each rank."""

import shlex
from dataclasses import replace

import pytest

from distributed_training.errors import UserError
from distributed_training.memory.estimate import predict
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.memory.fit import Limits, recommend
from distributed_training.units import GB
from distributed_training.workload.rate import Rate, assumed_rate
from distributed_training.workload.workload import Workload
from tools.plan import command, cost, flags, network_cost, text
from tools.plan import rate as rates
from tools.plan.unequal import UnequalGpus
from tools.plan.workload import read_workload

GPT2 = find_architecture("gpt2")


def gpus(sizes, speeds=None):
    limits = tuple(Limits(int(size * GB), ranks_per_node=len(sizes)) for size in sizes)
    return UnequalGpus(limits, tuple(speeds or [1.0] * len(sizes)))


def hold(devices, work, strategy, sequences):
    """Whether each rank fits with its sequences."""
    needs = [predict(replace(work, batch_size=count), strategy) for count in sequences]
    return all(limits.hold(need) for limits, need in zip(devices.limits, needs, strict=True))


def planned(monkeypatch, line):
    """The arguments, the workload and the devices of a command line of the planner."""
    monkeypatch.setattr("sys.argv", ["plan_memory.py", *shlex.split(line)])
    return read_workload(flags.read_flags(flags.build_parser("Plan.")))


@pytest.mark.parametrize("strategy", ["dp", "zero2", "fsdp"])
def test_no_division_that_fits_ends_earlier(strategy):
    """Against all divisions of 8 sequences over two ranks, of which the faster has less memory."""
    work = Workload(GPT2, 2, 4, 1024)
    of_three = predict(replace(work, batch_size=3), strategy).total
    devices = gpus((of_three / GB + 0.1, 16), (3.0, 1.0))
    every = [(n, 8 - n) for n in range(1, 8)]
    fitting = [pair for pair in every if hold(devices, work, strategy, pair)]
    assert 0 < len(fitting) < len(every)
    found = devices.rank_counts(work, strategy)
    assert found in fitting
    seconds = [max(a / 3, b / 1) for a, b in fitting]
    assert max(found[0] / 3, found[1] / 1) == min(seconds)


def test_the_estimate_is_of_the_rank_that_is_closest_to_its_limit():
    devices, work = gpus((40, 8), (10.0, 1.0)), Workload(GPT2, 2, 4, 1024)
    assert devices.rank_counts(work, "dp") == (7, 1)
    assert predict(replace(work, batch_size=1), "dp").total / 8 > (
        predict(replace(work, batch_size=7), "dp").total / 40
    )
    rank, need = devices.closest(work, "dp")
    assert rank == 1 and need == predict(replace(work, batch_size=1), "dp")
    # Where nothing fits, with the shares of the speeds.
    small = replace(devices, limits=gpus((2, 3)).limits)
    assert not small.fits(work, "dp")
    assert small.estimate(work, "dp") == predict(replace(work, batch_size=7), "dp")


def test_the_speed_up_is_over_equal_shares_if_these_fit():
    work = Workload(GPT2, 3, 4, 256)
    devices = gpus((16, 16, 16), (1, 0.7, 0.5))
    assert devices.rank_counts(work, "dp") == (6, 4, 2)
    assert devices.speed_up(work, "dp") == pytest.approx((4 / 0.5) / (6 / 1))
    assert devices.pace(work, "dp") == pytest.approx(4 / 6)
    assert gpus((16, 16, 16)).speed_up(work, "dp") == 1
    small = replace(devices, limits=gpus((16, 16, 3.9)).limits)
    assert not Limits(int(3.9 * GB)).fits(work, "dp") and small.fits(work, "dp")
    assert small.speed_up(work, "dp") is None


def test_the_largest_batch_is_an_average():
    devices, work = gpus((6, 12)), Workload(GPT2, 2, 1, 1024)
    batch = devices.largest_batch(work, "zero2")
    assert devices.limits[0].largest_batch(work, "zero2") < batch
    assert devices.fits(replace(work, batch_size=batch), "zero2")
    assert not devices.fits(replace(work, batch_size=batch + 1), "zero2")
    assert gpus((1, 12)).largest_batch(work, "zero2") == 0


def test_the_recommended_micro_batches_keep_the_global_batch():
    work = Workload(GPT2, 2, 64, 1024)
    devices = gpus((6, 12))
    need, changed = recommend(work, devices)
    assert 1 < changed.batch_size < 64 and changed.batch_size * changed.accumulation == 64
    shares = devices.rank_counts(changed, need.strategy)
    assert sum(shares) == 2 * changed.batch_size and shares[0] < shares[1]
    assert hold(devices, changed, need.strategy, shares)


def test_the_command_has_unequal_shares_only(monkeypatch):
    args, work, devices = planned(monkeypatch, "--model gpt2 --gpu_memory 16,8 --gpu_speeds 3,1")
    assert args.gpus == work.world_size == 2
    found = command.command_of(args, work, "dp", devices)
    assert found.startswith("torchrun --nproc_per_node=2") and "--rank_shares 6,2" in found
    assert "--rank_shares" not in " ".join(command.flags_of(args, work, "dp"))  # for --measure
    for line in ("--gpu_memory 16,8", "--gpu_memory 16 --gpus 2"):
        args, work, devices = planned(monkeypatch, line)
        assert "--rank_shares" not in command.command_of(args, work, "dp", devices)


def test_the_table_names_shares_and_speed_up(monkeypatch):
    line = "--model gpt2 --gpu_memory 16,4.6 --gpu_speeds 3,1 --batch_size 8"
    args, work, devices = planned(monkeypatch, line)
    needs = [devices.estimate(work, strategy) for strategy in ("dp", "zero3")]
    table = text.as_text(args, work, devices, needs)
    assert "2 x GPU of 16, 4.6 GB" in table and "speeds 3, 1" in table
    [dp, zero3] = (
        row.split(None, 4) for row in table.splitlines() if row.startswith(("dp", "zero3"))
    )
    assert dp[2:] == ["yes", "13,3", "equal shares do not fit"]
    assert zero3[2:] == ["yes", "12,4", "2.00x"]
    found = text.as_dict(work, needs[1], devices)
    assert (found["rank_shares"], found["speed_up"]) == ((12, 4), 2)
    assert "2.00x the speed of equal shares" in text.about_shares(work, "zero3", devices)
    none = text.as_dict(work, needs[0], replace(devices, limits=gpus((2, 2)).limits))
    assert (none["fits"], none["rank_shares"], none["speed_up"]) == (False, None, None)


def test_processes_on_a_cpu_can_differ_in_speed(monkeypatch):
    _, work, devices = planned(monkeypatch, "--gpu_speeds 1,0.5 --model tiny-gpt2")
    assert work.device.type == "cpu" and devices.limits[0] == devices.limits[1]
    assert devices.rank_counts(work, "dp") == (6, 2)


def test_the_slowest_rank_determines_the_rate(monkeypatch):
    """6, 4 and 2 sequences at speeds 1, 0.7 and 0.5: a step of 6 times a sequence at speed 1."""
    line = "--model gpt2 --gpu_memory 16,16,16 --gpu_speeds 1,0.7,0.5 --device A100 --max_steps 10"
    args, work, devices = planned(monkeypatch, line)
    rows, _ = cost.cost_of(args, work, devices.estimate(work, "dp"), [], devices)
    alone = assumed_rate(args.device, args.mfu, work).tokens_per_second
    hours = {row.name: row.value for row in rows}["hours"]
    assert 3600 * hours / 10 == pytest.approx(6 * work.seq_length / alone)


# ------------------------------------------------------------------------------------- slow links

RATE = Rate(4096, "measured", "here", "", length=512)  # 4 sequences of 512 tokens in 0.5 s
LIMITS = Limits(80 * GB)


def network(strategy, limits=LIMITS, rate=RATE, bandwidth=0.5):
    rows = network_cost.network_rows(rate, Workload(GPT2, 2, 4, 512), strategy, bandwidth, limits)
    return {row.name: row for row in rows}


@pytest.mark.parametrize("strategy", ["dp", "zero1", "fsdp", "zero2"])
@pytest.mark.parametrize("bandwidth", [0.1, 0.5, 2, 20])
@pytest.mark.parametrize("update", [0, 0.3])
def test_the_accumulation_is_the_smallest_at_which_sending_takes_less_than_a_third(
    strategy, bandwidth, update
):
    """A step of 0.5 s has an update, which further micro-batches do not repeat."""
    work, rate = Workload(GPT2, 2, 4, 512), RATE._replace(update=update, step_tokens=2048)
    shares = []
    for number in range(1, 70):
        sent = predict(replace(work, accumulation=number), strategy).sent / (bandwidth * GB)
        shares.append(sent / (sent + update + number * (0.5 - update)))
    expected = next((n for n, share in enumerate(shares, 1) if share < 1 / 3), None)
    assert network_cost.enough_accumulation(rate, work, strategy, bandwidth) == expected
    for number in (1, 8):
        more = replace(work, accumulation=number)
        found = network_cost.sending_share(rate, more, strategy, bandwidth)
        assert found == pytest.approx(shares[number - 1])


def test_what_the_accumulation_does_to_the_global_batch():
    """dp sends 4 bytes per parameter in a step, here in 0.927 s; a micro-batch takes 0.5 s."""
    found = network("dp")
    assert found["accumulation_for_network"].value == 4
    assert found["global_batch_for_network"].value == 4 * 2 * 4
    assert found["global_batch_for_network"].source.endswith("now 8")


def test_a_strategy_that_sends_in_each_micro_batch_may_never_reach_it():
    """zero3 sends 3 bytes per parameter in each micro-batch."""
    found = network("zero3")
    assert found["accumulation_for_network"].value is None
    sending = 3 * GPT2.total / (0.5 * GB)
    assert f"at least {sending / (sending + 0.5):.0%}" in found["accumulation_for_network"].source
    assert found["strategy_for_network"].value == "dp"
    assert "--strategy dp --gradient_accumulation_steps 4" in found["strategy_for_network"].source
    # Only zero1 fits, then none.
    work = Workload(GPT2, 2, 4, 512, accumulation=4)
    between = (predict(work, "zero1").total + predict(work, "dp").total) // 2
    assert network("zero3", Limits(between))["strategy_for_network"].value == "zero1"
    assert network("zero3", Limits(2 * GB))["strategy_for_network"].value is None


def test_an_accumulation_that_does_not_fit_is_not_recommended():
    """dp keeps a second copy of the gradients while it accumulates."""
    work = Workload(GPT2, 2, 4, 512)
    without, more = (predict(replace(work, accumulation=n), "dp").total for n in (1, 4))
    assert without < more
    found = network("dp", Limits((without + more) // 2))
    assert found["accumulation_for_network"].value is None
    assert f"need {more / GB:.1f} GB" in found["accumulation_for_network"].source
    assert found["strategy_for_network"].value == "zero1"


def test_only_strategies_that_send_once_per_step_are_named_instead():
    """zero2 is fast enough on this network, and would fit."""
    work = Workload(GPT2, 8, 4, 512)
    number = network_cost.enough_accumulation(RATE, work, "zero2", 2)
    more = replace(work, accumulation=number)
    between = (predict(more, "zero1").total + predict(more, "zero2").total) // 2
    limits = Limits(between)
    assert limits.fits(more, "zero2") and not limits.fits(more, "zero1")
    assert network_cost.once_per_step(RATE, work, 2, limits) is None
    assert network_cost.once_per_step(RATE, work, 2, LIMITS) == ("dp", 2)


def test_a_measured_update_is_separated_from_the_micro_batches(monkeypatch):
    """A run of 10 steps of 1 s, each 4 × 2 × 512 tokens; an update takes 0.2 s of each."""
    args, work, _ = planned(
        monkeypatch, "--model gpt2 --gpus 2 --bandwidth 1 --results RUN --max_steps 9"
    )
    results = {
        **{"model": "gpt2", "parameters": GPT2.total, "trainable_parameters": GPT2.total},
        **{"seq_length": 512, "precision": "bf16", "world_size": 1, "strategy": "dp"},
        **{"batch_size": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": False},
        **{"steps": 10, "samples": 80, "tokens": 80 * 512, "tokens_per_second_per_gpu": 4096},
        **{"step_phases_seconds": {"update": 0.2}},
    }
    rate = rates.measured_rate(args, "RUN", results, work, "dp")
    assert network_cost.computing_seconds(rate, work) == pytest.approx((0.2, 0.4))
    slower = rates.at_pace(rate, 0.5)
    assert network_cost.computing_seconds(slower, work) == pytest.approx((0.4, 0.8))
    old = {name: value for name, value in results.items() if name != "step_phases_seconds"}
    found = rates.measured_rate(args, "RUN", old, work, "dp")
    assert network_cost.computing_seconds(found, work) == pytest.approx((0, 0.5))


def test_a_run_file_with_shares_needs_the_speeds_and_the_command_replaces_them(
    monkeypatch, tmp_path
):
    (file := tmp_path / "run.yaml").write_text("model: gpt2\nbatch_size: 4\nrank_shares: 3,2,1\n")
    with pytest.raises(UserError, match="rank_shares"):
        planned(monkeypatch, f"--config {file} --gpu_memory 24 --gpus 3")
    for speeds, expected in (("6,4,2", None), ("1,1,1", "4,4,4"), ("4,1,1", "8,2,2")):
        args, work, devices = planned(
            monkeypatch, f"--config {file} --gpu_memory 24 --gpu_speeds {speeds}"
        )
        line = command.command_of(args, work, "dp", devices)
        assert line.partition("--rank_shares ")[2] == (expected or "6,4,2")


def test_only_the_ratios_of_speeds_count(monkeypatch):
    paces = {
        planned(monkeypatch, f"--gpu_memory 24 --gpu_speeds {speeds}")[2].pace(
            Workload(GPT2, 2), "dp"
        )
        for speeds in ("2,1", "1,0.5", "30000,15000")
    }
    assert len(paces) == 1 and 0 < paces.pop() < 1
