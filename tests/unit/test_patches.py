"""What the patches replace exists in the installed libraries; which of DeepSpeed's ops are
needed, and where they are.
"""

import inspect
import pkgutil
import shlex
from pathlib import Path
from resource import RLIM_INFINITY
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from conftest import skip
from packaging.version import Version

from distributed_training import patches
from distributed_training.errors import MissingRequirement
from distributed_training.model.isolation import OLDEST_TRANSFORMERS
from distributed_training.strategies.deepspeed import ops, requirements
from distributed_training.strategies.deepspeed import patches as patches_of_deepspeed
from distributed_training.strategies.table import STRATEGIES

# What each patch replaces, as "module:attribute".
PATCHES = {
    "replace_packed_sequence_check": "transformers.masking_utils:find_packed_sequence_indices",
    "skip_padding_check": "transformers:PreTrainedModel.warn_if_padding_and_no_attention_mask",
    "without_initialization": "torch.nn.init:trunc_normal_",
    "repeat_keys_and_values": "transformers.integrations.sdpa_attention:use_gqa_in_sdpa",
    "override_collectives": "torch:ops.c10d.allreduce_",
    "quote_library_path": "torch.utils.cpp_extension:TORCH_LIB_PATH",
    "compile_ops_with": "torch.utils.cpp_extension:JIT_EXTENSION_VERSIONER.entries",
    "load_compiled_ops": "deepspeed.ops.op_builder.builder:OpBuilder.jit_load",
    "skip_shared_memory_op": "deepspeed.comm.torch:build_shm_op",
    "import_muon_uncompiled": "deepspeed.runtime.zero.utils:is_zero_supported_optimizer",
    "count_free_gpu_memory": (
        "deepspeed.accelerator.cuda_accelerator:CUDA_Accelerator.available_memory"
    ),
    "keep_buffers_in_fp32": (
        "deepspeed.runtime.engine:DeepSpeedEngine._configure_distributed_model"
    ),
    "reduce_gradients_of_blocks": "deepspeed.runtime.zero.stage3:z3_leaf_parameter",
    "wait_once_for_offloaded_gradients": (
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer."
        "complete_grad_norm_calculation_for_cpu_offload"
    ),
    "keep_4bit_layout": "bitsandbytes.nn.modules:has_avx512bf16",
}
# Modules in which older releases of transformers do not have what is replaced.
OLDEST = {"masking_utils": OLDEST_TRANSFORMERS, "sdpa_attention": Version("4.54")}


@pytest.mark.parametrize("target", PATCHES.values(), ids=PATCHES)
def test_each_patched_attribute_exists_in_the_installed_library(target):
    for module, oldest in OLDEST.items():
        if module in target and Version(transformers.__version__) < oldest:
            skip(f"transformers {transformers.__version__} has no {target}")
    if "bitsandbytes" in target:
        pytest.importorskip("bitsandbytes")  # optional
    pkgutil.resolve_name(target)


def test_every_patch_is_listed_and_says_when_to_remove_it():
    functions = {
        name: inspect.getdoc(value)
        for module in (patches, patches_of_deepspeed)
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    assert set(functions) == set(PATCHES)
    assert all("Remove it when" in text for text in functions.values())


def test_free_memory_of_a_gpu_that_is_named_by_its_uuid(monkeypatch):
    """nvidia-ml-py is installed; a MIG device is visible."""
    from deepspeed.accelerator import cuda_accelerator

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8c5a3a4e-2f0e-5a3c-9b1b-6f5d1c0e9a77")
    monkeypatch.setattr(cuda_accelerator, "pynvml", MagicMock())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 9))
    gpu = object.__new__(cuda_accelerator.CUDA_Accelerator)
    kind = cuda_accelerator.CUDA_Accelerator
    monkeypatch.setattr(kind, "available_memory", kind.available_memory)  # restored afterwards
    patches_of_deepspeed.count_free_gpu_memory()
    assert gpu.available_memory() == 5


def test_an_older_engine_converts_no_rotary_frequencies(monkeypatch):
    """It converts the whole module, as DeepSpeed 0.17.5 and 0.19.0 do."""
    from deepspeed.runtime.engine import DeepSpeedEngine as Engine

    model = torch.nn.Linear(2, 2)
    model.register_buffer("inv_freq", torch.tensor([1.0, 0.1234567]), persistent=False)
    frequencies = model.inv_freq.clone()
    name = "_configure_distributed_model"
    monkeypatch.setattr(Engine, name, lambda self, model: model.bfloat16())
    monkeypatch.delattr(Engine, "_cast_module_mixed_precision", raising=False)
    patches_of_deepspeed.keep_buffers_in_fp32()
    getattr(Engine, name)(None, model)
    assert model.weight.dtype == torch.bfloat16 and model.inv_freq.dtype == torch.float32
    assert torch.equal(model.inv_freq, frequencies)
    assert "inv_freq" not in model.state_dict()


@pytest.mark.parametrize("read", [True, False])
def test_offload_waits_once_for_the_norms_of_the_gradients(monkeypatch, read):
    """The norms that DeepSpeed reads are in one storage, to which they were copied together."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Optimizer

    found = []
    total, track = (
        "complete_grad_norm_calculation_for_cpu_offload",
        "update_offload_overflow_tracker",
    )
    track = track if hasattr(Optimizer, track) else "update_overflow_tracker_for_param_grad"
    monkeypatch.setattr(
        Optimizer, total, lambda self, _: found.extend(self.norm_for_param_grads.items())
    )
    monkeypatch.setattr(Optimizer, track, lambda self, gradient: found.append(gradient))
    patches_of_deepspeed.wait_once_for_offloaded_gradients()
    norms = {7: torch.tensor(3.0, dtype=torch.float64), 9: torch.tensor(0.1, dtype=torch.float64)}
    optimizer = SimpleNamespace(norm_for_param_grads=norms, check_grad_overflow=read)
    getattr(Optimizer, total)(optimizer, [])
    assert found == [*norms.items()] and optimizer.norm_for_param_grads is norms
    assert len({norm.untyped_storage().data_ptr() for _, norm in found}) == 1
    found.clear()
    getattr(Optimizer, track)(optimizer, "a gradient")
    assert found == (["a gradient"] if read else [])


def test_path_is_quoted_once(monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", "/my env/lib")
    patches.quote_library_path.cache_clear()
    patches.quote_library_path()
    patches.quote_library_path()
    assert shlex.split(cpp_extension.TORCH_LIB_PATH) == ["/my env/lib"]
    patches.quote_library_path.cache_clear()


def test_only_offload_and_infinity_need_ops():
    needed = {name: strategy.needed_ops() for name, strategy in STRATEGIES.items()}
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


@pytest.mark.parametrize("capable, limit", [(True, 1), (False, 2**20), (False, RLIM_INFINITY)])
def test_memory_may_be_locked(monkeypatch, capable, limit):
    status = f"CapEff:\t{capable << 14:016x}\n"
    monkeypatch.setattr(requirements.Path, "read_text", lambda path: status)
    monkeypatch.setattr(requirements.resource, "getrlimit", lambda _: (limit, limit))
    requirements.check_locked_memory(2**20)
    if not capable and limit != RLIM_INFINITY:
        with pytest.raises(MissingRequirement, match="ulimit -l unlimited"):
            requirements.check_locked_memory(2**21)
