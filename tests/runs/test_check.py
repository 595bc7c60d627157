"""--check says what would keep a run from running; an error that happens says what to do."""

import re
import shutil
import socket
import subprocess
import sys

import pytest
from conftest import FAULT, SCRIPT, finish, free_port, path_without, skip_without, start


@pytest.mark.slow
@pytest.mark.parametrize("launcher, ranks", [("python", 1), ("torchrun", 2)])
def test_machine_that_can_run(script, launcher, ranks):
    run = script("--check", "--strategy", "infinity", launcher=launcher, ranks=ranks)
    checked = "Python GPU DeepSpeed NVMe disk open memory hub communication rendezvous --strategy"
    assert [line.split()[1] for line in run.out.splitlines()] == checked.split()
    assert "it can run" in run.out and "❌" not in run.out and not run.folder.exists()
    assert ranks == 1 or re.search(r"over 2 ranks .* [\d.]+ GB/s, \d+ µs", run.out)


@pytest.mark.slow
def test_two_nodes_under_srun(slurm, script):
    srun = "srun --nodes=2 --ntasks=2 --kill-on-bad-exit=1".split()
    out, err = finish(start([*srun, sys.executable, SCRIPT, "--check"]), 120)
    assert "on node1, node2" in out and "2 nodes" in out and "it can run" in out, out + err


def test_without_a_compiler(script, tmp_path):
    path = path_without(tmp_path, "c++", "g++", "gcc", "cc", "clang")
    env = {"PATH": path, "TORCH_EXTENSIONS_DIR": tmp_path / "none"}
    run = script("--check", "--strategy", "offload", env=env, ok=False)
    assert run.code == 1 and "build-essential" in run.out and "cpu_adam" in run.out
    assert script("--check", env=env).code == 0  # dp needs none


def test_gpu_that_torch_cannot_use(script, tmp_path):
    env = {"FAULT": f"unusable_gpu:{tmp_path}"}
    run = script("--check", program=FAULT, env=env, ok=False)
    lines = run.out.splitlines()
    assert run.code == 2 and lines[-1].startswith("❌ --strategy dp")
    assert any(line.startswith("❌ GPU") and "--device cpu" in line for line in lines)
    assert any(line.startswith("✅ disk") for line in lines)  # the others are tested, too
    run = script("--check", "--device", "cpu", program=FAULT, env=env)
    assert "not used; training in" in run.out


def test_hub_out_of_reach(script, tmp_path):
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HOME": tmp_path}
    run = script("--check", "--model", "gpt2", env=env, ok=False)
    assert run.code == 1 and "HF_HUB_OFFLINE" in run.out


@pytest.mark.slow
def test_few_open_files():
    command = ["bash", "-c", f"ulimit -n 100; exec {sys.executable} {SCRIPT} --check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "ulimit -n 65536" in done.stdout


def test_check_reports_a_full_disk(script, disk):
    run = script("--check", "--output_dir", disk(1) / "out", ok=False)
    assert run.code == 1 and "free some space" in run.out


def test_check_reports_a_master_port_in_use(script):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = taken.getsockname()[1]
        run = script("--check", env=env, ok=False)
    assert run.code == 1 and str(env["MASTER_PORT"]) in run.error and "--master_port" in run.error


def test_compilers_first_error_is_shown(script, tmp_path):
    compiler = tmp_path / "broken"
    fails = 'case "$*" in *-c\\ *) echo "shm.cpp:1:1: error: planted" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{fails}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    env = {"CXX": compiler, "TORCH_EXTENSIONS_DIR": tmp_path / "new"}
    run = script("--strategy", "offload", "--max_steps", "1", env=env, ok=False)
    assert run.code == 2 and "error: planted" in run.error and "--check" in run.error
    assert run.results["error_kind"] == "missing_requirement"


def test_a_release_of_deepspeed_that_trains_wrongly(script):
    """Refused by --check and by a run, which a comparison shows as skipped."""
    old = {"program": FAULT, "env": {"FAULT": "deepspeed:0.18.2+4f2a1bc"}, "ok": False}
    run = script("--check", "--strategy", "zero2", **old)
    assert run.code == 1 and re.search(r"^❌ .*0\.18\.2.*pip install", run.out, re.M)
    run = script("--strategy", "zero2", "--max_steps", "1", **old)
    assert run.code == 2 and "0.18.2" in run.error and "pip install" in run.error
    assert run.results["error_kind"] == "missing_requirement"
    assert "it can run" in script("--check", "--strategy", "zero1", **old).out


def test_quiet(script):
    run = script(*"--quiet --max_steps 2 --seq_length 32 --no_eval --no_export".split())
    assert run.out == run.err == ""


@pytest.mark.slow
def test_live_bar_on_a_terminal(tmp_path):
    """In a pseudo-terminal of 80 columns; test_output.py has the lines of a file."""
    skip_without("bsdutils", "script")
    work = f"--max_steps 30 --seq_length 64 --no_save --no_export --output_dir {tmp_path}"
    command = f"stty cols 80 rows 40; exec {sys.executable} {SCRIPT} {work}"
    done = subprocess.run(["script", "-qec", command, "/dev/null"], capture_output=True, text=True)
    shown = re.sub(r"\x1b\[[A-Z0-9]*", "", done.stdout).replace("\r", "\n")
    bars = re.findall(r"^Epoch 1 \d+/30 \|.*$", shown, re.MULTILINE)
    assert done.returncode == 0 and max(map(len, bars)) <= 80
    assert any("loss" in bar and "tok/s" in bar for bar in bars)


@pytest.mark.slow
def test_tensorboard_and_wandb_have_what_metrics_have(script, tmp_path):
    """Stopped, resumed, and one curve in the end."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    work = "--max_steps 12 --seq_length 32 --logging_steps 2 --report_to tensorboard,wandb"
    work += " --project students --tags tiny --no_export --eval_samples 4 --save_every 5"
    env, folder = {"WANDB_MODE": "offline"}, tmp_path / "out"
    args = [*work.split(), "--run_name", "the first", "--output_dir", folder]
    script(*args, env=env, folder=folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000010")
    run = script(*args, "--resume", env=env, folder=folder)

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, 13))
    assert [event.value for event in losses] == pytest.approx(run.losses)
    curves = {"train/lr", "train/grad_norm", "train/tokens_per_second", "eval/loss"}
    assert curves <= set(events.Tags()["scalars"])

    name = (folder / "wandb-run.txt").read_text().strip()
    files = [*folder.glob(f"wandb/offline-run-*/run-*{name}*.wandb")]
    assert len(files) == 2  # two sessions of one run
    written = b"".join(file.read_bytes() for file in files)
    assert all(word in written for word in (b"the first", b"students", b"tiny", b"train/loss"))


def test_tracker_that_is_not_installed(script, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['wandb'] = None\n")
    run = script("--report_to", "wandb", "--max_steps", "1", env={"PYTHONPATH": tmp_path}, ok=False)
    assert run.code == 2 and "pip install wandb" in run.error
