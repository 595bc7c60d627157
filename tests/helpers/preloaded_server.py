"""Imports the heavy libraries and forks a child for every start; see preloaded.py."""

import builtins
import contextlib
import ctypes
import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import types
from pathlib import Path

# What the script sets before it imports the libraries.
ONES = "HF_DATASETS_DISABLE_PROGRESS_BARS HF_HUB_DISABLE_PROGRESS_BARS HF_HUB_OFFLINE"
ERRORS = "DATASETS_VERBOSITY TRANSFORMERS_VERBOSITY"
SET_BY_THE_PROGRAM = {
    **dict.fromkeys([*ONES.split(), "TRANSFORMERS_NO_ADVISORY_WARNINGS"], "1"),
    **dict.fromkeys(ERRORS.split(), "error"),
    **{"DS_ACCELERATOR": "cpu", "KINETO_LOG_LEVEL": "99"},
    **{"TOKENIZERS_PARALLELISM": "true", "TORCH_CPP_LOG_LEVEL": "ERROR"},
}
# Older releases lack some. A program that needs a missing module reports it itself.
PRELOAD = """
    torch torch.distributed.fsdp torch.distributed.tensor torch._dynamo torch.profiler
    torch.distributed.run torch.distributed.elastic.agent.server.local_elastic_agent
    torch._inductor.compile_fx torch._dynamo.repro.after_dynamo
    tokenizers safetensors.torch psutil networkx
    transformers transformers.modeling_utils transformers.generation.utils
    transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
    transformers.models.gpt2.modeling_gpt2 transformers.models.llama.modeling_llama
    deepspeed deepspeed.runtime.zero.muon.original_muon deepspeed.runtime.zero.stage3
    deepspeed.runtime.zero.stage_1_and_2 deepspeed.ops.adam
    """.split()
# Have no state outside of Python: imported again if HF_* variables differ.
READ_HF = ("huggingface_hub", "transformers", "peft", "accelerate", "datasets")


def preload() -> tuple[dict[str, types.ModuleType], dict[str, str]]:
    """Import the libraries as a run does, and take them out of sys.modules.

    Returns:
        The modules by name, and the environment in which they were imported.
    """
    before, environment, path = set(sys.modules), dict(os.environ), list(sys.path)
    os.environ.update(SET_BY_THE_PROGRAM)
    values = dict(os.environ)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's import would start a thread for each core
    for name in PRELOAD:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    added = set(sys.modules) - before
    names = [n for n in added if n.partition(".")[0] not in sys.stdlib_module_names]
    return {name: sys.modules.pop(name) for name in names}, values


def restore_at_first_import(modules: dict[str, types.ModuleType], values: dict[str, str]) -> None:
    """Put the modules back into sys.modules when the program first imports one of them.

    The program has set its own variables by then.
    """
    packages, original = {name.partition(".")[0] for name in modules}, builtins.__import__

    def import_first(name, *args, **options):
        if name.partition(".")[0] in packages:
            builtins.__import__ = original
            hugging_face = {n for n in {*os.environ, *values} if n.startswith(("HF_", "DATASETS_"))}
            differs = any(os.environ.get(n) != values.get(n) for n in hugging_face)
            left_out = READ_HF if differs else ()
            back = {n: m for n, m in modules.items() if n.partition(".")[0] not in left_out}
            sys.modules.update(back)
            modules["numpy"].random.seed()  # numpy draws it while it is imported
            threads = os.environ.get("OMP_NUM_THREADS", "")
            if threads.isdigit() and int(threads) != modules["torch"].get_num_threads():
                modules["torch"].set_num_threads(int(threads))
        return original(name, *args, **options)

    builtins.__import__ = import_first


def die_with_parent() -> None:
    """Let the kernel kill this process (PR_SET_PDEATHSIG) when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def serve(path: str) -> dict:
    """Fork a child for every request, and return the request in it.

    A keeper between server and child reports the exit code. It ends with the server and with its
    client, and the child ends with the keeper.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    while True:
        ready, _, _ = select.select([0, listener], [], [])
        if 0 in ready:  # the tests have ended, and may have been killed
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            die_with_parent()
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return keep(client)
        client.close()


def keep(client: socket.socket) -> dict:
    """Fork the child, and return the request in it; the keeper does not return."""
    length, streams, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as file:
        request = marshal.loads(file.read(int.from_bytes(length, "little")))
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        client.close()
        take_over(request, streams)
        return request
    for number in (0, *streams):
        os.close(number)
    child = os.pidfd_open(pid)
    with contextlib.suppress(OSError):  # the client was killed
        client.sendall(pid.to_bytes(4, "little"))
        if child in select.select([client, child], [], [])[0]:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            client.sendall(code.to_bytes(4, "little", signed=True))
    os._exit(0)


def take_over(request: dict, streams: list[int]) -> None:
    """Become the process that asked: session, streams, folder, environment, signals."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environb.update(request["environment"])
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run(program: list[str]) -> None:
    """Run the program as `__main__`."""
    sys.orig_argv[:] = [sys.executable, *program]
    if program[0] == "-m":
        sys.argv[:], sys.path[0] = program[1:], os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:], sys.path[0] = program, os.path.dirname(os.path.realpath(program[0]))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = program[0], builtins
    exec(compile(Path(program[0]).read_bytes(), program[0], "exec"), main.__dict__)


def main() -> None:
    path, environment = sys.argv[1], dict(os.environb)
    modules, values = preload()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    Path(f"{path}.environment").write_bytes(marshal.dumps(environment))
    gc.freeze()
    request = serve(path)
    restore_at_first_import(modules, values)
    try:
        run(request["program"])
    except Exception:
        kind, error, trace = sys.exc_info()
        sys.excepthook(kind, error, trace.tb_next.tb_next)
        sys.exit(1)


if __name__ == "__main__":
    main()
