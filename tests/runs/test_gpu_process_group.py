"""The process group of ranks on GPUs, shown on a machine without one."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import finish, start

from support.cli.parse import parse_arguments
from support.cluster import process_group

GPU = torch.device("cuda", 0)


def offloading(tmp_path: Path) -> list[str]:
    """Arguments of FSDP that keeps parameters, gradients and optimizer states on the CPU."""
    (tmp_path / "fsdp.json").write_text('{"fsdp_offload_params": true}')
    return ["--strategy", "fsdp", "--fsdp_config", str(tmp_path / "fsdp.json")]


@pytest.mark.parametrize(
    ("strategy", "ranks", "torch_version", "bound"),
    [
        ("zero2", 2, "2.13.0", True),
        ("infinity", 8, "2.6.0+cu124", True),
        ("zero3", 2, "2.7.1", True),
        ("zero2", 2, "2.7.0+cu126", False),
        ("zero2", 1, "2.13.0", False),
        ("dp", 2, "2.13.0", False),
    ],
)
def test_group_that_deepspeed_clones_is_bound_to_the_gpu(
    monkeypatch, strategy, ranks, torch_version, bound
):
    monkeypatch.setattr(torch, "__version__", torch_version)
    ctx = SimpleNamespace(backend="nccl", device=GPU, world_size=ranks)
    options = process_group.group_options(parse_arguments(["--strategy", strategy]), ctx)
    assert options == {"backend": "nccl", **({"device_id": GPU} if bound else {})}


def test_group_on_a_cpu(tmp_path):
    args = parse_arguments(offloading(tmp_path))
    ctx = SimpleNamespace(backend="gloo")
    assert process_group.group_options(args, ctx) == {"backend": "gloo"}


@pytest.mark.parametrize("offloads", [True, False])
def test_gradients_on_the_host_are_unscaled_clipped_and_measured(tmp_path, preloaded, offloads):
    """fp16 under FSDP with CPU offload. gloo stands for NCCL, and like it gets no tensors of the
    host; without offload, where gradients are on the GPU, the group cannot reduce these.
    """
    args = parse_arguments(offloading(tmp_path) if offloads else ["--strategy", "fsdp"])
    ctx = SimpleNamespace(backend="nccl", device=GPU, world_size=2)
    backend = process_group.group_options(args, ctx)["backend"]
    backend = {"nccl": "cuda:nccl"}.get(backend, backend).replace("nccl", "gloo")
    program = [sys.executable, "-m", "tests.helpers.host_gradients"]
    command = [*program, backend, tmp_path / "store"]
    if preloaded:
        command = preloaded.replace(command)
    ranks = [start(command, env={"RANK": rank}) for rank in (0, 1)]
    said = [finish(rank, 60) for rank in ranks]
    if not offloads:
        assert all("No backend type associated with device type cpu" in err for _, err in said)
        return
    for out, err in said:
        assert out, err
        # Parts (3, 4) and (0, 12), scaled by 8, on either rank; then an infinite one on rank 1.
        assert json.loads(out) == {"norm": 13.0, "clipped": 1.0, "found_inf": [0.0, 1.0]}
