"""Patches of torch, transformers and bitsandbytes: one function each, called where it is needed.

Those of an engine are in its folder (strategies/deepspeed/patches.py).

A patch names the version in which the behavior was seen, why it is changed, and when to remove it.
tests/unit/test_patches.py looks up the names that are replaced in the installed libraries.
"""

import contextlib
import functools
import importlib
import shlex
from collections.abc import Callable


def replace_packed_sequence_check(isolate: bool) -> None:
    """transformers 5.23.0: replace the check for several packed sequences in one row of a batch.

    In each forward pass it reads a tensor on the GPU, so the host waits. Here the flags say whether
    positions restart.

    Remove it when `find_packed_sequence_indices` no longer converts a tensor on the device to bool.

    Args:
        isolate: the positions restart at 0 where a document begins.
    """
    try:
        from transformers import masking_utils
    except ImportError:  # versions before 4.53 have no such check
        return

    def document_numbers(position_ids):
        return (position_ids == 0).cumsum(-1) if isolate else None

    masking_utils.find_packed_sequence_indices = document_numbers


def skip_padding_check() -> None:
    """transformers 5.23.0: do not check in each forward pass whether the inputs contain padding.

    It reads token ids, so the host waits for the GPU. Our padding is at the end, where causal
    attention needs no mask.

    Remove it when `warn_if_padding_and_no_attention_mask` no longer reads a tensor on the device.
    """
    from transformers import PreTrainedModel

    PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda self, *_: None


def repeat_keys_and_values() -> None:
    """transformers 5.23.0: repeat K and V for grouped-query attention before SDPA.

    Otherwise `enable_gqa=True` is passed whenever there is no mask. Where FlashAttention and cuDNN
    cannot run (see `units.shares_keys`), PyTorch then computes attention with its math kernel,
    which stores batch size × heads × length² scores in each layer.

    Remove it when PyTorch's memory-efficient kernel supports enable_gqa.
    """
    from transformers.integrations import sdpa_attention

    # Versions before 4.54 always repeat, and have no such function.
    sdpa_attention.use_gqa_in_sdpa = lambda *_: False


def without_initialization() -> contextlib.AbstractContextManager[None]:
    """torch 2.13.0: build models without initial weights, because fake tensors have no values.

    Remove it when `torch.nn.init.trunc_normal_`, for a vision part, no longer reads some.
    """
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # versions before 5
        from transformers.modeling_utils import no_init_weights
    return no_init_weights()


def override_collectives(kernels: dict[str, Callable]):
    """torch 2.13.0: run a function of ours before each collective of torch.distributed.

    No public hook sees the collectives that DDP's reducer starts in C++. A function that
    redispatches below the Autograd key does not change the collective.

    Remove it when torch.distributed reports the collectives of all its users.

    Args:
        kernels: for each operator of `torch.ops.c10d`, such as "allreduce_", a function
            (keyset, *arguments of the operator).
    Returns:
        The torch.library.Library; the functions are called as long as it exists.
    """
    import torch

    library = torch.library.Library("c10d", "IMPL")
    for operator, kernel in kernels.items():
        library.impl(operator, kernel, "Autograd", with_keyset=True)
    return library


@functools.cache
def quote_library_path() -> None:
    """torch 2.13.0: quote torch's library path in the commands that compile C++ ops.

    Without it a space in the path of the virtual environment makes the compilation fail.

    Remove it when `_prepare_ldflags` of torch.utils.cpp_extension quotes the path.
    """
    from torch.utils import cpp_extension

    cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)


def keep_4bit_layout() -> None:
    """bitsandbytes 0.50.2: keep 4-bit weights as they are in an evaluation on a CPU.

    With bf16 instructions the first evaluation replaces the weights by a layout for inference,
    which neither the training that follows nor a checkpoint can read.

    Remove it when a layer restores the layout before it trains.
    """
    modules = importlib.import_module("bitsandbytes.nn.modules")
    modules.has_avx512bf16 = lambda: False  # type: ignore[attr-defined]
