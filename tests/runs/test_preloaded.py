"""The preloaded interpreter takes the place of the real one where it can."""

import os
import signal
import subprocess

import psutil
import pytest
from cluster_work import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def start(preloaded, tmp_path):
    """start(code, **environment) starts a program with the preloaded interpreter."""
    if preloaded is None:
        pytest.skip("every start is a real one")
    preloaded.wait()

    def run(code, **environment):
        (tmp_path / "program.py").write_text(code)
        command, env = [preloaded.python, tmp_path / "program.py"], {**os.environ, **environment}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    return run


WHERE = "import os; print(open(f'/proc/{os.getpid()}/cmdline').read())"


@pytest.mark.parametrize(
    ("variable", "forked"), [("SLURM_CONF", True), ("TORCH_CPP_LOG_LEVEL", False)]
)
def test_start_is_a_fork_unless_a_library_reads_the_variable(start, variable, forked):
    out, _ = start(WHERE, **{variable: "/another/value"}).communicate()
    assert ("preloaded_server.py" in out) == forked


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_gets_signals_and_ends_with_its_client(start, number):
    process = start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    child = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(30) == -number
    wait_for(lambda: not psutil.pid_exists(child), 30, "the child is left")
