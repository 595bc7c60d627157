"""What tells a process its rank, the environments that launchers leave; and with which micro-batch
--auto_micro_batch starts the ranks again. The time limits of Slurm jobs.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed_training import process
from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.ranks.launch import detect_launch
from distributed_training.ranks.restart import restart_values, restarted_with
from distributed_training.ranks.time_limit import seconds_of

# Task 1 of two, the first of its node.
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
BY_SLURM = ("srun", 1, 2, 0, 1, 1, "n1", 20707)
UNEVEN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1"}


def ranks(rank: int, world: int, local: int, local_world: int, **more: str) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = map(str, (rank, world, local, local_world))
    return {**dict(zip(names, values, strict=True)), "MASTER_ADDR": "n1", **more}


OWN_TORCHRUN = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "7"}
TORCHRUN = {"GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "7", "MASTER_PORT": "1234"}
OWN_DEEPSPEED = {"LOCAL_SIZE": "1", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
ONE_TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
FOUR_TASKS = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
# (launcher, rank, world size, local rank, local world size, node, master's address and port) or an
# error; None: any value.
LAUNCHES = {
    "nothing": ({}, ("python", 0, 1, 0, 1, 0, "127.0.0.1", None)),
    "srun alone": (TASK, BY_SLURM),
    "a size of 1 in each task": (
        TASK | {"RANK": "0", "WORLD_SIZE": "1"},
        "starts a separate run of 1 ranks",
    ),
    "deepspeed in one task": (
        TASK | ONE_TASK | ranks(0, 1, 0, 1, **OWN_DEEPSPEED),
        ("deepspeed", 0, 1, 0, 1, 0, "n1", 29500),
    ),
    "torchrun in each task": (
        TASK | ranks(5, 8, 1, 4, **TORCHRUN),
        ("torchrun", 5, 8, 1, 4, 1, "n1", 1234),
    ),
    "torchrun without the other node": (
        TASK | ranks(0, 4, 0, 4, **OWN_TORCHRUN),
        "Each of the 2 tasks of srun starts a separate run",
    ),
    "the batch script's own shell": (
        {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"},
        ("python", 0, 1, 0, 1, 0, "127.0.0.1", None),
    ),
    "another network's name as master": (
        TASK | {"MASTER_ADDR": "n1-ib"},
        (*BY_SLURM[:6], "n1-ib", 20707),
    ),
    "uneven nodes": (TASK | UNEVEN, ("srun", 3, 4, 0, 1, 1, "n1", 20707)),
    "deepspeed in two tasks on each of two nodes": (
        TASK | FOUR_TASKS | ranks(0, 2, 0, 2, **OWN_DEEPSPEED | {"LOCAL_SIZE": "2"}),
        "--ntasks=2 --ntasks-per-node=1 torchrun --nnodes=2 ",
    ),
    "a rank that does not fit": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
    "a rank without the number of ranks": ({"RANK": "1"}, "RANK is set, and WORLD_SIZE is not"),
    "a number of ranks without a rank": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, and RANK is not"),
}
# Environments of a launch that is right, and values of a variable that no rank can use.
BY_TORCHRUN = ranks(1, 4, 1, 2, **OWN_TORCHRUN, MASTER_PORT="1234")
BY_DEEPSPEED = {
    **{"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0"},
    **{"CROSS_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1234"},
}
NO_COUNTS = ("0", "-1", "x", "1.5", "100001", "9" * 30, "\u0661")
NO_PORTS = ("0", "-5", "65536", "99999", "x", "1e3", "29500 ")
NO_HOSTS = ("", " ", "a b", "n1:29500", "http://n1", "n[1-2]", "n1,n2", "1.2.3", "999.1.1.1", ":x")
WRONG = {
    "RANK": (BY_TORCHRUN, ("", "-1", "4", "x", "1_0", "\n")),
    "WORLD_SIZE": (BY_TORCHRUN, ("", *NO_COUNTS)),
    "LOCAL_RANK": (BY_TORCHRUN, ("-1", "2", "x")),
    "LOCAL_WORLD_SIZE": (BY_TORCHRUN, (*NO_COUNTS, "5")),
    "GROUP_RANK": (BY_TORCHRUN, ("-1", "1", "x")),
    "GROUP_WORLD_SIZE": (BY_TORCHRUN, (*NO_COUNTS, "5")),
    "LOCAL_SIZE": (BY_DEEPSPEED, (*NO_COUNTS, "5")),
    "CROSS_RANK": (BY_DEEPSPEED, ("-1", "2", "x")),
    "CROSS_SIZE": (BY_DEEPSPEED, (*NO_COUNTS, "5")),
    "MASTER_PORT": (BY_TORCHRUN, NO_PORTS),
    "MASTER_ADDR": (BY_TORCHRUN, (*NO_HOSTS, "n" * 64, "n..1", "n1\n", "::1::", "ñ1")),
    "SLURM_PROCID": (TASK, ("", "-1", "2", "x")),
    "SLURM_LOCALID": (TASK, ("", "-1", "1", "x")),
    "SLURM_NODEID": (TASK, ("-1", "2", "x")),
    "SLURM_STEP_NUM_TASKS": (TASK, NO_COUNTS),
    "SLURM_STEP_TASKS_PER_NODE": (TASK, ("x", "0", "-1", "1,", "1(x0)", "1(x9999999)")),
    "SLURM_JOB_ID": (TASK, ("-1", "x", "9" * 11)),
    "SLURM_STEP_ID": (TASK, ("-1", "x")),
    "MASTER_PORT by srun": (TASK, NO_PORTS),
    "MASTER_ADDR by srun": (TASK, NO_HOSTS[1:]),
}


@pytest.fixture
def launch(monkeypatch):
    """launch(env) reads the launch of a process with these variables of a launcher."""
    own = {name: value for name, value in os.environ.items() if not re.match("SLURM_|PET_", name)}
    launcher = "MASTER_|RANK|WORLD_SIZE|LOCAL_|GROUP_|CROSS_|TORCHELASTIC"
    own = {name: value for name, value in own.items() if not re.match(launcher, name)}
    scontrol = lambda *_, **__: SimpleNamespace(stdout="n1\nn2\n")  # noqa: E731
    monkeypatch.setattr(subprocess, "run", scontrol)

    def detect(env):
        monkeypatch.setattr(os, "environ", {**own, **env})
        return detect_launch()

    return detect


@pytest.mark.parametrize("case", LAUNCHES)
def test_detect_launch(launch, case):
    env, wanted = LAUNCHES[case]
    if isinstance(wanted, str):
        with pytest.raises(UserError, match=wanted):
            launch(env)
        return
    found = launch(env)
    place = found.rank, found.world_size, found.local_rank, found.local_world_size, found.node
    values = (found.launcher, *place, found.master_addr, found.master_port)
    assert [(v, w) for v, w in zip(values, wanted, strict=True) if w not in (v, None)] == []


@pytest.mark.parametrize("case", WRONG)
def test_a_value_that_no_rank_can_use_is_refused_by_its_name(launch, case):
    env, values = WRONG[case]
    name = case.partition(" ")[0]
    launch(env)  # as it is, it is right
    for value in values:
        with pytest.raises(UserError, match=f"^({name}=|{name} is not set)") as error:
            launch({**env, name: value})
        assert str(error.value).isprintable() and len(str(error.value)) < 400, value


@pytest.mark.parametrize("host", ["n1", "n1.", "gpu-01.example.org", "my_host", "10.0.0.1", "::1"])
def test_hosts_that_may_be_the_master(launch, host):
    assert launch(BY_TORCHRUN | {"MASTER_ADDR": host}).master_addr == host


def test_a_process_with_a_wrong_rank_reports_it_at_once(monkeypatch):
    for rank, ranks_, first in (
        *(("0", "2", True), ("-1", "2", True), ("2", "2", True), ("x", "2", True)),
        *(("1", "2", False), ("1", "x", False), ("", "", True)),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", ranks_)
        monkeypatch.delenv("SLURM_PROCID", raising=False)
        assert process.reports_first() == first, (rank, ranks_)


def test_the_micro_batch_is_halved_and_the_global_batch_stays():
    training = SimpleNamespace()
    for training.batch_size, training.gradient_accumulation_steps, new in (
        (8, 3, (4, 6)),
        (5, 2, (2, 5)),  # the largest divisor of the global batch below 5
    ):
        values = restart_values(training, Path("out"), None)
        assert (values["batch_size"], values["gradient_accumulation_steps"]) == new


def test_a_restart_changes_flags_and_the_deepspeed_file_together(monkeypatch):
    settings = parse_arguments(["--strategy", "zero2", "--batch_size", "8", "--auto_micro_batch"])
    values = restart_values(settings.training, Path("out"), None)
    monkeypatch.setenv(process.RESTARTED, json.dumps(values))
    changed = settings.replace(**restarted_with(settings.strategy))
    config = changed.strategy.config
    assert (changed.training.batch_size, changed.training.gradient_accumulation_steps) == (4, 2)
    assert changed.output.output_dir == "out"
    assert values.keys() - {"choice"} == {"batch_size", "gradient_accumulation_steps", "output_dir"}
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 2
    assert config["train_batch_size"] == settings.strategy.config["train_batch_size"]


def test_time_limits_as_slurm_reads_them():
    assert seconds_of("48:00:00") == seconds_of("2-00:00:00") == 172_800
    for text in ("0", "00:00:00", "1:2:3:4"):
        with pytest.raises(UserError, match="--time_limit"):
            seconds_of(text)
