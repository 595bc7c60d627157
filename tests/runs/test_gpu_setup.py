"""What the script settles for GPUs before it trains, shown on a machine without one."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FAULT, PROJECT, finish, free_port, start

from support.cli.parse import parse_arguments
from support.cluster import devices, process_group
from support.errors import MissingRequirement
from support.strategies import requirements
from support.strategy import STRATEGIES

GPU = torch.device("cuda", 0)


@pytest.fixture
def without_cuda_toolkit(monkeypatch):
    """A GPU machine with libaio, a C++ compiler and torch's wheels, but no nvcc."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: True)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")


def flags_of(strategy: str, device: str) -> SimpleNamespace:
    return SimpleNamespace(
        strategy=strategy,
        ds_config_dict={
            "zero_optimization": {
                "stage": 3 if strategy == "infinity" else 2,
                "offload_optimizer": {"device": device},
            }
        },
    )


def test_infinity_without_a_cuda_toolkit(without_cuda_toolkit):
    with pytest.raises(MissingRequirement, match="CUDA_HOME"):
        requirements.check_requirements(flags_of("infinity", "nvme"), GPU)


@pytest.mark.parametrize(
    ("strategy", "keeps", "device"),
    [("infinity", "nvme", torch.device("cpu")), ("offload", "cpu", GPU)],
)
def test_what_needs_no_cuda_toolkit(without_cuda_toolkit, strategy, keeps, device):
    requirements.check_requirements(flags_of(strategy, keeps), device)


def test_ops_that_infinity_compiles_are_those_that_async_io_loads(monkeypatch):
    from deepspeed.ops.op_builder import builder
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder  # the one for GPUs

    loaded = []

    def load(self, verbose=False):
        loaded.append(self.name)

    monkeypatch.setattr(builder.OpBuilder, "load", load)
    monkeypatch.setattr("sys._deepspeed_pin_memory_op_module", None, raising=False)
    AsyncIOBuilder().load()
    assert set(loaded) == {"async_io", "pin_memory"}
    assert set(loaded) <= set(requirements.needed_ops(STRATEGIES["infinity"], GPU))


@pytest.mark.parametrize("has_op", [True, False])
def test_pin_memory_is_compiled_where_deepspeed_has_it(tmp_path, monkeypatch, has_op):
    builders = tmp_path / "ops" / "op_builder"
    builders.mkdir(parents=True)
    if has_op:
        (builders / "pin_memory.py").touch()
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    assert ("pin_memory" in requirements.needed_ops(STRATEGIES["infinity"], GPU)) is has_op


# ----------------------------------------------------------------------------- DeepSpeed's settings


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_loss_that_is_not_finite_leaves_the_weights_in_bf16(strategy, preloaded):
    """Without DeepSpeed's own search, too: our flag makes the update do nothing."""
    command = [sys.executable, "-m", "tests.helpers.held_update", strategy]
    if preloaded:
        command = preloaded.replace(command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"changed": [True, False], "finite": True, "searches": 0}


# ---------------------------------------------------------------------------- one GPU for each rank


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
    assert "ranks 0, 1" in line and "Traceback" not in said


# -------------------------------------------------------------------------------- the process group


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
    options = process_group.group_options(parse_arguments(["--strategy", strategy]), GPU, ranks)
    assert options == {"backend": "nccl", **({"device_id": GPU} if bound else {})}


def test_group_on_a_cpu(tmp_path):
    args = parse_arguments(offloading(tmp_path))
    assert process_group.group_options(args, torch.device("cpu"), 2) == {"backend": "gloo"}


@pytest.mark.parametrize("offloads", [True, False])
def test_gradients_on_the_host_are_unscaled_clipped_and_measured(tmp_path, preloaded, offloads):
    """fp16 under FSDP with CPU offload. gloo stands for NCCL, and like it gets no tensors of the
    host; without offload, where gradients are on the GPU, the group cannot reduce these.
    """
    args = parse_arguments(offloading(tmp_path) if offloads else ["--strategy", "fsdp"])
    backend = process_group.group_options(args, GPU, 2)["backend"]
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
