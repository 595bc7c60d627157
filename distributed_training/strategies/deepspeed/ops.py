"""DeepSpeed's C++ ops: which ones a strategy needs, where they are, and how they are compiled.

Before DeepSpeed needs the first op, one rank of each node runs scripts/build_ops.py. DeepSpeed's
own JIT compiles in a folder there, and an op is moved when it is complete: a process that is killed
leaves neither a lock of torch, for which every later process would wait, nor an incomplete library.
The next process continues with the files that are compiled. The ranks only load the libraries.

The compiler reads fewer of torch's headers than DeepSpeed includes, and writes no debug
information, which takes less than half of the time.
"""

import contextlib
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
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from distributed_training import console, patches
from distributed_training.about import PROJECT
from distributed_training.errors import MissingRequirement, look_up
from distributed_training.files.atomic import write_text
from distributed_training.process import STOP_SIGNALS, prefer_own_ninja
from distributed_training.programs import run_program
from distributed_training.strategies.deepspeed.patches import compile_ops_with

CPU_INFO = Path("/proc/cpuinfo")
# The flags in it of instructions that a compiler uses with -march=native. The other
# flags also depend on the kernel's version.
X86_INSTRUCTIONS = re.compile(
    r"\b(?:abm|adx|apx|avx|bmi|cx16|f16c|fma|gfni|lahf|movbe|pni|popcnt|s?sse|tbm|xop)\w*"
)

# How long an op compiles on 2 cores.
USUAL_TIME = {"cpu_adam": "15 to 40 s", "pin_memory": "10 to 20 s", "async_io": "1 to 2 minutes"}
# Replaces <torch/extension.h> of torch, which most sources include. That one also has the modules,
# optimizers and data loaders of the C++ frontend, and a compiler needs a third of its time for
# them. DeepSpeed's ops use only tensors, and their conversion to Python objects.
EXTENSION_HEADER = """#pragma once
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
"""
# Cancels DeepSpeed's -g: debug information takes another third, and only a debugger reads it.
FLAGS = ["-g0"]


def needed_ops(offloads: bool, needs_nvme: bool) -> list[str]:
    """Return the names of DeepSpeed's C++ ops that a strategy needs.

    Args:
        offloads: it updates the optimizer states on the CPU.
        needs_nvme: it keeps states on NVMe.
    """
    ops = ["cpu_adam"] if offloads else []
    if needs_nvme:
        ops.append("async_io")
        if any(_deepspeed_files("ops/op_builder/pin_memory.py")):  # since DeepSpeed 0.19
            ops.append("pin_memory")
    return ops


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
    release = version("deepspeed") if _package("deepspeed") else "none"
    torch_folder = _package("torch")
    assert torch_folder is not None
    torch_version = (torch_folder / "version.py").read_bytes()  # also names CUDA's version
    libc = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else platform.platform()
    machine = [sys.implementation.cache_tag, platform.machine(), libc, *_cpu_features()]
    key = hashlib.sha256(torch_version + json.dumps(machine).encode())
    name = f"deepspeed-{release}-{key.hexdigest()[:12]}"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache) / name


def _cpu_features() -> list[str]:
    """Return the instruction sets of this CPU."""
    text = CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.exists() else ""
    line = re.search(r"^(flags|Features)\s*:(.*)$", text, re.MULTILINE)  # Features: on ARM
    if line is None:
        return [platform.processor()]
    return sorted(set(X86_INSTRUCTIONS.findall(line[2]) if line[1] == "flags" else line[2].split()))


def build(ops: list[str], print_line: Callable[[str], None], verbose: bool) -> None:
    """Compile the ops that are missing, or wait for the process that compiles them.

    Raises:
        MissingRequirement: an op cannot be compiled; the message has the compiler's first error.
    """
    print_line(f"⏳ Compiling {', '.join(ops)} of DeepSpeed: once for this kind of machine")
    # A process of its own: it loads the ops, and it compiles as on a machine without a GPU.
    script = str(PROJECT / "scripts" / "build_ops.py")
    command = [sys.executable, script, *ops, "--parent", str(os.getpid())]

    def show(line: str) -> None:
        if verbose or line.startswith(("⏳", "✅")):
            print_line(line)

    with console.timer("Compiling"):
        code, output = run_program(command, on_line=show)
    if code:
        lines = output.splitlines()
        failed = [line[1:].strip() for line in lines if line.startswith("❌")]
        raise MissingRequirement((failed or [f"{', '.join(ops)}: not compiled."])[0])


@functools.cache
def load(op: str):
    """Load the library of a compiled op; return its module."""
    spec = importlib.util.spec_from_file_location(op, library(op))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------- in the process that compiles ops


def build_ops(names: list[str]) -> bool:
    """Compile the ops that are missing, print a line for each op, and return whether all are ready.

    Call it in a process of its own: the ops are loaded here, and the environment is changed.
    """
    folder = ops_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for another process that compiles them
        except OSError:
            # A file system without locks: the last process replaces the libraries.
            building = folder / f".building-{platform.node()}-{os.getpid()}"
        else:
            building = folder / ".building"
        for op in filter(is_compiled, names):
            print(f"✅ {op}: already compiled")
        ready = _build([op for op in names if not is_compiled(op)], building)
        shutil.rmtree(building, ignore_errors=True)  # an interruption keeps it
    return ready


@contextlib.contextmanager
def compilers_end_at(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """End ninja and its compilers before the handler of a signal ends this process.

    torch would kill ninja only, and its compilers would run to their end.
    """
    import psutil

    def end(number: int, frame: FrameType | None) -> None:
        programs = psutil.Process().children()
        for program in programs:
            with contextlib.suppress(psutil.NoSuchProcess):
                program.terminate()  # ninja then ends its compilers, and removes what they wrote
        psutil.wait_procs(programs, timeout=5)
        handler = handlers[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    handlers = {number: signal.getsignal(number) for number in signals}
    handled = [number for number in signals if handlers[number] != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, handlers[number])


def end_with(parent: int) -> None:
    """Send SIGTERM to this process when its parent has ended, for example because it was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _build(missing: list[str], folder: Path) -> bool:
    """Compile ops one after the other in `folder`, and move those that succeeded."""
    os.environ.update(TORCH_EXTENSIONS_DIR=str(folder), DS_ACCELERATOR="cpu")
    for lock in folder.glob("*/lock"):  # torch's, of a process that was killed
        lock.unlink()
    prefer_own_ninja()
    patches.quote_library_path()
    compiled = []
    # async_io loads pin_memory, which therefore stays in the folder until both are compiled.
    for op in sorted(missing, key="async_io".__eq__):
        usual = USUAL_TIME.get(op, "a minute")
        print(f"⏳ {op}: compiling, usually {usual} on 2 cores", flush=True)
        started_at = time.monotonic()
        try:
            if op == "async_io":
                check_libaio()
            with console.timer(f"Compiling {op}"), compilers_end_at(STOP_SIGNALS):
                _compile(op, folder)
        except Exception as error:  # of the compiler: the caller reports it
            print(f"❌ {op}: {look_up(error) or error}", flush=True)
        else:
            compiled.append(op)
            if op != "pin_memory":
                os.replace(folder / op / f"{op}.so", library(op))
            print(f"✅ {op}: compiled in {time.monotonic() - started_at:.0f} s", flush=True)
    if "pin_memory" in compiled:
        os.replace(folder / "pin_memory" / "pin_memory.so", library("pin_memory"))
    return set(compiled) == set(missing)


def _compile(op: str, folder: Path) -> None:
    """Compile and load an op with few of torch's headers; if that fails, with all of them."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    header = folder / "include" / "torch" / "extension.h"
    if not header.exists():  # otherwise ninja would compile every file again
        header.parent.mkdir(parents=True, exist_ok=True)
        write_text(header, EXTENSION_HEADER)
    try:
        with compile_ops_with(str(folder / "include"), FLAGS):
            ALL_OPS[op].load(verbose=False)
    except (RuntimeError, ImportError):  # of the compiler, and of the load
        print(f"⏳ {op}: compiling again, with DeepSpeed's own command", flush=True)
        ALL_OPS[op].load(verbose=False)


def check_libaio() -> None:
    """Check for libaio, with which infinity reads and writes NVMe."""
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise MissingRequirement(
            "--strategy infinity needs libaio, which is missing here: apt install libaio-dev "
            "(without root: conda install libaio, "
            "then set CFLAGS and LDFLAGS to its include and lib folders)."
        )
