"""Which of DeepSpeed's ops are needed, where they are, and how they are compiled and loaded."""

from pathlib import Path
from resource import RLIM_INFINITY

import pytest

from support import patches
from support.errors import MissingRequirement
from support.strategies import ops, requirements
from support.tables import STRATEGIES


def test_only_offload_and_infinity_need_ops():
    needed = {name: ops.needed_ops(strategy) for name, strategy in STRATEGIES.items()}
    assert needed.pop("offload") == ["cpu_adam"]
    assert needed.pop("infinity")[:2] == ["cpu_adam", "async_io"]
    assert not any(needed.values())


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """folder(cpu) returns the folder of the ops on a machine with this line in /proc/cpuinfo."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def compute(line: str) -> Path:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
        monkeypatch.setattr(ops, "CPU_INFO", tmp_path / "cpuinfo")
        ops.ops_folder.cache_clear()
        return ops.ops_folder()

    yield compute
    monkeypatch.undo()
    ops.ops_folder.cache_clear()


def test_each_cpu_and_version_has_a_folder_of_its_own(folder, monkeypatch, tmp_path):
    """An op for another CPU would end the process with SIGILL."""
    usual = folder("flags\t\t: sse avx2")
    assert usual.parent == tmp_path
    assert folder("flags\t\t: sse avx2 md_clear ibpb") == usual  # depend on the kernel's version
    others = {folder("flags\t\t: sse avx2 avx512f"), folder("Features\t: asimd sve")}
    monkeypatch.setattr(ops, "version", lambda name: "0.1")
    assert len({usual, *others, folder("flags\t\t: sse avx2")}) == 4


def test_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(ops, "ops_folder", lambda: tmp_path / "file" / "ops")
    requirements.check_builds([])
    with pytest.raises(MissingRequirement, match="TORCH_EXTENSIONS_DIR"):
        requirements.check_builds(["cpu_adam"])


@pytest.mark.parametrize("capable, limit", [(True, 1), (False, 2**20), (False, RLIM_INFINITY)])
def test_memory_may_be_locked(monkeypatch, capable, limit):
    monkeypatch.setattr(requirements, "_has_capability", lambda number: capable)
    monkeypatch.setattr(requirements.resource, "getrlimit", lambda _: (limit, limit))
    requirements.check_locked_memory(2**20)
    if not capable and limit != RLIM_INFINITY:
        with pytest.raises(MissingRequirement, match="ulimit -l unlimited"):
            requirements.check_locked_memory(2**21)


def test_deepspeed_loads_our_ops_and_compiles_the_others(monkeypatch):
    from deepspeed.ops.op_builder import builder, cpu

    monkeypatch.setattr(builder.OpBuilder, "jit_load", lambda self, verbose: f"theirs: {self.name}")
    monkeypatch.setattr(builder.OpBuilder, "_loaded_ops", {})
    patches.load_compiled_ops(["cpu_adam"], lambda op: f"ours: {op}")
    assert cpu.CPUAdamBuilder().load() == "ours: cpu_adam"
    assert cpu.FusedAdamBuilder().load() == "theirs: fused_adam"
