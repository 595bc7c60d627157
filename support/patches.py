"""All patches of other libraries: one function each, called where the patch is needed.

A patch names the version in which the behavior was seen, why it is changed, and when to remove it.
tests/unit/test_patches.py looks up the names that are replaced in the installed libraries.
"""

import contextlib
import functools
import importlib
import os
import shlex
from collections.abc import Callable, Iterator


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


@contextlib.contextmanager
def compile_ops_with(headers: str, flags: list[str]) -> Iterator[None]:
    """DeepSpeed 0.19.8: compile its ops with headers and compiler flags of ours.

    In this context, the compiler looks in our folder before it looks in torch's, and the flags
    follow DeepSpeed's. DeepSpeed's builders accept neither.

    Remove it when DeepSpeed's sources include only the headers of torch that they need.

    Args:
        headers: folder with the headers.
        flags: flags for the C++ compiler.
    """
    from torch.utils import cpp_extension

    load = cpp_extension.load

    def load_with(*args, extra_cflags, extra_include_paths, **settings):
        return load(
            *args,
            extra_cflags=[*extra_cflags, *flags],
            extra_include_paths=[headers, *extra_include_paths],
            **settings,
        )

    cpp_extension.load = load_with
    try:
        yield
    finally:
        cpp_extension.load = load
        # Otherwise torch adds "_v1" to the name of an op that is compiled again with other flags.
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.clear()


def load_compiled_ops(names: list[str], load: Callable) -> None:
    """DeepSpeed 0.19.8: load ops of ours; the others are compiled and loaded by DeepSpeed.

    DeepSpeed would run ninja on each rank. If a rank is killed meanwhile, torch leaves a lock
    behind, for which every later process waits without a message.

    Remove it when DeepSpeed loads a compiled op without a compiler.

    Args:
        load: returns the module of the op with the given name.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    compile_and_load = OpBuilder.jit_load

    def jit_load(self, verbose=True):
        return load(self.name) if self.name in names else compile_and_load(self, verbose)

    OpBuilder.jit_load = jit_load


def skip_shared_memory_op() -> None:
    """DeepSpeed 0.19.8: do not compile and load the op deepspeed_shm_comm on a CPU.

    Only tensor-parallel inference uses it. It takes 20 s to compile, and 69 MB of /dev/shm for
    each rank under DeepSpeed's launcher, which are not released.

    Remove it when DeepSpeed loads the op at its first use.
    """
    backend = importlib.import_module("deepspeed.comm.torch")  # the package's `torch` is PyTorch
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]


def import_muon_uncompiled() -> None:
    """DeepSpeed 0.19.8: import its optimizer Muon without torch's compiler.

    Every engine imports it to compare types. It has functions under `torch.compile`, which imports
    the whole compiler: 0.8 s on each rank. No strategy uses Muon.

    Remove it when `is_zero_supported_optimizer` of DeepSpeed does not import Muon.
    """
    variable = "TORCHDYNAMO_DISABLE"  # torch.compile reads it each time, and then changes nothing
    previous = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    except ModuleNotFoundError:  # earlier versions have no Muon
        pass
    finally:
        del os.environ[variable]
        if previous is not None:
            os.environ[variable] = previous


def count_free_gpu_memory() -> None:
    """DeepSpeed 0.19.8: ask CUDA, and not NVML, for the free memory of a GPU.

    If nvidia-ml-py is installed, DeepSpeed looks up the GPU by an index that it reads from
    CUDA_VISIBLE_DEVICES, and stages 1 and 2 fail where that has the UUID of a GPU or MIG device.

    Remove it when `available_memory` of DeepSpeed's CUDA_Accelerator accepts UUIDs.
    """
    import torch
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    def available_memory(self, device_index=None):
        return torch.cuda.mem_get_info(device_index)[0]

    CUDA_Accelerator.available_memory = available_memory


def wait_once_for_offloaded_gradients() -> None:
    """DeepSpeed 0.19.8: offload waits for the GPU once, and not twice for each gradient.

    It reads the norm of each gradient with `.item()`; here all are copied to the host at once. And
    in each backward pass it reads whether a gradient is finite, which only a step with
    `check_grad_overflow` uses.

    Remove it when `complete_grad_norm_calculation_for_cpu_offload` and
    `update_offload_overflow_tracker` of stages 1 and 2 no longer wait for each gradient.
    """
    import torch
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    complete = DeepSpeedZeroOptimizer.complete_grad_norm_calculation_for_cpu_offload
    name = "update_offload_overflow_tracker"
    if not hasattr(DeepSpeedZeroOptimizer, name):
        name = "update_overflow_tracker_for_param_grad"  # in 0.17.0
    track = getattr(DeepSpeedZeroOptimizer, name)

    def complete_with_copies(self, params):
        on_device = self.norm_for_param_grads
        if on_device:
            copies = torch.stack([*on_device.values()]).cpu()
            self.norm_for_param_grads = dict(zip(on_device, copies, strict=True))
        try:
            return complete(self, params)
        finally:
            self.norm_for_param_grads = on_device

    def track_if_read(self, gradient):
        if self.check_grad_overflow:
            track(self, gradient)

    DeepSpeedZeroOptimizer.complete_grad_norm_calculation_for_cpu_offload = complete_with_copies
    setattr(DeepSpeedZeroOptimizer, name, track_if_read)


def keep_4bit_layout() -> None:
    """bitsandbytes 0.50.2: keep 4-bit weights as they are in an evaluation on a CPU.

    With bf16 instructions the first evaluation replaces the weights by a layout for inference,
    which neither the training that follows nor a checkpoint can read.

    Remove it when a layer restores the layout before it trains.
    """
    modules = importlib.import_module("bitsandbytes.nn.modules")
    modules.has_avx512bf16 = lambda: False  # type: ignore[attr-defined]
