"""Which ops a strategy compiles on a GPU, shown on a machine without one."""

from types import SimpleNamespace

import pytest
import torch

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
