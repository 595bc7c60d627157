"""What the script settles for GPUs before it trains, shown on a machine without one."""

from types import SimpleNamespace

import pytest
import torch

from support import preflight
from support.errors import MissingRequirement

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


def test_deepspeed_joins_the_toolkit_that_is_missing_to_a_path(without_cuda_toolkit):
    """Why is_compatible is not enough."""
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder  # the one for GPUs

    builder = AsyncIOBuilder()
    builder.build_for_cpu = False  # as jit_load sets it where torch sees a GPU
    with pytest.raises(TypeError):
        builder.include_paths()


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
