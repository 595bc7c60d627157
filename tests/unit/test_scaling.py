"""The forecast of the step time on more ranks."""

import json

import pytest

from support.errors import UserError
from support.report.cost import Network, read_step

MB = 1_000_000
RESULTS = {
    "status": "completed",
    "model": "m",
    "strategy": "dp",
    "world_size": 1,
    "gradient_accumulation_steps": 1,
    "tokens_per_second_per_gpu": 100.0,
    "step_phases_seconds": {"data": 0.0, "forward": 0.1, "backward": 0.2, "update": 0.1},
    "communication_per_step": {"all_reduce float32": {"calls": 3, "message_bytes": 100 * MB}},
}


def write(folder, **changes):
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({**RESULTS, **changes}))
    return folder


def step_of(tmp_path, **changes):
    alone = write(tmp_path / "alone", **{k: v for k, v in changes.items() if k == "strategy"})
    return read_step(alone, write(tmp_path / "together", **{"world_size": 2, **changes}))


def rate_with(latency: float, times: int) -> float:
    """The bus bandwidth that --check prints on two ranks if 100 MB take a second and the latency."""
    return 100 * MB / (1.0 + 2 * latency / times)


def test_ring_all_reduce_is_added_to_the_computation(tmp_path):
    step = step_of(tmp_path)
    # A second for 100 MB; the latency of an all-reduce on two ranks is 2 hops of 10 ms.
    network = Network.measured(2, 0.02, {100 * MB: [rate_with(0.02, times) for times in (2, 1, 1)]})
    assert step.seconds(1, 1, network) == pytest.approx((0.4, 0))
    # 2 (N - 1) / N of the message, and 2 (N - 1) hops of each of three calls
    assert step.seconds(2, 1, network) == pytest.approx((0.4 + 1.0 + 0.06, 1.06))
    assert step.seconds(4, 1, network) == pytest.approx((0.4 + 1.5 + 0.18, 1.68))
    # dp reduces once per step, so that accumulation hides the network.
    assert step.seconds(2, 8, network) == pytest.approx((2.5 + 1.06, 1.06))


def test_the_time_of_a_message_is_interpolated_between_the_measured_sizes():
    network = Network.measured(2, 0.0, {64 * MB: [128 * MB] * 3, MB: [10 * MB] * 3})
    times = {size: network.seconds("all_gather", 2, 1, size * MB) * 2 for size in (0, 1, 33, 128)}
    expected = {0: 0, 1: 0.1, 33: 0.1 + 32 / 63 * 0.4, 128: 1.0}
    assert times == pytest.approx(expected, abs=1e-3)
    assert network.seconds("barrier", 2, 3, 0) == 0


def test_sharded_parameters_are_gathered_in_each_micro_batch(tmp_path):
    counted = {
        "all_gather bfloat16": {"calls": 4, "message_bytes": 80 * MB},
        "reduce_scatter float32": {"calls": 4, "message_bytes": 40 * MB},
    }
    flags = {"communication_per_step": counted, "gradient_accumulation_steps": 2}
    network = Network.measured(2, 0.0, {100 * MB: [100 * MB] * 3})
    for strategy, expected in {"zero3": 1.2, "fsdp": 1.0, "zero2": 0.8}.items():
        (tmp_path / strategy).mkdir()
        step = step_of(tmp_path / strategy, strategy=strategy, **flags)
        assert step.seconds(2, 4, network)[1] == pytest.approx(expected), strategy


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"strategy": "zero2"}, "differ in strategy"),
        ({"world_size": 1}, "on one rank first"),
        ({"status": "failed"}, "name a completed run"),
        ({"tokens_per_second_per_gpu": None}, "name a run that trained"),
    ],
)
def test_runs_that_do_not_fit_together_are_refused(tmp_path, changes, says):
    alone = write(tmp_path / "alone")
    with pytest.raises(UserError, match=says):
        read_step(alone, write(tmp_path / "together", **{"world_size": 2, **changes}))
