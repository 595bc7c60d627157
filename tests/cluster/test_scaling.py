"""The forecast of the step time on links of known speed, against runs on one, two and three hosts."""

import json
import os
import re
import sys

import pytest
from conftest import SCRIPT, finish, free_port, start

from distributed_training.memory.estimate import predict
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.workload.rate import Rate
from distributed_training.workload.workload import Workload
from tools.plan.network_cost import on_network

WORK = "--seq_length 8 --batch_size 1 --optim sgd --precision fp32 --max_steps 12".split()
WORK += ["--no_eval", "--no_export", "--no_save"]
# All on one core, where the time of N ranks' computation is known: N times that of one.
CORE = str(min(os.sched_getaffinity(0)))


def on_hosts(machines, ranks, *args) -> str:
    """Run the script with one rank on each host; returns what rank 0 printed."""
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "node1", "MASTER_PORT": free_port()}
    shared |= {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "eth0"}
    processes = []
    for rank, name in enumerate(machines.names[:ranks]):
        place = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        command = ["taskset", "-c", CORE, sys.executable, SCRIPT, *args]
        processes.append(start(machines.on(name, *command), env=shared | place))
    outputs = [finish(process, 150) for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return outputs[0][0]


@pytest.mark.soak
@pytest.mark.parametrize("strategy, rate", [("dp", "100mbit"), ("dp", "1gbit"), ("fsdp", "1gbit")])
def test_forecast_is_within_35_percent(machines, tmp_path, rate, strategy):
    seconds, limit = {}, ["rate", rate, "burst", "256kb", "latency", "300ms"]
    for name in machines.names:
        machines.enter(name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
    try:
        said = on_hosts(machines, 2, "--check")
        for ranks in (1, 2, 3):
            folder = tmp_path / str(ranks)
            on_hosts(machines, ranks, *WORK, "--strategy", strategy, "--output_dir", folder)
            results = json.loads((folder / "results.json").read_text())
            seconds[ranks] = results["step_seconds"]["median"]
    finally:
        for name in machines.names:
            machines.enter(name, "tc", "qdisc", "del", "dev", "eth0", "root")
    bandwidth = float(re.search(r"all-reduce ([\d.e-]+)", said)[1])
    model = find_architecture("tiny-gpt2")
    for ranks in (2, 3):
        work = Workload(model, ranks, 1, 8, "fp32", optimizer="sgd")
        on_one_core = Rate(8 / (ranks * seconds[1]), "measured", "", "", 8)
        found = on_network(on_one_core, work, predict(work, strategy).sent, bandwidth)
        forecast = 8 / found.tokens_per_second
        assert forecast == pytest.approx(seconds[ranks], rel=0.35), ranks
