"""Which ops a strategy compiles on a GPU, shown on a machine without one."""

from pathlib import Path

import pytest

from support.strategies import ops
from support.tables import STRATEGIES


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
    assert set(loaded) <= set(ops.needed_ops(STRATEGIES["infinity"]))


@pytest.mark.parametrize("has_op", [True, False])
def test_pin_memory_is_compiled_where_deepspeed_has_it(tmp_path, monkeypatch, has_op):
    builders = tmp_path / "ops" / "op_builder"
    builders.mkdir(parents=True)
    if has_op:
        (builders / "pin_memory.py").touch()
    monkeypatch.setattr(ops, "_package", lambda name: tmp_path)
    assert ("pin_memory" in ops.needed_ops(STRATEGIES["infinity"])) is has_op


def test_ops_contain_no_code_for_gpus():
    """They are compiled as for a CPU, so that a login node without a GPU and nvcc can do it."""
    from deepspeed.ops.op_builder import async_io, cpu

    assert cpu.AsyncIOBuilder().sources() == async_io.AsyncIOBuilder().sources()
    for builder in (cpu.AsyncIOBuilder(), cpu.CPUAdamBuilder()):
        for source in builder.sources():
            text = Path(builder.deepspeed_src_path(source)).read_text()
            assert "#include <cuda" not in text and "cudaStream" not in text, source
