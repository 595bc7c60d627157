"""All patches of other libraries: one function each, called where the patch is needed.

A patch names the version in which the behavior was seen, why it is changed, and when the patch can
be removed. PATCHES lists what each patch replaces; a test looks up these names in the installed
libraries. Importing this module changes nothing and imports none of them.
"""

from __future__ import annotations

import functools
import shlex
import subprocess
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path


@functools.cache  # a second call changes nothing
def skip_packed_sequence_check() -> None:
    """transformers 5.23.0: skip the check for several packed sequences in one row of a batch.

    The check runs in every forward pass. It reads a tensor on the GPU, so the host waits for the
    GPU. A compiled model cannot run the check and passes a mask to attention instead, which
    disables FlashAttention. The positions of all sequences in our batches start at 0.

    Remove it when `find_packed_sequence_indices` no longer converts a tensor on the device to bool.
    """
    try:
        from transformers import masking_utils
    except ImportError:  # versions before 4.53 have no such check
        return
    masking_utils.find_packed_sequence_indices = lambda position_ids: None


@functools.cache
def wrap_sdpa(wrapper: Callable[[Callable], Callable]) -> None:
    """transformers 5.23.0: replace the function that calls PyTorch's attention by a wrapper of it.

    A model with an attention implementation of another name would also need masks of its own.

    Remove it when PyTorch has a kernel for attention with dropout on a CPU.

    Args:
        wrapper: called with transformers' function; returns one with the same parameters.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["sdpa"] = wrapper(ALL_ATTENTION_FUNCTIONS["sdpa"])


def limit_template_operators(operators: dict[str, Callable]) -> None:
    """Jinja 3.1.6: compute binary operators in chat templates with functions that have limits.

    One operation on huge numbers or texts cannot be interrupted. Jinja offers the interception to
    subclasses of its sandbox, and then also does not compute constants at compile time. It is set
    on the class because transformers (5.23.0, `_cached_compile_jinja_template`) creates the sandbox
    itself.

    Remove it when transformers accepts a sandbox, or limits what a template computes.

    Args:
        operators: for each operator, such as "**", a function of its two operands.
    """
    from jinja2.sandbox import SandboxedEnvironment

    SandboxedEnvironment.intercepted_binops = frozenset(operators)
    SandboxedEnvironment.default_binop_table = {
        **SandboxedEnvironment.default_binop_table,
        **operators,
    }


def override_collectives(kernels: dict[str, Callable]):
    """torch 2.13.0: run a function of ours before each collective of torch.distributed.

    torch has no public hook that also sees the collectives that DDP's reducer starts in C++. The
    Autograd key is above the CPU and CUDA kernels of these operators, so a function that
    redispatches below this key does not change the collective.

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
def cache_cpu_info() -> None:
    """py-cpuinfo 9.0.0: compute the description of the CPU once per process.

    DeepSpeed 0.19.8 asks for it twice for each op that it loads, and each call takes about a
    second.

    Remove it when `get_cpu_info` or DeepSpeed's op builder caches the result.
    """
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


@functools.cache
def quote_library_path() -> None:
    """torch 2.13.0: quote torch's library path in the commands that compile C++ ops.

    cpp_extension quotes its include paths but not this path, so a space in the path of the virtual
    environment makes the compilation fail.

    Remove it when `_prepare_ldflags` of torch.utils.cpp_extension quotes the path.
    """
    from torch.utils import cpp_extension

    cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)


def guard_compilations(lock: Callable[[str, Path], AbstractContextManager], run: Callable) -> None:
    """torch 2.13.0: compile C++ ops under a lock of ours, with commands that end with this process.

    torch's own lock is a file that a killed process leaves behind, for which every later process
    waits without a message. The compilers of a killed process continue and use about 1 GB each.
    DeepSpeed compiles an op with `cpp_extension.load` when it first needs it.

    Remove it when torch takes a lock that the kernel releases.

    Args:
        lock: called with the name and the build folder of an op; returns a context manager.
        run: called in place of subprocess.run.
    """
    from torch.utils import cpp_extension

    load = cpp_extension.load

    def locked_load(name, *args, build_directory=None, **options):
        folder = Path(build_directory or cpp_extension._get_build_directory(name, False))
        with lock(name, folder):
            return load(name, *args, build_directory=str(folder), **options)

    cpp_extension.load = locked_load
    cpp_extension.subprocess = types.SimpleNamespace(**{**vars(subprocess), "run": run})


# What each patch replaces, as "module:attribute".
PATCHES = {
    skip_packed_sequence_check: ("transformers.masking_utils:find_packed_sequence_indices",),
    wrap_sdpa: ("transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS",),
    limit_template_operators: (
        "jinja2.sandbox:SandboxedEnvironment.intercepted_binops",
        "jinja2.sandbox:SandboxedEnvironment.default_binop_table",
    ),
    override_collectives: ("torch:ops.c10d.allreduce_", "torch:library.Library.impl"),
    cache_cpu_info: ("cpuinfo:get_cpu_info",),
    quote_library_path: ("torch.utils.cpp_extension:TORCH_LIB_PATH",),
    guard_compilations: (
        "torch.utils.cpp_extension:load",
        "torch.utils.cpp_extension:_get_build_directory",
        "torch.utils.cpp_extension:subprocess.run",
    ),
}
