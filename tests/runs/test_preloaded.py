"""The preloaded interpreter takes the place of the real one where it can."""

import os
import signal
import subprocess
import time

import psutil
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def start(preloaded, tmp_path):
    """start(code, **environment) starts a program with the preloaded interpreter."""
    if preloaded is None:
        pytest.skip("every start is a real one")
    preloaded.wait()

    def run(code, **environment):
        (tmp_path / "program.py").write_text(code)
        command = [preloaded.python, tmp_path / "program.py"]
        environment = {**os.environ, **environment}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    return run


WHERE = "import os; print(open(f'/proc/{os.getpid()}/cmdline').read())"


@pytest.mark.parametrize(
    ("variable", "forked"),
    [("SLURM_CONF", True), ("TORCHINDUCTOR_CACHE_DIR", True), ("TORCH_CPP_LOG_LEVEL", False)],
)
def test_start_is_a_fork_unless_a_library_reads_the_variable(start, variable, forked):
    out, _ = start(WHERE, **{variable: "/another/value"}).communicate()
    assert ("preloaded_server.py" in out) == forked


def test_a_fork_gets_signals_and_ends_with_its_client(start):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = start(code)
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(30) == -number
        until = time.monotonic() + 30
        while psutil.pid_exists(pid):
            assert time.monotonic() < until, "the child is left"
            time.sleep(0.05)
