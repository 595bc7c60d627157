"""What tells a process its rank, the environments that launchers leave; and with which micro-batch
--auto_micro_batch starts the ranks again.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import process
from support.cli.parse import parse_arguments
from support.cluster.launch import detect_launch
from support.cluster.restart import continue_restarted, restart_values
from support.errors import UserError

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
    "a rank that does not fit": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_detect_launch(monkeypatch, case):
    env, wanted = LAUNCHES[case]
    own = {name: value for name, value in os.environ.items() if not re.match("SLURM_|PET_", name)}
    launcher = "MASTER_|RANK|WORLD_SIZE|LOCAL_|GROUP_|CROSS_|TORCHELASTIC"
    own = {name: value for name, value in own.items() if not re.match(launcher, name)}
    monkeypatch.setattr(os, "environ", {**own, **env})
    scontrol = lambda *_, **__: SimpleNamespace(stdout="n1\nn2\n")  # noqa: E731
    monkeypatch.setattr(subprocess, "run", scontrol)
    if isinstance(wanted, str):
        with pytest.raises(UserError, match=wanted):
            detect_launch()
        return
    found = detect_launch()
    place = found.rank, found.world_size, found.local_rank, found.local_world_size, found.node
    values = (found.launcher, *place, found.master_addr, found.master_port)
    assert [(v, w) for v, w in zip(values, wanted, strict=True) if w not in (v, None)] == []


def test_the_micro_batch_is_halved_and_the_global_batch_stays():
    args = SimpleNamespace()
    for args.batch_size, args.gradient_accumulation_steps, new in (
        (8, 3, (4, 6)),
        (5, 2, (2, 5)),  # the largest divisor of the global batch below 5
    ):
        values = restart_values(args, Path("out"))
        assert (values["batch_size"], values["gradient_accumulation_steps"]) == new


def test_a_restart_changes_flags_and_the_deepspeed_file_together(monkeypatch):
    args = parse_arguments(["--strategy", "zero2", "--batch_size", "8", "--auto_micro_batch"])
    values = restart_values(args, Path("out"))
    monkeypatch.setenv(process.RESTARTED, json.dumps(values))
    changed = continue_restarted(args)
    config = changed.ds_config_dict
    assert (changed.batch_size, changed.gradient_accumulation_steps) == (4, 2)
    assert (changed.output_dir, changed.given) == ("out", args.given)
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 2
    assert config["train_batch_size"] == args.ds_config_dict["train_batch_size"]
