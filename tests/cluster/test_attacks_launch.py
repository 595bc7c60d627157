"""Attacks on what tells a process its rank: the environments that launchers leave."""

import os
import re
import subprocess
from pathlib import Path

import pytest

# Task 1 of two, the first of its node; rows add to it or, with None, take away.
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

EXPORTED = {"RANK": "0", "WORLD_SIZE": "2"}

# A shell in each task has set these before it starts four processes.
SHELL_IN_TASK = TASK | {
    "RANK": "6",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
}

SLURM_WINS = ("srun", 1, 2, 0, 1, 1, "n1", 20707)

# What happened: the process's environment, that with which its task started ("task": as the
# process's; None: hidden), and (launcher, rank, world size, local rank, local world size, node,
# master's address and port) or an error.
LAUNCHES = {
    "srun alone": (TASK, {}, SLURM_WINS),
    "the batch script exported RANK": (TASK | EXPORTED, EXPORTED, "same rank: unset RANK"),
    "a size of 1": (TASK | {"RANK": "0", "WORLD_SIZE": "1"}, {}, "same rank: unset RANK"),
    "a shell in each task numbers the ranks itself": (
        TASK | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"},
        {},
        ("python", 1, 2, 1, 2, 0, "n1", 29500),
    ),
    "torchrun without the other node": (
        TASK
        | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
        | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "7"},
        {},
        "torchrun in each of them starts a separate run",
    ),
    "torchrun in each task": (
        TASK
        | {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "1",
            "TORCHELASTIC_RUN_ID": "7",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "1234",
        },
        {},
        ("torchrun", 5, 8, 1, 4, 1, "n1", 1234),
    ),
    "torchrun in each task, after an export": (
        TASK
        | {
            "RANK": "0",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "4",
            "TORCHELASTIC_RUN_ID": "7",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "1234",
        },
        {"RANK": "0"},
        ("torchrun", 0, 8, 0, 4, 0, "n1", 1234),
    ),
    "deepspeed in each task": (
        TASK
        | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        | {"CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        {},
        "srun started 2 tasks, and deepspeed in each of them starts a separate run: use `srun",
    ),
    "a shell in each task that starts four": (
        SHELL_IN_TASK,
        {},
        ("python", 6, 8, 2, 4, 1, "n1", 29500),
    ),
    "the same in a container": (SHELL_IN_TASK, None, ("python", 6, 8, 2, 4, 1, "n1", 29500)),
    "one srun for each rank": (
        TASK
        | {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "1",
            "SLURM_STEP_NUM_TASKS": "1",
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "n1",
        },
        {"RANK": "1"},
        ("python", 1, 2, 0, 1, 1, "n1", 29500),
    ),
    "the batch script's own shell": (
        TASK | {"SLURM_STEP_ID": None},
        {},
        ("python", 0, 1, 0, 1, 0, "127.0.0.1", None),
    ),
    "the list of nodes as master": (TASK | {"MASTER_ADDR": "n[1-2]"}, {}, SLURM_WINS),
    "names as master": (TASK | {"MASTER_ADDR": "n1,n2"}, {}, SLURM_WINS),
    "lines as master": (TASK | {"MASTER_ADDR": "n1\nn2"}, {}, SLURM_WINS),
    "localhost as master of two nodes": (TASK | {"MASTER_ADDR": "localhost"}, {}, SLURM_WINS),
    "localhost as master of one node": (
        TASK
        | {
            "MASTER_ADDR": "127.0.0.1",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "2",
        },
        {},
        ("srun", 1, 2, 1, 2, 0, "127.0.0.1", 20707),
    ),
    "another network's name as master": (
        TASK | {"MASTER_ADDR": "n1-ib"},
        {},
        (*SLURM_WINS[:6], "n1-ib", 20707),
    ),
    "uneven nodes": (
        TASK
        | {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1"},
        {},
        ("srun", 3, 4, 0, 1, 1, "n1", 20707),
    ),
    "a count that no memory holds": (
        TASK | {"SLURM_STEP_TASKS_PER_NODE": "1(x99999999999999)"},
        {},
        SLURM_WINS,
    ),
    "the shell of salloc": (
        TASK
        | {
            "SLURM_PROCID": "0",
            "SLURM_NODEID": "0",
            "SLURM_STEP_ID": "4294967290",
            "SLURM_NTASKS": "8",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_STEP_NODELIST": "n1",
        },
        {},
        ("srun", 0, 1, 0, 1, 0, "n1", None),
    ),
    "empty variables": ({"RANK": "", "WORLD_SIZE": ""}, {}, "environment is incomplete"),
    "a local rank below 0": (
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"},
        {},
        "LOCAL_RANK=-1",
    ),
    "a task that is no number": (TASK | {"SLURM_PROCID": "x"}, {}, "environment is incomplete"),
    "a task without its number on the node": (TASK | {"SLURM_LOCALID": None}, {}, "SLURM_LOCALID"),
    "a rank that is no number": ({"RANK": "one", "WORLD_SIZE": "2"}, {}, "one"),
    "a rank that does not fit": ({"RANK": "2", "WORLD_SIZE": "2"}, {}, "RANK=2"),
    "a rank below 0": ({"RANK": "-1", "WORLD_SIZE": "2"}, {}, "RANK=-1"),
    "no ranks": ({"RANK": "0", "WORLD_SIZE": "0"}, {}, "WORLD_SIZE=0"),
    "a local rank that does not fit": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"},
        {},
        "LOCAL_RANK=4",
    ),
    "a port that is none": (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "99999"},
        {},
        "MASTER_PORT=99999",
    ),
    "a port of words": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"}, {}, "http"),
    "5,000 digits": ({"RANK": "9" * 5000, "WORLD_SIZE": "1"}, {}, "digits"),
}


@pytest.mark.attack
@pytest.mark.parametrize("case", LAUNCHES)
def test_detect_launch(stubs, monkeypatch, case):
    from support.cluster.launch import detect_launch
    from support.errors import UserError

    env, task, wanted = LAUNCHES[case]
    for name in [
        name
        for name in os.environ
        if re.match("SLURM_|MASTER_|RANK|WORLD_SIZE|LOCAL_|GROUP_|CROSS_|TORCHELASTIC", name)
    ]:
        monkeypatch.delenv(name)
    with subprocess.Popen(
        ["sleep", "60"], env={"PATH": os.environ["PATH"], **(task or {})}
    ) as process:
        try:
            while (
                task is not None
                and b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
            ):
                pass
            own = {"PATH": f"{stubs.bin}{os.pathsep}{os.environ['PATH']}"}
            own |= {"SLURM_TASK_PID": str(process.pid)} if task is not None else {}
            monkeypatch.setattr(
                os,
                "environ",
                own | {name: value for name, value in env.items() if value is not None},
            )
            if isinstance(wanted, str):
                with pytest.raises(UserError, match=wanted):
                    detect_launch()
                return
            found = detect_launch()
        finally:
            process.kill()
    values = (
        found.launcher,
        found.rank,
        found.world_size,
        found.local_rank,
        found.local_world_size,
        found.node,
        found.master_addr,
        found.master_port,
    )
    assert [
        value for value, want in zip(values, wanted, strict=True) if want not in (value, None)
    ] == [], values
