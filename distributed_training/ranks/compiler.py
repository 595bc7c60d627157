"""torch.compile: what it needs of the machine, and its settings."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from distributed_training.errors import MissingRequirement


def check_compile(device: str, flag: str) -> None:
    """Check for what torch.compile needs: a compiler, Python's headers, and on a GPU triton.

    On a GPU triton compiles the launchers of its kernels in C (triton/runtime/build.py), on a CPU
    Inductor compiles kernels in C++ (torch/_inductor/cpp_builder.py).

    Args:
        device: "cuda" or "cpu".
        flag: of the user, which the message names: "--compile" or "--compile_loss".
    Raises:
        MissingRequirement: one of them is missing.
    """
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if device == "cuda":
        language, variable, compilers = "C", "CC", ["gcc", "clang"]
    else:
        language, variable, compilers = "C++", "CXX", ["g++"]
    if variable in os.environ:
        compilers = [os.environ[variable]]
    problem = ""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        problem = "the package triton is not installed: pip install triton"
    elif not any(map(shutil.which, compilers)):
        problem = f"there is no {language} compiler ({' or '.join(compilers)}): "
        problem += f"apt install build-essential, module load gcc on a cluster, or set {variable}"
    elif not header.exists():
        problem = f"{header} is missing: apt install python3-dev, or use conda's or uv's Python"
    if problem:
        raise MissingRequirement(f"{flag}: {problem}; or leave it out.")


def configure_compiler(device: torch.device, gathers_single_layers: bool) -> None:
    """Set what torch.compile does with the graphs of the blocks and of the output layer.

    Args:
        gathers_single_layers: of the strategy, which has other hooks at each layer; False if no
            block is compiled.
    """
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    # Under DDP the graph of a block would be split, to reduce its gradients earlier.
    dynamo.optimize_ddp = False
    # Blocks that differ in a number, compute with and without gradients, or get another length (see
    # COMPILED_LENGTHS) need a graph each. With other hooks at each layer (infinity, or an own file
    # of stage 3) the default of 8 stays, and micro-batches have one length.
    if not gathers_single_layers:
        dynamo.cache_size_limit = 512  # recompile_limit since torch 2.6
        dynamo.accumulated_cache_size_limit = 1024
        # As dynamic=False: otherwise the second length or number of rows compiles kernels for
        # any, which are slower.
        dynamo.automatic_dynamic_shapes = False
    if device.type == "cpu":
        inductor.fallback_random = True  # dropout drops the same elements as without --compile
        inductor.disable_padding_cpu = False  # aligned rows, as with ALIGNMENT in loss.py
