"""What support/patches.py replaces exists in the installed libraries."""

import inspect
import pkgutil
import shlex

import pytest
import transformers
from conftest import skip
from packaging.version import Version

from support import patches
from support.model.isolation import OLDEST_TRANSFORMERS

# What each patch replaces, as "module:attribute".
PATCHES = {
    "replace_packed_sequence_check": "transformers.masking_utils:find_packed_sequence_indices",
    "skip_padding_check": "transformers:PreTrainedModel.warn_if_padding_and_no_attention_mask",
    "override_collectives": "torch:ops.c10d.allreduce_",
    "quote_library_path": "torch.utils.cpp_extension:TORCH_LIB_PATH",
    "load_compiled_ops": "deepspeed.ops.op_builder.builder:OpBuilder.jit_load",
    "skip_shared_memory_op": "deepspeed.comm.torch:build_shm_op",
    "keep_4bit_layout": "bitsandbytes.nn.modules:has_avx512bf16",
}


@pytest.mark.parametrize("target", PATCHES.values(), ids=PATCHES)
def test_target_exists(target):
    if "masking_utils" in target and Version(transformers.__version__) < OLDEST_TRANSFORMERS:
        skip(f"transformers {transformers.__version__} has no {target}")
    if "bitsandbytes" in target:
        pytest.importorskip("bitsandbytes")  # optional
    pkgutil.resolve_name(target)


def test_every_patch_is_listed_and_says_when_to_remove_it():
    functions = {
        name: inspect.getdoc(value)
        for name, value in vars(patches).items()
        if getattr(value, "__module__", "") == patches.__name__
    }
    assert set(functions) == set(PATCHES)
    assert all("Remove it when" in text for text in functions.values())


def test_path_is_quoted_once(monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", "/my env/lib")
    patches.quote_library_path.cache_clear()
    patches.quote_library_path()
    patches.quote_library_path()
    assert shlex.split(cpp_extension.TORCH_LIB_PATH) == ["/my env/lib"]
    patches.quote_library_path.cache_clear()
