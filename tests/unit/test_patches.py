"""What support/patches.py replaces exists in the installed libraries, and is replaced on call only."""

import inspect
import pkgutil
import shlex
import subprocess
import sys

import pytest
import transformers
from conftest import PROJECT, skip
from packaging.version import Version

from support import patches
from support.model.isolation import OLDEST_TRANSFORMERS

# What each patch replaces, as "module:attribute".
PATCHES = {
    patches.replace_packed_sequence_check: (
        "transformers.masking_utils:find_packed_sequence_indices",
    ),
    patches.skip_padding_check: (
        "transformers:PreTrainedModel.warn_if_padding_and_no_attention_mask",
    ),
    patches.override_collectives: ("torch:ops.c10d.allreduce_", "torch:library.Library.impl"),
    patches.quote_library_path: ("torch.utils.cpp_extension:TORCH_LIB_PATH",),
    patches.load_compiled_ops: ("deepspeed.ops.op_builder.builder:OpBuilder.jit_load",),
    patches.skip_shared_memory_op: ("deepspeed.comm.torch:build_shm_op",),
    patches.keep_4bit_layout: ("bitsandbytes.nn.modules:has_avx512bf16",),
}
TARGETS = [pytest.param(target, id=target) for targets in PATCHES.values() for target in targets]


@pytest.mark.parametrize("target", TARGETS)
def test_target_exists(target):
    if "masking_utils" in target and Version(transformers.__version__) < OLDEST_TRANSFORMERS:
        skip(f"transformers {transformers.__version__} has no {target}")
    if "bitsandbytes" in target:
        pytest.importorskip("bitsandbytes")  # optional
    pkgutil.resolve_name(target)


def test_every_patch_is_listed_and_says_when_to_remove_it():
    functions = [
        value
        for name, value in vars(patches).items()
        if getattr(value, "__module__", "") == patches.__name__ and not name.startswith("_")
    ]
    assert set(functions) == set(PATCHES)
    for function in functions:
        assert "Remove it when" in inspect.getdoc(function), function


def test_import_imports_no_library():
    program = "import sys, support.patches; print([*sys.modules])"
    modules = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout
    assert not [
        name for name in ("torch", "jinja2", "transformers", "cpuinfo") if repr(name) in modules
    ]


def test_path_is_quoted_once(monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", "/my env/lib")
    patches.quote_library_path.cache_clear()
    patches.quote_library_path()
    patches.quote_library_path()
    assert shlex.split(cpp_extension.TORCH_LIB_PATH) == ["/my env/lib"]
    patches.quote_library_path.cache_clear()
