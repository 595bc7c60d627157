"""Patches of DeepSpeed: one function each, see distributed_training/patches.py."""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator


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
    the whole compiler: 0.7 s of CPU time on each rank. `--optim muon` does not use it.

    Remove it when `is_zero_supported_optimizer` of DeepSpeed does not import Muon.
    """
    variable = "TORCHDYNAMO_DISABLE"  # torch.compile reads it each time, and then changes nothing
    previous = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("deepspeed"):
            raise  # otherwise an earlier version, which has no Muon
    finally:
        del os.environ[variable]
        if previous is not None:
            os.environ[variable] = previous


def reduce_gradients_of_blocks() -> None:
    """DeepSpeed 0.19.8: reduce the gradients of a block as those of other modules, one by one.

    It would reduce all in one backward hook of the block, and take a gradient that is not there yet
    as zero. This fails or is wrong for blocks that return a list, and with adapters if the
    embeddings are frozen: the hook then comes before the gradients.

    Remove it when `create_reduce_and_remove_grad_hooks` of stage 3 waits for the gradients.
    """
    from deepspeed.runtime.zero import stage3

    stage3.z3_leaf_parameter = lambda parameter: False


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


def keep_buffers_in_fp32() -> None:
    """DeepSpeed 0.17 to 0.19.0: convert the parameters to bf16 or fp16, and not the buffers.

    It converts the whole module. Rotary frequencies in bf16 have three digits, so that the angles
    of late positions are wrong; dp, fsdp and later releases compute them in fp32.

    Remove it when the oldest supported release has `_cast_module_mixed_precision`.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    if hasattr(DeepSpeedEngine, "_cast_module_mixed_precision"):
        return
    configure = DeepSpeedEngine._configure_distributed_model

    def configure_with_buffers(self, model):
        kept = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        configure(self, model)
        for module, name, buffer in kept:
            module._buffers[name] = buffer.to(module._buffers[name].device)

    DeepSpeedEngine._configure_distributed_model = configure_with_buffers


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
