"""Which of DeepSpeed's ops are needed, where they are, and how they are compiled and loaded."""

import importlib
import importlib.util
from pathlib import Path
from resource import RLIM_INFINITY

import pytest

from support import patches
from support.errors import MissingRequirement
from support.strategies import ops, requirements
from support.strategy import STRATEGIES


def test_only_offload_and_infinity_need_ops():
    needed = {name: ops.needed_ops(strategy) for name, strategy in STRATEGIES.items()}
    assert needed.pop("offload") == ["cpu_adam"]
    assert needed.pop("infinity")[:2] == ["cpu_adam", "async_io"]
    assert not any(needed.values())


@pytest.fixture
def folder(monkeypatch):
    """folder() returns the folder of the ops under the present patches."""

    def compute() -> Path:
        ops.ops_folder.cache_clear()
        return ops.ops_folder()

    yield compute
    monkeypatch.undo()
    ops.ops_folder.cache_clear()


def test_each_cpu_and_version_has_a_folder_of_its_own(folder, monkeypatch, tmp_path):
    """An op for another CPU would end the process with SIGILL."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folders = {folder()}
    assert folders == {folder()} and folder().parent == tmp_path
    monkeypatch.setattr(ops, "_cpu_features", lambda: ["avx2"])
    folders.add(folder())
    monkeypatch.setattr(ops, "version", lambda name: "0.1")
    folders.add(folder())
    (tmp_path / "version.py").write_text("__version__ = '2.0'")
    monkeypatch.setattr(ops, "_package", lambda name: tmp_path)
    folders.add(folder())
    assert len(folders) == 4


@pytest.mark.parametrize(
    "line, features",
    [
        ("flags\t\t: fpu sse avx2 avx512f md_clear ibpb", ["avx2", "avx512f", "sse"]),
        ("Features\t: fp asimd sve", ["asimd", "fp", "sve"]),
    ],
)
def test_features_are_those_that_a_compiler_uses(monkeypatch, tmp_path, line, features):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: x\n{line}\n")
    monkeypatch.setattr(ops, "CPU_INFO", tmp_path / "cpuinfo")
    assert ops._cpu_features() == features


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


def test_memory_may_not_be_locked(monkeypatch):
    monkeypatch.setattr(requirements, "_has_capability", lambda number: False)
    monkeypatch.setattr(requirements.resource, "getrlimit", lambda _: (65536, 65536))
    with pytest.raises(MissingRequirement, match="ulimit -l unlimited"):
        requirements.check_locked_memory(2**20)


def test_op_that_was_installed_with_deepspeed(monkeypatch, tmp_path):
    """DS_BUILD_CPU_ADAM=1 pip install deepspeed."""
    monkeypatch.setattr(ops, "library", lambda op: tmp_path / "none")
    monkeypatch.setattr(ops, "_package", lambda name: tmp_path)
    assert not ops.is_compiled("cpu_adam")
    (tmp_path / "ops" / "adam").mkdir(parents=True)
    (tmp_path / "ops" / "adam" / "cpu_adam_op.cpython-311-x86_64-linux-gnu.so").touch()
    assert ops.is_compiled("cpu_adam")


def test_deepspeed_loads_our_ops_and_compiles_the_others(monkeypatch):
    from deepspeed.ops.op_builder import builder, cpu

    monkeypatch.setattr(builder.OpBuilder, "jit_load", lambda self, verbose: f"theirs: {self.name}")
    monkeypatch.setattr(builder.OpBuilder, "_loaded_ops", {})
    patches.load_compiled_ops(["cpu_adam"], lambda op: f"ours: {op}")
    assert cpu.CPUAdamBuilder().load() == "ours: cpu_adam"
    assert cpu.FusedAdamBuilder().load() == "theirs: fused_adam"


def test_loaded_op_has_a_file(monkeypatch):
    """DeepSpeed makes the symbols of pin_memory global through it, which async_io needs."""
    speedups = importlib.util.find_spec("markupsafe._speedups").origin
    monkeypatch.setattr(ops, "library", lambda op: Path(speedups))
    assert ops.load("_speedups").__file__ == speedups


def test_shared_memory_op_is_not_loaded(monkeypatch):
    backend = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(backend, "build_shm_op", None)
    patches.skip_shared_memory_op()
    assert backend.build_shm_op() is None
