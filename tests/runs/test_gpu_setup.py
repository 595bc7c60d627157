"""What the script settles for GPUs before it trains, shown on a machine without one."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FAULT, PROJECT, finish, free_port, start

from support.cli import validate as preflight
from support.cli.flags import GROWTH_INTERVAL, complete_ds_config, parse_arguments
from support.cluster import context as distributed
from support.errors import MissingRequirement
from support.strategies import gradients

GPU = torch.device("cuda", 0)


@pytest.fixture
def without_cuda_toolkit(monkeypatch):
    """A GPU machine with libaio, a C++ compiler and torch's wheels, but no nvcc."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: True)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")


def requirements(strategy: str, device: str) -> SimpleNamespace:
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
        preflight.check_requirements(requirements("infinity", "nvme"), GPU)


@pytest.mark.parametrize(
    ("strategy", "keeps", "device"),
    [("infinity", "nvme", torch.device("cpu")), ("offload", "cpu", GPU)],
)
def test_what_needs_no_cuda_toolkit(without_cuda_toolkit, strategy, keeps, device):
    preflight.check_requirements(requirements(strategy, keeps), device)


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
    assert set(loaded) <= set(preflight.needed_ops("infinity", GPU))


@pytest.mark.parametrize("has_op", [True, False])
def test_pin_memory_is_compiled_where_deepspeed_has_it(tmp_path, monkeypatch, has_op):
    builders = tmp_path / "ops" / "op_builder"
    builders.mkdir(parents=True)
    if has_op:
        (builders / "pin_memory.py").touch()
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    assert ("pin_memory" in preflight.needed_ops("infinity", GPU)) is has_op


# ----------------------------------------------------------------------------- DeepSpeed's settings


def completed(strategy: str, precision: str, world_size: int, **sections) -> dict:
    """The project's DeepSpeed configuration of a strategy, with other values in some sections."""
    config = parse_arguments(["--strategy", strategy]).ds_config_dict
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return complete_ds_config(
        config,
        precision=precision,
        hidden_size=256,
        parameters=10**6,
        largest_parameter=10**5,
        tied=True,
        world_size=world_size,
        nvme_folder="folder",
    )


def scales_of_deepspeed(overflows: list[bool], strategy: str, monkeypatch) -> list[float]:
    """The loss scale after each step, of the scaler that the engine makes from our configuration."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.precision_config import get_float16_config

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)  # it wants to know who logs
    settings = get_float16_config(completed(strategy, "fp16", 2))
    scaler = CreateLossScaler(
        torch.half, settings.loss_scale, True, settings.dynamic_loss_scale_args()
    )
    scales = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    return scales


def scales_of_torch(overflows: list[bool]) -> list[float]:
    cpu_run = SimpleNamespace(simulated=False, device=torch.device("cpu"))
    scaler = gradients.loss_scaler(cpu_run, enabled=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(weight.detach())  # sets the scale
    scales = []
    for overflow in overflows:
        weight.grad = torch.full((1,), math.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_loss_scale_is_that_of_torch_at_every_step(strategy, monkeypatch):
    """fp16: overflows at the start, in a row and apart, and at the step after the scale has grown."""
    grows, calm = [False] * GROWTH_INTERVAL, [False] * 3
    overflows = [True, True, *calm, True, *grows, True, *grows, *calm]
    scales = scales_of_torch(overflows)
    assert scales[0] == 2.0**15 and scales[-1] == 2.0**14  # 16 - 3 + 1 - 1 + 1
    assert scales_of_deepspeed(overflows, strategy, monkeypatch) == scales


def test_loss_scale_grows_after_as_many_steps_as_with_torch(monkeypatch):
    overflows = [False] * (GROWTH_INTERVAL + 1)
    assert scales_of_deepspeed(overflows, "zero1", monkeypatch) == scales_of_torch(overflows)


def test_loss_scaling_of_a_users_file_is_kept():
    own = {"hysteresis": 4, "loss_scale_window": 100, "initial_scale_power": 8}
    kept = completed("zero2", "fp16", 2, fp16=own)["fp16"]
    assert kept == {"enabled": True, **own}


@pytest.mark.parametrize(
    ("strategy", "ranks", "overlaps"),
    [
        ("zero1", 1, False),
        ("zero1", 2, True),
        ("zero2", 1, False),
        ("zero2", 2, True),
        ("zero3", 1, True),
        ("offload", 1, True),
    ],
)
def test_reductions_overlap_where_there_is_something_to_overlap(strategy, ranks, overlaps):
    """Stage 3 and offload also overlap copies, on one rank too."""
    assert completed(strategy, "bf16", ranks)["zero_optimization"]["overlap_comm"] is overlaps


@pytest.mark.parametrize("overlaps", [True, False])
def test_overlap_of_a_users_file_is_kept(overlaps):
    own = {"overlap_comm": overlaps}
    for ranks in (1, 2):
        zero = completed("zero2", "bf16", ranks, zero_optimization=own)["zero_optimization"]
        assert zero["overlap_comm"] is overlaps


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "offload"])
def test_bf16_gradients_are_not_searched_for_infinities(strategy):
    """Stage 3 has no such setting: it searches in fp16 only (stage3.py)."""
    assert completed(strategy, "bf16", 2)["bf16"] == {"enabled": True, "check_grad_overflow": False}


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_loss_that_is_not_finite_leaves_the_weights_in_bf16(strategy):
    """Without DeepSpeed's own search, too: our flag makes the update do nothing."""
    command = [sys.executable, PROJECT / "tests" / "helpers" / "held_update.py", strategy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"changed": [True, False], "finite": True, "searches": 0}


# ---------------------------------------------------------------------------- one GPU for each rank


def arrived(*places: tuple[str, str | None]) -> dict:
    """What rank 0 reads of each rank: its host and its GPU."""
    return {rank: {"host": host, "gpu": gpu} for rank, (host, gpu) in enumerate(places)}


@pytest.mark.parametrize(
    "seen",
    [
        arrived(("node1", None), ("node1", None)),  # CPU processes
        arrived(("node1", "GPU-a"), ("node1", "GPU-b")),
        arrived(("node1", "GPU-a"), ("node2", "GPU-a")),  # NCCL looks within a host, too
    ],
)
def test_ranks_with_a_gpu_each(seen):
    assert distributed._who_shares_a_gpu(seen) == ""


def test_every_host_whose_ranks_share_a_gpu_is_named():
    seen = arrived(
        ("node1", "a"),
        ("node1", "a"),
        ("node2", "b"),
        ("node2", "c"),
        ("node3", "d"),
        ("node3", "d"),
    )
    said = distributed._who_shares_a_gpu(seen)
    assert "ranks 0, 1 on node1" in said and "ranks 4, 5 on node3" in said and "node2" not in said


@pytest.fixture
def gpu_of(monkeypatch):
    """gpu_of(name, uuid, CUDA_VISIBLE_DEVICES): what a process with that GPU says of it."""

    def identify(name, uuid, visible):
        gpu = SimpleNamespace(name=name, uuid=uuid)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return distributed.identify_gpu(GPU)

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
    options = distributed.group_options(parse_arguments(["--strategy", strategy]), GPU, ranks)
    assert options == {"backend": "nccl", **({"device_id": GPU} if bound else {})}


def test_group_on_a_cpu(tmp_path):
    args = parse_arguments(offloading(tmp_path))
    assert distributed.group_options(args, torch.device("cpu"), 2) == {"backend": "gloo"}


@pytest.mark.parametrize("offloads", [True, False])
def test_gradients_on_the_host_are_unscaled_clipped_and_measured(tmp_path, offloads):
    """fp16 under FSDP with CPU offload. gloo stands for NCCL, and like it gets no tensors of the
    host; without offload, where gradients are on the GPU, the group cannot reduce these.
    """
    args = parse_arguments(offloading(tmp_path) if offloads else ["--strategy", "fsdp"])
    backend = distributed.group_options(args, GPU, 2)["backend"]
    backend = {"nccl": "cuda:nccl"}.get(backend, backend).replace("nccl", "gloo")
    command = [
        sys.executable,
        PROJECT / "tests" / "helpers" / "host_gradients.py",
        backend,
        tmp_path / "store",
    ]
    ranks = [start(command, env={"RANK": rank}) for rank in (0, 1)]
    said = [finish(rank, 60) for rank in ranks]
    if not offloads:
        assert all("No backend type associated with device type cpu" in err for _, err in said)
        return
    for out, err in said:
        assert out, err
        # Parts (3, 4) and (0, 12), scaled by 8, on either rank; then an infinite one on rank 1.
        assert json.loads(out) == {"norm": 13.0, "clipped": 1.0, "found_inf": [0.0, 1.0]}
