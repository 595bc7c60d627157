"""DeepSpeed's C++ ops: which ones a strategy needs, where they are, and how they are compiled.

Before DeepSpeed needs the first op, one rank of each node runs scripts/build_ops.py. DeepSpeed's
own JIT compiles in a temporary folder, and an op is moved when it is complete: a process that is
killed leaves neither a lock of torch, for which every later process would wait, nor an incomplete
library. The ranks only load the libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from support import PROJECT, patches
from support.cluster import tuning
from support.errors import MissingRequirement, look_up
from support.tables import Strategy

CPU_INFO = Path("/proc/cpuinfo")
# The flags in it of instructions that a compiler uses with -march=native. The other
# flags also depend on the kernel's version.
X86_INSTRUCTIONS = re.compile(
    r"\b(?:abm|adx|apx|avx|bmi|cx16|f16c|fma|gfni|lahf|movbe|pni|popcnt|s?sse|tbm|xop)\w*"
)
Print = Callable[[str], None]


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

    DeepSpeed compiles for the CPU of the machine (-march=native): on an older one that shares the
    home directory, such an op would crash (SIGILL).
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
    for line in CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else ():
        name, _, values = line.partition(":")
        if name.strip() == "flags":
            return sorted(set(X86_INSTRUCTIONS.findall(values)))
        if name.strip() == "Features":  # ARM
            return sorted(values.split())
    return [platform.processor()]


# ---------------------------------------------------------------------------------------- in a run


def build(ops: list[str], print_line: Print, verbose: bool) -> None:
    """Compile the ops that are missing, or wait for the process that compiles them.

    Raises:
        MissingRequirement: an op cannot be compiled; the message has the compiler's first error.
    """
    script, failed = str(PROJECT / "scripts" / "build_ops.py"), []
    with subprocess.Popen(
        [sys.executable, script, *ops, *(["--verbose"] if verbose else [])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # the terminal's Ctrl-C is for this process, which ends that one
        preexec_fn=end_with_parent,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("❌"):  # the caller prints the exception
                    failed.append(line[1:].strip())
                elif verbose or line.startswith(("✅", "⏳")):  # not what libraries print
                    print_line(line.rstrip())
        except BaseException:  # a signal
            process.terminate()
            raise
    if process.returncode:
        raise MissingRequirement(failed[0] if failed else f"{', '.join(ops)}: not compiled.")


def end_with_parent() -> None:
    """In a new process: let the kernel send it SIGTERM when its parent ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@functools.cache
def load(op: str):
    """Load the library of a compiled op; return its module."""
    spec = importlib.util.spec_from_file_location(op, library(op))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------- in a process that compiles ops


def build_ops(names: list[str], print_line: Print, verbose: bool = False) -> bool:
    """Compile the ops that are missing, print a line for each op, and return whether all are ready.

    Call it in a process of its own: the ops are loaded here, and the environment is changed.
    """
    folder = ops_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_line("⏳ Another process is compiling DeepSpeed's ops: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: the last process replaces the libraries
            pass
        missing = [op for op in names if not is_compiled(op)]
        for op in names:
            if op not in missing:
                print_line(f"✅ {op}: already compiled")
        if not missing:
            return True
        for left_over in folder.glob(".building-*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as temporary:
            print_line(f"⏳ Compiling {', '.join(missing)}: once for this kind of machine")
            return _build(missing, Path(temporary), print_line, verbose)


def _build(missing: list[str], folder: Path, print_line: Print, verbose: bool) -> bool:
    """Compile ops one after the other in `folder`, and move those that succeeded."""
    os.environ.update(TORCH_EXTENSIONS_DIR=str(folder), DS_ACCELERATOR="cpu")
    tuning.prefer_own_ninja()
    patches.quote_library_path()
    compiled = []
    # async_io loads pin_memory, which must therefore stay in the folder until both are compiled.
    for op in missing:
        started_at = time.monotonic()
        try:
            if op == "async_io":
                check_libaio()
            from deepspeed.ops.op_builder.all_ops import ALL_OPS

            ALL_OPS[op].load(verbose)
        except Exception as error:  # of the compiler: the caller reports it
            if verbose:
                traceback.print_exc()
            print_line(f"❌ {op}: {look_up(error) or error}")
        else:
            compiled.append(op)
            print_line(f"✅ {op}: compiled in {time.monotonic() - started_at:.0f} s")
    for op in compiled:
        os.replace(folder / op / f"{op}.so", library(op))
    return compiled == missing


def check_libaio() -> None:
    """Check for libaio, with which infinity reads and writes NVMe."""
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise MissingRequirement(
            "--strategy infinity needs libaio, which is missing here: apt install libaio-dev "
            "(without root: conda install libaio, "
            "then set CFLAGS and LDFLAGS to its include and lib folders)."
        )
