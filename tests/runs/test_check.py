"""--check says what would keep a run from running, and an error that happens says what to do about
it.
"""

import contextlib
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest
from conftest import SCRIPT, finish, free_port, path_without, skip, start


@pytest.mark.slow
@pytest.mark.parametrize("launcher, ranks", [("python", 1), ("torchrun", 2), ("deepspeed", 2)])
def test_machine_that_can_run(script, launcher, ranks):
    run = script("--check", "--strategy", "infinity", launcher=launcher, ranks=ranks)
    lines = [line for line in run.out.splitlines() if not line.startswith("[2")]  # of deepspeed
    assert [line.split()[1] for line in lines] == (
        "Python GPU DeepSpeed NVMe disk open memory hub communication rendezvous --strategy"
    ).split()
    assert "it can run" in run.out and "❌" not in run.out and not run.folder.exists()
    assert ranks == 1 or re.search(r"over 2 ranks .* [\d.]+ GB/s, \d+ µs", run.out)
    assert re.search(r"GB free, writes \d+\.\d\d and reads", run.out)


@pytest.mark.slow
def test_two_nodes_under_srun(slurm, script):
    srun = "srun --nodes=2 --ntasks=2 --kill-on-bad-exit=1".split()
    process = start([*srun, sys.executable, SCRIPT, "--check"])
    out, err = finish(process, 120)
    assert process.returncode == 0, out + err
    assert "on node1, node2" in out and "2 nodes" in out and "--cpus-per-task" in out


def test_without_libaio(script, without_libaio):
    run = script("--check", "--strategy", "infinity", env=without_libaio, ok=False)
    assert run.code == 1 and "libaio-dev" in run.out and "❌ --strategy infinity" in run.out
    assert "it can run" in script("--check", "--strategy", "zero2", env=without_libaio).out


def test_without_a_compiler(script, tmp_path):
    path = path_without(tmp_path, "c++", "g++", "gcc", "cc", "clang")
    env = {"PATH": path, "TORCH_EXTENSIONS_DIR": tmp_path / "none"}
    run = script("--check", "--strategy", "offload", env=env, ok=False)
    assert run.code == 1 and "build-essential" in run.out and "cpu_adam" in run.out
    assert script("--check", env=env).code == 0  # dp needs none


def test_hub_out_of_reach(script, tmp_path):
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HOME": tmp_path}
    run = script("--check", "--model", "gpt2", env=env, ok=False)
    assert run.code == 1 and "HF_HUB_OFFLINE" in run.out


@pytest.mark.slow
def test_few_open_files():
    command = ["bash", "-c", f"ulimit -n 100; exec {sys.executable} {SCRIPT} --check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "ulimit -n 65536" in done.stdout
    assert "Traceback" not in done.stderr


def test_full_disk(tmp_path):
    if os.geteuid() != 0:
        skip("needs root to mount a small disk")
    command = f"{sys.executable} {SCRIPT} --check --output_dir {tmp_path}/out"
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && exec {command}"
    shell = ["unshare", "--mount", "sh", "-c", mount]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "free some space" in done.stdout, done.stdout + done.stderr


def test_port_that_is_taken(script):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = taken.getsockname()[1]
        run = script("--check", env=env, ok=False)
    assert run.code == 1 and str(env["MASTER_PORT"]) in run.error and "--master_port" in run.error


# ------------------------------------------------------------------------------- errors with advice


def test_compilers_first_error_is_shown(script, tmp_path):
    compiler = tmp_path / "broken"
    fails = 'case "$*" in *-c\\ *) echo "shm.cpp:1:1: error: planted" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{fails}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    env = {"CXX": compiler, "TORCH_EXTENSIONS_DIR": tmp_path / "new"}
    run = script("--strategy", "offload", "--max_steps", "1", env=env, ok=False)
    assert run.code == 2 and "error: planted" in run.error and "--check" in run.error
    assert run.results["error_kind"] == "missing_requirement"


# --------------------------------------------------------------------------------- the command line


def test_help_fits_80_columns_and_names_every_group():
    command = [sys.executable, SCRIPT, "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert max(map(len, out.splitlines())) <= 80
    groups = "model data training strategy cluster output debugging".split()
    assert [name for name in (*groups, "exit codes") if f"\n{name}:" not in out] == []


def test_quiet(script):
    run = script(*"--quiet --max_steps 2 --seq_length 32 --no_eval --no_export".split())
    assert run.out == run.err == ""


@pytest.mark.slow
def test_live_bar_on_a_terminal(tmp_path):
    """In a pseudo-terminal of 80 columns; test_output.py has the lines of a file."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    work = "--max_steps 30 --seq_length 64 --save_every 20 --no_export --output_dir".split()
    command = [sys.executable, SCRIPT, *work, str(tmp_path)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other side has gone
        while part := os.read(ours, 65536):
            shown += part
    text = re.sub(r"\x1b\[[A-Z0-9]*", "", shown.decode())
    pieces = [piece.strip("\n") for piece in re.split(r"\r\n|\r|\n", text)]
    bars = [piece for piece in pieces if re.match(r"Epoch 1 \d+/30 \|", piece)]
    assert process.wait() == 0 and max(map(len, bars)) <= 80
    assert any("loss" in bar and "tok/s" in bar for bar in bars)
    assert "Epoch 1 | Batch 29/30 | Loss" in text


# -------------------------------------------------------------------------------------- --report_to


@pytest.mark.slow
def test_tensorboard_and_wandb_have_what_metrics_have(script, tmp_path):
    """Stopped, resumed, and one curve in the end."""
    work = "--max_steps 12 --seq_length 32 --logging_steps 2 --report_to tensorboard,wandb"
    work += " --project students --tags tiny --no_export --eval_samples 4 --save_every 5"
    env, folder = {"WANDB_MODE": "offline"}, tmp_path / "out"
    args = [*work.split(), "--run_name", "the first", "--output_dir", folder]
    script(*args, env=env, folder=folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000010")
    run = script(*args, "--resume", env=env, folder=folder)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, 13))
    assert [event.value for event in losses] == pytest.approx(run.losses)
    curves = {"train/lr", "train/grad_norm", "train/tokens_per_second", "eval/loss"}
    assert curves <= set(events.Tags()["scalars"])

    name = (folder / "wandb-run.txt").read_text().strip()
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and all(name in file.name for file in files)  # two sessions of one run
    written = b"".join(file.read_bytes() for file in files)
    assert all(word in written for word in (b"the first", b"students", b"tiny", b"train/loss"))


def test_tracker_that_is_not_installed(script, tmp_path):
    # As if it were not installed.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['wandb'] = None\n")
    run = script("--report_to", "wandb", "--max_steps", "1", env={"PYTHONPATH": tmp_path}, ok=False)
    assert run.code == 2 and "pip install wandb" in run.error
