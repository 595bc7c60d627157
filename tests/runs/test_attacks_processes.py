"""Attacks on processes: ranks that are stopped or killed, output that cannot be written, signals at
any moment.
"""

import json
import signal
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from attacks import Attack, table
from conftest import PROJECT, SCRIPT, Run, fill, finish, free_port, start

from support.errors import TrainingError

pytestmark = pytest.mark.slow

TINY = ["--seq_length", "64", "--batch_size", "1", "--no_eval", "--no_export"]

# ------------------------------------------------------------------------- ranks that do not answer


@contextmanager
def two_ranks(folder, *args):
    """Two ranks without a launcher, rank 0 hosting the store; yields them once they train. Both are
    killed at the end.
    """
    port, env = free_port(), {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, SCRIPT, *TINY, "--epochs", "1000", "--output_dir", folder, *args]
    ranks = [start(command, {**env, "RANK": rank, "MASTER_PORT": port}) for rank in (0, 1)]
    try:
        while "Epoch 1" not in (line := ranks[0].stdout.readline()):
            assert line, ranks[0].stderr.read()
        threading.Thread(
            target=ranks[0].stdout.read, daemon=True
        ).start()  # a full pipe would stop it
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def errors_of(*ranks) -> list[str]:
    return [line for rank in ranks for line in rank.stderr.read().splitlines() if "❌" in line]


def end_of(rank, seconds: float) -> int:
    started = time.monotonic()
    code = rank.wait(seconds)
    assert time.monotonic() - started < seconds
    return code


def test_survivor_reports_that_rank_0_was_killed(tmp_path):
    with two_ranks(tmp_path / "out") as (first, second):
        first.kill()
        assert end_of(second, 30) == 1
        [line] = errors_of(second)
        assert "rank 1" in line
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        assert results["status"] == "failed" and results["reason"] in line


@pytest.mark.soak
def test_rank_1_that_is_stopped_ends_the_run(tmp_path):
    with two_ranks(tmp_path / "out") as (first, second):
        second.send_signal(signal.SIGSTOP)
        assert end_of(first, 30) == 1
        second.send_signal(signal.SIGCONT)
        assert end_of(second, 30) == 1
        [line] = errors_of(first, second)
        assert "Rank 1 ended without reporting an error" in line


@pytest.mark.soak
@pytest.mark.parametrize("stopped, seconds", [((0, 1), 21), ((0,), 10)])
def test_a_suspension_does_not_end_a_run(tmp_path, stopped, seconds):
    with two_ranks(tmp_path / "out", "--max_steps", "60") as ranks:
        for rank in stopped:
            ranks[rank].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        for rank in reversed(stopped):
            ranks[rank].send_signal(signal.SIGCONT)
            time.sleep(0.5)
        assert [end_of(rank, 120) for rank in ranks] == [0, 0]


# --------------------------------------------------------------------------- who writes the results


def results_of(folder, main=True):
    """A Run as a rank has it, without a process group."""
    from support.report.run import Run

    ctx = SimpleNamespace(is_main=main, lock=None)
    facts = {"status": "running", "reason": None, "started_at": "2026-01-01T00:00:00+00:00"}
    results = Run(ctx, folder, facts)
    if main:
        results._begin()
    return results


@pytest.mark.parametrize(
    "status, first, after",
    [
        ("running", True, "failed"),
        ("failed", False, "failed"),
        ("oom", False, "oom"),
        ("completed", True, "completed"),
        ("preempted", True, "preempted"),
    ],
)
def test_the_first_error_stays_and_a_good_end_stays(tmp_path, status, first, after):
    results_of(tmp_path)  # rank 0's
    other = results_of(tmp_path, main=False)
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"running"', f'"{status}", "steps": 1'))
    assert other.fail(TrainingError("the second error")) is first
    found = json.loads(path.read_text())
    assert found["status"] == after
    assert (found["reason"] == "the second error") is (status == "running")


# --------------------------------------------------------------------------------------- full disks


def test_full_disk_while_metrics_are_written(disk):
    folder = disk(1)
    flags = [*TINY, "--epochs", "1000", "--logging_steps", "1", "--output_dir", folder / "out"]
    run = start([sys.executable, SCRIPT, *flags])
    while "Epoch 1" not in (line := run.stdout.readline()):
        assert line, run.stderr.read()
    fill(folder)
    while "ℹ️" not in (line := run.stdout.readline()):
        assert line, run.stderr.read()
    assert "No space left" in line and "metrics.jsonl" in line
    for _ in range(50):
        run.stdout.readline()
    (folder / "filler").unlink()
    run.send_signal(signal.SIGTERM)
    finish(run, 60)
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, len(lines) + 1)]
    assert len(lines) > 50


# ------------------------------------------------------------------------------------------ output


def run_shell(command: str, folder, redirection: str) -> Run:
    """Run a command in bash with redirected streams; the exit code is the command's, also before a
    pipe.
    """
    process = start(
        ["bash", "-c", f"{command} {redirection}; exit ${{PIPESTATUS[0]}}"],
        {"PYTHON": sys.executable},
    )
    out, err = finish(process, 120)
    return Run(process.returncode, out, err, 0, folder)


def completed(_folder, run) -> None:
    assert run.results["status"] == "completed"
    assert len(run.losses) == 2


TRAIN = f"{sys.executable} {SCRIPT} {' '.join(TINY)} --max_steps 2 --output_dir @/out"
PLAN = f"{sys.executable} {PROJECT}/scripts/plan_memory.py --gpus 2 --gpu_memory 40"


HELP = f"{sys.executable} {SCRIPT} --help"
NO_SPACE = "No space left"


@table(
    Attack("all on a full disk", args=(TRAIN, "> /dev/full 2>&1"), code=0, holds=completed),
    Attack("everything closed", args=(TRAIN, "<&- >&- 2>&-"), code=0, holds=completed),
    Attack("head", args=(TRAIN, "| head -n 1"), code=0, holds=completed, soak=True),
    Attack("help, head", args=(HELP, "| head -n 1"), code=0),
    Attack("plan, full disk", args=(PLAN, "> /dev/full"), code=1, says=NO_SPACE),
)
def test_output_that_cannot_be_written(attack, tmp_path):
    command, redirection = (text.replace("@", str(tmp_path)) for text in attack.args)
    attack.check(tmp_path, run_shell(command, tmp_path / "out", redirection))


# ------------------------------------------------------------------------------------------ signals


@pytest.fixture
def signal_while_importing(tmp_path):
    """An environment in which importing torch sends this process a signal."""
    (tmp_path / "torch.py").write_text(
        "import os, time\nos.kill(os.getpid(), int(os.environ['SENT']))\ntime.sleep(30)\n"
    )
    return {"PYTHONPATH": tmp_path}


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_signal_during_imports(signal_while_importing, tmp_path, name):
    number = signal.Signals[name].value
    run = start(
        [sys.executable, SCRIPT, "--output_dir", tmp_path / "out"],
        {**signal_while_importing, "SENT": number},
    )
    _, err = finish(run, 20)
    assert run.returncode == 1
    assert err.count("❌") == 1 and name in err and "Traceback" not in err


@pytest.mark.parametrize(
    "error, code, says",
    [
        ("ImportError('libtorch.so: failed to map segment')", 1, "libtorch.so"),
        ("MemoryError", 3, "Out of memory"),
        ("OSError(24, 'Too many open files')", 1, "ulimit -n"),
        ("KeyboardInterrupt", 1, "Interrupted"),
    ],
)
def test_libraries_that_cannot_be_imported(tmp_path, error, code, says):
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    run = start(
        [sys.executable, SCRIPT, "--output_dir", tmp_path / "out"], {"PYTHONPATH": tmp_path}
    )
    _, err = finish(run, 20)
    assert run.returncode == code
    assert err.count("❌") == 1 and says in err and "Traceback" not in err


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_command_line_that_is_stopped_removes_what_is_half_written(tmp_path, name):
    """The handler of the start would end the process at once, and print that nothing was written."""
    (tmp_path / "tool.py").write_text("""if True:
        import os, pathlib, sys, time
        from support import process

        def main():
            half = pathlib.Path("half")
            half.touch()
            try:
                os.kill(os.getpid(), int(sys.argv[1]))
                time.sleep(30)
            finally:
                half.unlink()

        process.catch_signals(process.STOP_SIGNALS)
        process.run_command_line(main)
    """)
    number = signal.Signals[name].value
    run = start([sys.executable, "tool.py", number], {"PYTHONPATH": PROJECT}, cwd=tmp_path)
    _, err = finish(run, 20)
    assert run.returncode == 128 + number and "during the start" not in err
    assert not (tmp_path / "half").exists()
