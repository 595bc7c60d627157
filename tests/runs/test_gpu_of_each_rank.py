"""Each rank has a GPU of its own, shown on a machine without one."""

import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import FAULT, finish, free_port, start

from support.cluster import devices

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu_of(monkeypatch):
    """gpu_of(name, uuid, CUDA_VISIBLE_DEVICES): what a process with that GPU says of it."""

    def identify(name, uuid, visible):
        gpu = SimpleNamespace(name=name, uuid=uuid)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return devices.identify_gpu(GPU)

    return identify


def test_slices_of_a_gpu_are_different_gpus(gpu_of):
    slices = [
        gpu_of("NVIDIA A100 MIG 1g.5gb", "a", visible) for visible in ("MIG-1", "MIG-1", "MIG-2")
    ]
    assert slices[0] == slices[1] != slices[2]
    assert gpu_of("NVIDIA A100", "a", "0") == gpu_of("NVIDIA A100", "a", "1,0")


def test_ranks_that_may_share_a_gpu(gpu_of, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert gpu_of("NVIDIA A100", "a", "0") is None


def test_tasks_that_slurm_gives_the_same_gpu_end_with_one_line(tmp_path):
    shared = {
        "FAULT": "same_gpu",
        "SLURM_NTASKS": 2,
        "SLURM_STEP_ID": 0,
        "SLURM_JOB_ID": 1,
        "SLURM_STEP_TASKS_PER_NODE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    command = [sys.executable, FAULT, "--output_dir", tmp_path / "out"]
    tasks = [
        start(command, env={**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in (0, 1)
    ]
    said = "".join(text for task in tasks for text in finish(task, 60))
    assert all(task.returncode == 1 for task in tasks), said
    [line] = [line for line in said.splitlines() if "❌" in line]
    assert "ranks 0-1" in line and "Traceback" not in said
