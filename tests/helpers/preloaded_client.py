"""Takes the place of the Python interpreter; preloaded.py adds the line `#!...`."""

import contextlib
import marshal
import os
import signal
import socket
import sys
import time

# Variables that no library reads while it is imported, or that the child applies itself. Hugging
# Face's libraries are imported again if theirs differ.
RUN_TIME = set(
    b"""
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GROUP_RANK GROUP_WORLD_SIZE
    ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE TORCH_NCCL_ASYNC_ERROR_HANDLING PYTHON_EXEC OMP_NUM_THREADS
    HF_ENDPOINT HF_HOME HF_HUB_OFFLINE PATH PWD OLDPWD SHLVL _ COLUMNS LINES TMPDIR CC CXX FAULT
    FAULT_SCRIPT TORCH_EXTENSIONS_DIR PYTEST_CURRENT_TEST SLURM_CONF PYTORCH_NVML_BASED_CUDA_CHECK
    TORCHINDUCTOR_CACHE_DIR COMPARISON_RUN CONTROL NUM_GPUS PYTHON REPEATS RESUME SIMULATE_GPUS
    STRATEGIES TIMEOUT
    """.split()
)


def connect(folder: str):
    """A connection to the server of this rank, or None: it has ended, or the variables differ."""
    path = os.path.join(folder, f"server{int(os.environ.get('LOCAL_RANK') or 0) % 2}")
    until = time.monotonic() + 120
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.02)
    connection = socket.socket(socket.AF_UNIX)
    try:
        with open(f"{path}.environment", "rb") as file:
            theirs, ours = marshal.load(file), dict(os.environb)
        connection.connect(path)
    except OSError:
        return None
    names = {name for name in {*theirs, *ours} - RUN_TIME if theirs.get(name) != ours.get(name)}
    differs = any(not name.startswith(b"TORCHELASTIC_") for name in names)
    return None if differs else connection


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    program = sys.argv[1 + (sys.argv[1:2] == ["-u"]) :]
    is_option = not program or (program[0].startswith("-") and program[0] != "-m")
    is_open = all(os.path.exists(f"/proc/self/fd/{number}") for number in (0, 1, 2))
    connection = None
    if is_open and not is_option and "--verbose" not in program:
        connection = connect(os.path.dirname(os.path.abspath(__file__)))
    if connection is None:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    environment, folder = dict(os.environb), os.getcwd()
    request = marshal.dumps({"program": program, "environment": environment, "folder": folder})
    socket.send_fds(connection, [len(request).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(request)
    child = int.from_bytes(connection.recv(4), "little")

    def forward(number, _frame):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in HANDLED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    os.closerange(0, 3)  # a pipe is at its end when the child has ended
    code = int.from_bytes(connection.recv(4), "little", signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
