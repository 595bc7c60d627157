"""The forecast of the step time on links of known speed, against runs on one, two and three hosts."""

import os
import re
import sys
from dataclasses import replace

import pytest
from conftest import SCRIPT, finish, free_port, start

from support.report.cost import Network, read_step
from support.units import GB, MB

WORK = "--seq_length 8 --batch_size 1 --optim sgd --precision fp32 --max_steps 12".split()
WORK += ["--no_eval", "--no_export", "--no_save"]
# All on one core, where the time of N ranks' computation is known: N times that of one.
CORE = str(min(os.sched_getaffinity(0)))


def on_hosts(machines, ranks, *args) -> str:
    """Run the script with one rank on each host; returns what rank 0 printed."""
    port, processes = free_port(), []
    for rank, name in enumerate(machines.names[:ranks]):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        place |= {"GROUP_RANK": rank, "MASTER_ADDR": machines.address("node1")}
        place |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "eth0"}
        command = [
            "taskset",
            "-c",
            CORE,
            "env",
            *(f"{key}={value}" for key, value in place.items()),
        ]
        command += [sys.executable, SCRIPT, *args]
        processes.append(start(machines.on(name, *command)))
    outputs = [finish(process, 150) for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return outputs[0][0]


@pytest.mark.soak
@pytest.mark.parametrize("strategy, rate", [("dp", "100mbit"), ("dp", "1gbit"), ("fsdp", "1gbit")])
def test_forecast_is_within_15_percent(machines, tmp_path, rate, strategy):
    limit = ["rate", rate, "burst", "256kb", "latency", "300ms"]
    for name in machines.names:
        machines.enter(name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
    try:
        said = on_hosts(machines, 2, "--check")
        flags = [*WORK, "--strategy", strategy, "--output_dir"]
        for ranks in (1, 2, 3):
            on_hosts(machines, ranks, *flags, tmp_path / str(ranks))
    finally:
        for name in machines.names:
            machines.enter(name, "tc", "qdisc", "del", "dev", "eth0", "root")
    rates = r"([\d.e-]+)"
    pattern = rf"all-reduce {rates}, all-gather {rates}, reduce-scatter {rates} GB/s, {rates} µs"
    pattern += rf"; with 1 MiB {rates}, {rates}, {rates} GB/s"
    numbers = [float(number) for number in re.search(pattern, said).groups()]
    bandwidth = {64 * MB: numbers[:3], MB: numbers[4:]}
    bandwidth = {size: [GB * speed for speed in speeds] for size, speeds in bandwidth.items()}
    network = Network.measured(2, numbers[3] / 1e6, bandwidth)
    print(said.partition("communication")[2].splitlines()[0])
    step = read_step(tmp_path / "1", tmp_path / "2")
    for ranks in (1, 2, 3):
        on_one_core = replace(
            step,
            micro_batch_seconds=ranks * step.micro_batch_seconds,
            update_seconds=ranks * step.update_seconds,
        )
        measured = read_step_seconds(tmp_path / str(ranks))
        forecast, _ = on_one_core.seconds(ranks, 1, network)
        print(rate, strategy, ranks, f"forecast {forecast:.3f} s, measured {measured:.3f} s")
        assert forecast == pytest.approx(measured, rel=0.15), ranks


def read_step_seconds(folder) -> float:
    import json

    return json.loads((folder / "results.json").read_text())["step_seconds"]["median"]
