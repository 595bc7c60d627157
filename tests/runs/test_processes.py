"""Ranks that are stopped or killed, output that cannot be written, signals at any moment."""

import json
import signal
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from cluster_work import reached
from conftest import PROJECT, SCRIPT, Run, fill, finish, free_port, start

from distributed_training.errors import TrainingError

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
        reached(ranks[0], "Epoch 1")
        # A full pipe would stop it.
        threading.Thread(target=ranks[0].stdout.read, daemon=True).start()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_survivor_reports_that_rank_0_was_killed(tmp_path):
    with two_ranks(tmp_path / "out") as (first, second):
        first.kill()
        assert second.wait(30) == 1
        [line] = [line for line in second.stderr.read().splitlines() if "❌" in line]
        assert "rank 1" in line
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        assert results["status"] == "failed" and results["reason"] in line


@pytest.mark.soak
def test_a_suspension_does_not_end_a_run(tmp_path):
    with two_ranks(tmp_path / "out", "--max_steps", "60") as ranks:
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        time.sleep(21)
        for rank in reversed(ranks):
            rank.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        assert [rank.wait(120) for rank in ranks] == [0, 0]


# --------------------------------------------------------------------------- who writes the results


def results_of(folder, main=True):
    """A RunFolder as a rank has it, without a process group."""
    from distributed_training.run.run_folder import RunFolder

    ctx = SimpleNamespace(is_main=main)
    facts = {"status": "running", "reason": None, "started_at": "2026-01-01T00:00:00+00:00"}
    results = RunFolder(ctx, folder, True, None, facts, found=None, keeps_found=False)
    results.begin()
    return results


@pytest.mark.parametrize("status", ["running", "failed", "oom", "completed", "preempted"])
def test_the_first_error_stays_and_a_good_end_stays(tmp_path, status):
    results_of(tmp_path)  # rank 0's
    other = results_of(tmp_path, main=False)
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"running"', f'"{status}", "steps": 1'))
    assert other.fail(TrainingError("the second error")) is (status not in ("failed", "oom"))
    found = json.loads(path.read_text())
    assert found["status"] == ("failed" if status == "running" else status)
    assert (found["reason"] == "the second error") is (status == "running")


# --------------------------------------------------------------------------------------- full disks


def test_an_error_is_recorded_on_a_full_disk(disk):
    folder = disk(1)
    results = results_of(folder)
    fill(folder)
    assert results.fail(TrainingError("No space left"))
    assert json.loads((folder / "results.json").read_text())["reason"] == "No space left"


def test_full_disk_while_metrics_are_written(disk):
    folder = disk(1)
    flags = [*TINY, "--epochs", "1000", "--logging_steps", "1", "--output_dir", folder / "out"]
    run = start([sys.executable, SCRIPT, *flags])
    reached(run, "Epoch 1")
    fill(folder)
    reached(run, "No space left")
    for _ in range(50):
        run.stdout.readline()
    (folder / "filler").unlink()
    run.send_signal(signal.SIGTERM)
    finish(run, 60)
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, len(lines) + 1)]
    assert len(lines) > 50


# ------------------------------------------------------------------------------------------ output

TRAIN = f"$PYTHON {SCRIPT} {' '.join(TINY)} --max_steps 2 --output_dir out"


@pytest.mark.parametrize(
    ("command", "redirection", "code"),
    [
        (TRAIN, "> /dev/full 2>&1", 0),
        (TRAIN, "<&- >&- 2>&-", 0),
        (f"$PYTHON {SCRIPT} --help", "| head -n 1", 0),
        (f"$PYTHON {PROJECT}/scripts/plan_memory.py --gpu_memory 40", "> /dev/full", 1),
    ],
)
def test_output_that_cannot_be_written(command, redirection, code, tmp_path):
    """The exit code is the command's, also before a pipe."""
    shell = ["bash", "-c", f"{command} {redirection}; exit ${{PIPESTATUS[0]}}"]
    process = start(shell, {"PYTHON": sys.executable}, cwd=tmp_path)
    out, err = finish(process, 120)
    run = Run(process.returncode, out, err, 0, tmp_path / "out")
    assert run.code == code and "Traceback" not in run.out + run.err
    if code:
        assert "No space left" in run.error
    if command == TRAIN:
        assert run.results["status"] == "completed" and len(run.losses) == 2


# ------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize(
    "code_of_torch, code, says",
    [
        ("import os, time; os.kill(os.getpid(), 2); time.sleep(30)", 75, "SIGINT"),
        ("raise ImportError('libtorch.so: failed to map segment')", 1, "libtorch.so"),
        ("raise MemoryError", 3, "Out of memory"),
        ("raise OSError(24, 'Too many open files')", 1, "ulimit -n"),
    ],
)
def test_failures_while_torch_is_imported(tmp_path, code_of_torch, code, says):
    (tmp_path / "torch.py").write_text(code_of_torch)
    run = start([sys.executable, SCRIPT, "--output_dir", "out"], {"PYTHONPATH": "."}, cwd=tmp_path)
    _, err = finish(run, 20)
    assert run.returncode == code
    assert err.count("❌") == (code != 75) and err.count("\n") < 3
    assert says in err and "Traceback" not in err


def test_a_command_line_that_is_stopped_removes_what_is_half_written(tmp_path):
    (tmp_path / "tool.py").write_text("""if True:
        import os, pathlib, signal, time
        from distributed_training import process, programs

        def main():
            half = pathlib.Path("half")
            half.touch()
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
            finally:
                half.unlink()

        process.catch_signals(process.STOP_SIGNALS)
        programs.run_command_line(main)
    """)
    run = start([sys.executable, "tool.py"], {"PYTHONPATH": PROJECT}, cwd=tmp_path)
    _, err = finish(run, 20)
    assert run.returncode == 128 + signal.SIGTERM and "during the start" not in err
    assert not (tmp_path / "half").exists()
