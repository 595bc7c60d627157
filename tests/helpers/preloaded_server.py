"""Imports the heavy libraries and forks a child for every start; see preloaded.py."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import marshal
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import preloaded_client

# What support/cluster/launch.py and the script set before they import the libraries.
SET_BY_THE_PROGRAM = {
    "DATASETS_VERBOSITY": "error",
    "DS_ACCELERATOR": "cpu",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "KINETO_LOG_LEVEL": "99",
    "TOKENIZERS_PARALLELISM": "true",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
# Read at run time, or only a level of logging. PATH: the program prepends a folder that holds the
# same ninja.
MAY_DIFFER = {
    os.fsdecode(name) for name in preloaded_client.RUN_TIME if not name.startswith(b"HF_")
} | {
    "CUBLAS_WORKSPACE_CONFIG",
    "DS_ACCELERATOR",
    "KINETO_LOG_LEVEL",
    "PATH",
    "TOKENIZERS_PARALLELISM",
    "TORCH_CPP_LOG_LEVEL",
}
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch.profiler",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "tokenizers",
    "safetensors.torch",
    "transformers",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "psutil",
    "torch._inductor.compile_fx",
    "torch._dynamo.repro.after_dynamo",
    "networkx",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.ops.adam",
]
# Written in Python, without state outside of it: imported again if the program sets other HF_*
# variables.
READ_HF = ("huggingface_hub", "transformers", "peft", "accelerate", "datasets")
START_FOR_REAL = 99  # exit code where the environment at the first import is not the server's


# --------------------------------------------------------------------------------------- the server


class Server:
    """Forks a child for every request and reports its exit code to the client."""

    def __init__(self, path: str):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{path}.new")
        self.listener.listen(64)
        os.rename(f"{path}.new", path)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, self.fork)
        self.selector.register(0, selectors.EVENT_READ)
        self.clients: dict[int, socket.socket] = {}  # by the pidfd of the child

    def serve(self) -> dict | None:
        """Return the request in a child, and None in the server once its stdin is closed."""
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    self.end()
                    return None
                request = key.data()
                if request is not None:
                    return request

    def fork(self) -> dict | None:
        """Accept a request and fork; returns the request in the child."""
        client, _ = self.listener.accept()
        length, descriptors, _, _ = socket.recv_fds(client, 8, 3)
        if len(length) < 8:
            client.close()
            return None
        with client.makefile("rb") as file:
            request = marshal.loads(file.read(int.from_bytes(length, "little")))
        pid = os.fork()
        if pid == 0:
            self.selector.close()
            for connection in (self.listener, client, *self.clients.values()):
                connection.close()
            for child in self.clients:
                os.close(child)
            return request | {"descriptors": descriptors}
        for number in descriptors:
            os.close(number)
        child = os.pidfd_open(pid)
        self.clients[child] = client
        self.selector.register(child, selectors.EVENT_READ, lambda: self.report_end(pid, child))
        self.selector.register(client, selectors.EVENT_READ, lambda: self.forward_signals(child))
        return None

    def report_end(self, pid: int, child: int) -> None:
        """Tell the client the exit code, negative for a signal."""
        _, status = os.waitpid(pid, 0)
        client = self.clients.pop(child)
        self.selector.unregister(child)
        os.close(child)
        if client in self.selector.get_map():
            self.selector.unregister(client)
        with contextlib.suppress(OSError):  # the client was killed
            client.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
        client.close()

    def forward_signals(self, child: int) -> None:
        """Each byte from the client is the number of a signal; the client's end kills the child."""
        try:
            numbers = self.clients[child].recv(64)
        except ConnectionError:
            numbers = b""
        if not numbers:
            self.selector.unregister(self.clients[child])
        for number in numbers or [signal.SIGKILL]:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                signal.pidfd_send_signal(child, number)

    def end(self) -> None:
        """Kill all children."""
        for child in self.clients:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)


# ------------------------------------------------------------------------------------------ imports


class _CurrentStream:
    """sys.stdout or sys.stderr for a module that keeps the stream of its import."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute):
        return getattr(getattr(sys, self._name), attribute)


def preload() -> _Importer:
    """Import the libraries as a run does, and take them out of sys.modules."""
    before, environment, path = set(sys.modules), dict(os.environ), list(sys.path)
    os.environ.update(SET_BY_THE_PROGRAM)
    values, streams = dict(os.environ), (sys.stdout, sys.stderr)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's import would start a thread for each core
    sys.stdout, sys.stderr = _CurrentStream("__stdout__"), _CurrentStream("__stderr__")
    with _recorded_atexit() as at_exit:
        for name in PRELOAD:
            # Older releases lack some. A program that needs a missing module reports it itself.
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
    (sys.stdout, sys.stderr), sys.path[:] = streams, path
    os.environ.clear()
    os.environ.update(environment)
    packages: dict[str, dict] = {}
    for name in set(sys.modules) - before:
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names:
            packages.setdefault(package, {})[name] = sys.modules.pop(name)
    return _Importer(packages, values, at_exit)


@contextlib.contextmanager
def _recorded_atexit() -> Iterator[dict[str, list[tuple]]]:
    """Collect what packages outside of the standard library register with atexit, by package."""
    at_exit: dict[str, list[tuple]] = {}
    register_now = atexit.register

    def register(function, *arguments, **options):
        package = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        if package in sys.stdlib_module_names:
            return register_now(function, *arguments, **options)
        at_exit.setdefault(package, []).append((function, arguments, options))
        return function

    atexit.register = register
    try:
        yield at_exit
    finally:
        atexit.register = register_now


class _Importer:
    """Finds a preloaded package with all its preloaded modules when a program imports it.

    Attributes:
        packages: modules by the package and by their names.
        values: the environment in which they were imported.
        at_exit: what the packages have registered with atexit.
    """

    def __init__(
        self,
        packages: dict[str, dict[str, types.ModuleType]],
        values: dict[str, str],
        at_exit: dict[str, list[tuple]],
    ):
        self.packages, self.values, self.at_exit = packages, values, at_exit

    def find_spec(self, name: str, _path=None, _target=None) -> ModuleSpec | None:
        """Called by `import`, once for each package, and by importlib.util.find_spec."""
        if name in self.packages:
            self._compare_environment(name)
        if name not in self.packages:
            return None
        found = self.packages[name][name].__spec__
        spec = ModuleSpec(name, _Loader(self, name), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def _compare_environment(self, package: str) -> None:
        """Are the values of the variables those that the libraries have read?"""
        names = {
            n
            for n in {*os.environ, *self.values} - MAY_DIFFER
            if os.environ.get(n) != self.values.get(n)
        }
        names = {name for name in names if not name.startswith("TORCHELASTIC_")}  # torchrun's
        others = {
            name for name in names if not name.startswith(("HF_", "TRANSFORMERS_", "DATASETS_"))
        }
        if others:
            line = f"preloaded_server.py: start this with real=True, because of {others}\n"
            os.write(2, line.encode())
            os._exit(START_FOR_REAL)
        for reader in READ_HF if names and package in READ_HF else ():
            self.packages.pop(reader, None)


class _Loader:
    """Loads a preloaded package; registers with atexit what the package has registered."""

    def __init__(self, importer: _Importer, name: str):
        self.importer, self.name = importer, name
        self.spec = importer.packages[name][name].__spec__

    def create_module(self, _spec) -> types.ModuleType:
        """The package itself, which importlib now puts into sys.modules."""
        return self.importer.packages[self.name][self.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Put the package's modules into sys.modules."""
        module.__spec__ = self.spec  # importlib has replaced it
        sys.modules.update(self.importer.packages.pop(self.name))
        for function, arguments, options in self.importer.at_exit.get(self.name, []):
            atexit.register(function, *arguments, **options)
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if self.name == "torch" and threads.isdigit() and int(threads) != module.get_num_threads():
            module.set_num_threads(int(threads))


# ---------------------------------------------------------------------------------------- the child


def take_over(request: dict) -> None:
    """Become the process that asked: session, streams, folder, environment, signals, arguments."""
    os.setsid()
    given = dict(zip(request["open"], request["descriptors"], strict=True))
    for number in (0, 1, 2):
        if number in given:
            os.dup2(given[number], number)
            os.close(given[number])
        else:
            os.close(number)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environb.update(request["environment"])
    tempfile.tempdir = None
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for number in signal.valid_signals() - set(request["ignored"]):
        if signal.getsignal(number) == signal.SIG_IGN:  # the tests run under nohup
            signal.signal(number, signal.SIG_DFL)
    _show_arguments(request["arguments"])
    _open_streams(request["unbuffered"])


def _show_arguments(arguments: list[bytes]) -> None:
    """Let /proc/PID/cmdline show the program's arguments: write them over the server's long one."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    shown = b"\0".join(arguments)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, shown, len(shown))


def _open_streams(unbuffered: bool) -> None:
    """New sys.stdin, sys.stdout and sys.stderr, as the interpreter makes them at its start."""
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream, encoding = None, getattr(sys, f"__{name}__").encoding
        with contextlib.suppress(OSError):  # it is closed
            raw = io.FileIO(number, "w" if number else "r", closefd=False)
            buffered = io.BufferedWriter if number else io.BufferedReader
            stream = io.TextIOWrapper(
                raw if unbuffered and number else buffered(raw),
                encoding,
                line_buffering=number == 2 or raw.isatty(),
                errors="backslashreplace" if number == 2 else "strict",
                write_through=unbuffered and number > 0,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(program: list[str], importer: _Importer) -> None:
    """Run the program as `__main__`."""
    sys.meta_path.insert(0, importer)
    if program[0] == "-m":
        sys.argv[:], sys.path[0] = program[1:], os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:], sys.path[0] = program, os.path.dirname(os.path.realpath(program[0]))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = program[0], __builtins__
    with io.open_code(program[0]) as file:
        code = compile(file.read(), program[0], "exec", dont_inherit=True)
    exec(code, main.__dict__)


def main() -> None:
    path, inherited = sys.argv[1], preloaded_client.place() | {"environment": dict(os.environb)}
    importer = preload()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    Path(f"{path}.place").write_bytes(marshal.dumps(inherited))
    gc.freeze()
    request = Server(path).serve()
    if request is None:  # the tests have ended, and may have been killed
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        os._exit(0)
    take_over(request)
    if "numpy" in importer.packages:
        importer.packages["numpy"]["numpy"].random.seed()
    try:
        run(request["program"], importer)
    except Exception:
        kind, error, trace = sys.exc_info()
        sys.excepthook(kind, error, trace.tb_next.tb_next)
        sys.exit(1)


if __name__ == "__main__":
    main()
