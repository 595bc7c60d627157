"""DeepSpeed's C++ ops: which ones a strategy needs, where they are, and how a run gets them.

A run starts scripts/build_ops.py as soon as its arguments are read, and waits for it where
DeepSpeed needs the first op. The ranks only load the compiled libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ExtensionFileLoader
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from support import PROJECT
from support.errors import MissingRequirement
from support.strategy import Strategy

CPU_INFO = Path("/proc/cpuinfo")
# The flags in it of instructions that a compiler uses with -march=native. The other
# flags also depend on the kernel's version.
X86_INSTRUCTIONS = re.compile(
    r"\b(?:abm|adx|apx|avx|bmi|cx16|f16c|fma|gfni|lahf|movbe|pni|popcnt|s?sse|tbm|xop)\w*"
)


# ----------------------------------------------------------------------------- which ops, and where


def needed_ops(strategy: Strategy) -> list[str]:
    """Return the names of DeepSpeed's C++ ops that this strategy needs."""
    ops = ["cpu_adam"] if strategy.offloads and strategy.uses_deepspeed else []
    if strategy.uses_nvme:
        # Since DeepSpeed 0.19 async_io uses an op pin_memory.
        has_pin_memory = any(_deepspeed_files("ops/op_builder/pin_memory.py"))
        ops += ["async_io", "pin_memory"] if has_pin_memory else ["async_io"]
    return ops


def missing_ops(strategy: Strategy) -> list[str]:
    """Return the ops of `needed_ops` that are not compiled yet for this machine."""
    return [op for op in needed_ops(strategy) if not is_compiled(op)]


def is_compiled(op: str) -> bool:
    """Return whether an op can be loaded: compiled here, or installed with DeepSpeed."""
    return library(op).exists() or any(_deepspeed_files(f"ops/*/{op}_op*.so"))


def library(op: str) -> Path:
    """Return the path of an op's library, which may not exist yet."""
    return ops_folder() / f"{op}.so"


def _deepspeed_files(pattern: str) -> Iterable[Path]:
    """Return the files of the installed DeepSpeed that match a pattern."""
    folder = _package("deepspeed")
    return folder.glob(pattern) if folder else ()


def _package(name: str) -> Path | None:
    """Return the folder of an installed package, which is not imported."""
    package = importlib.util.find_spec(name)
    return Path(package.origin).parent if package and package.origin else None


@functools.cache
def ops_folder() -> Path:
    """Return the folder of the ops for these versions and this CPU, in torch's folder.

    DeepSpeed compiles for the CPU of the machine (-march=native), and torch would load such an op
    on every machine that shares the home directory: on an older CPU it would crash (SIGILL).
    Environments with the same versions use the same ops, wherever they are installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    deepspeed_version, torch_version = "none", b""
    with contextlib.suppress(PackageNotFoundError):
        deepspeed_version = version("deepspeed")
    if torch_folder := _package("torch"):
        torch_version = (torch_folder / "version.py").read_bytes()  # also names CUDA's version
    libc = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else platform.platform()
    machine = [sys.implementation.cache_tag, platform.machine(), libc, *_cpu_features()]
    key = hashlib.sha256(torch_version + json.dumps(machine).encode())
    name = f"deepspeed-{deepspeed_version}-{key.hexdigest()[:12]}"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache) / name


def _cpu_features() -> list[str]:
    """Return the instruction sets of this CPU."""
    with contextlib.suppress(OSError):
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            name, _, values = line.partition(":")
            if name.strip() == "flags":
                return sorted(set(X86_INSTRUCTIONS.findall(values)))
            if name.strip() in ("Features", "cpu", "isa"):  # ARM, POWER, RISC-V
                return sorted(values.split())
    return [platform.processor()]


# ---------------------------------------------------------------------------------------- in a run


def start_builder(ops: list[str], verbose: bool = False, output: int = subprocess.DEVNULL):
    """Start to compile the ops in a process that ends with this one; return its Popen object.

    If another process compiles them, the new one waits for it.
    """
    script = str(PROJECT / "scripts" / "build_ops.py")
    return subprocess.Popen(
        [sys.executable, script, *ops, *(["--verbose"] if verbose else [])],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL if output == subprocess.DEVNULL else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # the terminal's Ctrl-C is for this process
        preexec_fn=end_with_parent,
    )


def build(ops: list[str], print_line: Callable[[str], None], verbose: bool) -> None:
    """Compile the ops that are missing, or wait for the process that compiles them.

    Raises:
        MissingRequirement: an op cannot be compiled; the message has the compiler's first error.
    """
    failed = []
    with start_builder(ops, verbose, subprocess.PIPE) as process:
        try:
            for line in process.stdout:
                if line.startswith("❌"):  # the caller prints the exception
                    failed.append(line[1:].strip())
                else:
                    print_line(line.rstrip())
        except BaseException:  # a signal
            process.terminate()
            raise
    if process.returncode:
        raise MissingRequirement(failed[0] if failed else f"{', '.join(ops)}: not compiled.")


@functools.cache
def load(op: str):
    """Load the library of a compiled op; return its module."""
    loader = ExtensionFileLoader(op, str(library(op)))
    # This spec sets the module's __file__, which DeepSpeed reads.
    spec = importlib.util.spec_from_file_location(op, loader.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def end_with_parent() -> None:
    """In a new process: let the kernel send it SIGTERM when its parent ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
