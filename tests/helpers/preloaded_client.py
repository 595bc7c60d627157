"""Takes the place of the Python interpreter; preloaded.py adds the line `#!...`."""

import marshal
import os
import resource
import signal
import socket
import sys
import time

# Variables that no library reads while it is imported.
RUN_TIME = {
    b"RANK",
    b"WORLD_SIZE",
    b"LOCAL_RANK",
    b"LOCAL_WORLD_SIZE",
    b"MASTER_ADDR",
    b"MASTER_PORT",
    b"GROUP_RANK",
    b"GROUP_WORLD_SIZE",
    b"ROLE_RANK",
    b"ROLE_NAME",
    b"ROLE_WORLD_SIZE",
    b"TORCH_NCCL_ASYNC_ERROR_HANDLING",
    b"PYTHON_EXEC",
    b"OMP_NUM_THREADS",  # the server applies it to torch
    # the child imports Hugging Face's libraries again
    b"HF_ENDPOINT",
    b"HF_HOME",
    b"HF_HUB_OFFLINE",
    b"PWD",
    b"OLDPWD",
    b"SHLVL",
    b"_",
    b"COLUMNS",
    b"LINES",
    b"FAULT",
    b"CC",
    b"CXX",
    b"PATH",
    b"TORCH_EXTENSIONS_DIR",
    b"FAULT_SCRIPT",
    b"PYTEST_CURRENT_TEST",
    b"SLURM_CONF",  # set once a worker has started Slurm; without this line all later starts are real
    b"TMPDIR",  # the child forgets the server's temporary folder
    # torch sets these in the tests' own process
    b"PYTORCH_NVML_BASED_CUDA_CHECK",
    b"TORCHINDUCTOR_CACHE_DIR",
    # compare_strategies.sh
    b"COMPARISON_RUN",
    b"CONTROL",
    b"NUM_GPUS",
    b"PYTHON",
    b"REPEATS",
    b"RESUME",
    b"SIMULATE_GPUS",
    b"STRATEGIES",
    b"TIMEOUT",
}


def place() -> dict:
    """What a child inherits from the server and cannot change; the server runs this, too."""
    limits = {
        n: resource.getrlimit(getattr(resource, n))
        for n in dir(resource)
        if n.startswith("RLIMIT_")
    }
    names = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
    return {
        "limits": limits,
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in names],
        "users": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
        "nice": os.nice(0),
    }


def parse(arguments: list) -> tuple:
    """The program with its arguments (None if only the interpreter can run it), and whether -u."""
    unbuffered = arguments[:1] == ["-u"]
    program = arguments[unbuffered:]
    if not program or (program[0].startswith("-") and program[0] != "-m") or program == ["-m"]:
        return None, False
    return program, unbuffered


def connect(folder: str):
    """A connection to the server, once it has imported everything; None if it has ended."""
    path = os.path.join(folder, f"server{int(os.environ.get('LOCAL_RANK') or 0) % 2}")
    until = time.monotonic() + 120
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.02)
    connection = socket.socket(socket.AF_UNIX)
    try:
        with open(f"{path}.place", "rb") as file:
            inherited = marshal.load(file)
        connection.connect(path)
    except OSError:
        return None
    environment = inherited.pop("environment")
    names = {
        name
        for name in {*environment, *os.environb}
        if environment.get(name) != os.environb.get(name)
    }
    names = {name for name in names - RUN_TIME if not name.startswith(b"TORCHELASTIC_")}
    if names or inherited != place() or len(os.listdir("/proc/self/fd")) > 6:
        return None
    return connection


def main() -> None:
    real, folder = sys.executable, os.path.dirname(os.path.abspath(__file__))
    program, unbuffered = parse(sys.argv[1:])
    is_torchrun = program and (
        os.path.basename(program[0]) == "torchrun" or program[:2] == ["-m", "torch.distributed.run"]
    )
    if program and not is_torchrun:
        os.environ.pop("PYTHON_EXEC", None)
    opened = [n for n in (0, 1, 2) if os.path.exists(f"/proc/self/fd/{n}")]
    connection = connect(folder) if program and "--verbose" not in program else None
    if connection is None:
        os.execv(real, [real, *sys.argv[1:]])
    signals = signal.valid_signals() - {
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGTSTP,
        signal.SIGCHLD,
        signal.SIGCONT,
    }
    ignored = [int(n) for n in signals if signal.getsignal(n) == signal.SIG_IGN]
    request = marshal.dumps(
        {
            "program": program,
            "unbuffered": unbuffered,
            "arguments": [os.fsencode(part) for part in [real, *sys.argv[1:]]],
            "environment": dict(os.environb),
            "folder": os.getcwd(),
            "umask": os.umask(0),
            "open": opened,
            "cores": list(os.sched_getaffinity(0)),
            "ignored": ignored,
        }
    )
    for number in set(signals) - set(ignored):
        signal.signal(number, lambda number, _frame: connection.send(bytes([number])))
    socket.send_fds(connection, [len(request).to_bytes(8, "little")], opened)
    connection.sendall(request)
    for number in opened:
        os.close(number)  # a pipe is at its end when the child has ended
    code = int.from_bytes(connection.recv(4), "little", signed=True)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
