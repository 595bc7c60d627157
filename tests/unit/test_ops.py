"""Which of DeepSpeed's ops are needed, where they are, and how they are compiled and loaded."""

import importlib
import importlib.util
from pathlib import Path

import pytest

from support import patches
from support.files import atomic
from support.strategies import op_builds, ops
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


def test_file_system_without_locks(monkeypatch, tmp_path):
    monkeypatch.setattr(atomic, "lock", lambda path: path.touch())
    with op_builds._only_builder(tmp_path, print):
        pass


def test_op_that_was_installed_with_deepspeed(monkeypatch, tmp_path):
    """DS_BUILD_CPU_ADAM=1 pip install deepspeed."""
    monkeypatch.setattr(ops, "library", lambda op: tmp_path / "none")
    monkeypatch.setattr(ops, "_package", lambda name: tmp_path)
    assert not ops.is_compiled("cpu_adam")
    (tmp_path / "ops" / "adam").mkdir(parents=True)
    (tmp_path / "ops" / "adam" / "cpu_adam_op.cpython-311-x86_64-linux-gnu.so").touch()
    assert ops.is_compiled("cpu_adam")


def test_slow_files_are_compiled_as_one(monkeypatch, tmp_path):
    """With headers of the same name, with and without an include guard, and in a cycle."""
    csrc = tmp_path / "my package" / "csrc"
    files = {
        "slow.cpp": '#include "a.h"',
        "direct.cpp": "#include <torch/extension.h>",
        "fast.cpp": '#include "fast.h"',
        "a.h": '#include "b.h"\n#include "a.h"',
        "b.h": "#include <torch/torch.h>",
        "fast.h": '#include "fast.h"',
    }
    csrc.mkdir(parents=True)
    for name, text in files.items():
        (csrc / name).write_text(text)
    (tmp_path / "build" / "op").mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "build"))
    calls = []
    sources = [str(csrc / name) for name in ("slow.cpp", "direct.cpp", "fast.cpp")]
    op_builds._compile_as_unit(
        lambda *args, **options: calls.append((args, options)),
        "op",
        sources,
        extra_include_paths=[str(csrc)],
        extra_cflags=["-O3"],
    )
    [((name, [unit, fast]), options)] = calls
    copied = tmp_path / "build" / "op" / "csrc"
    assert name == "op" and fast == str(copied / "fast.cpp")
    assert options == {"extra_include_paths": [str(copied)], "extra_cflags": ["-O3"]}
    assert Path(unit).read_text() == "".join(
        f'#include "{copied / name}"\n' for name in ("slow.cpp", "direct.cpp")
    )
    assert (copied / "b.h").read_text().startswith("#pragma once\n")
    assert (csrc / "b.h").read_text() == files["b.h"]


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
