"""Several hosts without Slurm: torchrun on each of them."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_work import WORK, reached
from conftest import PROJECT, SCRIPT, descendants_of_test, finish, start

pytestmark = pytest.mark.slow

ELASTIC = ["--epochs", "100", "--resume", "--resume_force"]


def on_each(machines, *args, nnodes="3", names=None, programs=None, rdzv_id=None):
    """Start torchrun on each machine, as a user does; returns the processes by name."""
    torchrun = [
        Path(sys.executable).parent / "torchrun",
        f"--nnodes={nnodes}",
        "--nproc_per_node=1",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=node1:29500",
        f"--rdzv_id={rdzv_id or time.time()}",
    ]
    if ":" in nnodes:  # with a shared store a machine that is added waits without end (torch 2.13)
        torchrun = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *torchrun]
        torchrun += ["--max_restarts=3", "--rdzv_conf=last_call_timeout=5"]
    programs = programs or {}
    return {
        name: start(machines.on(name, *torchrun, programs.get(name, SCRIPT), *args))
        for name in names or machines.names
    }


def ends(processes, timeout):
    """Wait for all; returns {name: (exit code, everything it printed)}."""
    until, said = time.monotonic() + timeout, {}
    for name, process in processes.items():
        out, err = finish(process, max(1, until - time.monotonic()))
        said[name] = (process.returncode, out + err)
    return said


def errors(said):
    return [line for _, text in said.values() for line in text.splitlines() if "❌" in line]


def kill_machine(name, only_ranks=False):
    """Kill all that trains there, as when the power goes; or the rank and not its launcher."""
    for process in descendants_of_test():
        command = " ".join(process.cmdline())
        spared = "nsenter" in command or (only_ranks and "torchrun" in command)
        where = ["nsenter", f"--target={process.pid}", "--uts", "hostname"]
        host = subprocess.run(where, capture_output=True, text=True).stdout.strip()
        if not spared and host == name:
            process.kill()


def test_a_machine_that_is_lost_ends_the_others(machines, tmp_path):
    processes = on_each(machines, *WORK, "--epochs", "4000", "--output_dir", tmp_path)
    reached(processes["node1"], "Epoch 1")
    kill_machine("node3")
    said = ends(processes, 60)
    assert all(code != 0 for code, _ in said.values())
    causes = ("Rank 2 ended without reporting an error", "onnection")
    assert any(cause in line for cause in causes for line in errors(said)), said
    assert descendants_of_test() == []


def test_an_elastic_run_outlives_a_machine(machines, tmp_path):
    work = [*WORK, *ELASTIC, "--max_steps", "60", "--save_every", "5", "--output_dir", tmp_path]
    processes = on_each(machines, *work, "--logging_steps", "1", nnodes="1:3")
    reached(processes["node1"], "checkpoints/step-00000010")
    kill_machine("node3")
    said = ends({name: processes[name] for name in ("node1", "node2")}, 150)
    finish(processes["node3"], 30)
    assert "Resumed from" in said["node1"][1] + said["node2"][1], said
    check_elastic(tmp_path, world_size=2, steps=60)


def check_elastic(folder, world_size, steps):
    results = json.loads((folder / "results.json").read_text())
    found = results["status"], results["world_size"], results["steps"]
    assert found == ("completed", world_size, steps)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))


@pytest.mark.soak
def test_an_elastic_run_takes_a_machine_in_and_outlives_a_rank(machines, tmp_path):
    """Two machines, then three; then one of the three ranks dies, and its launcher starts it again."""
    work = [*WORK, *ELASTIC, "--max_steps", "70", "--save_every", "10", "--output_dir", tmp_path]
    work += ["--keep_last", "2", "--logging_steps", "1"]
    rdzv_id = str(time.time())
    processes = on_each(machines, *work, nnodes="1:3", names=["node1", "node2"], rdzv_id=rdzv_id)
    reached(processes["node1"], "checkpoints/step-00000010")
    processes |= on_each(machines, *work, nnodes="1:3", names=["node3"], rdzv_id=rdzv_id)
    reached(processes["node1"], "World Size: 3")
    reached(processes["node1"], "checkpoints/step-")
    kill_machine("node2", only_ranks=True)
    reached(processes["node1"], "Resumed from")
    said = ends(processes, 150)
    assert all(code == 0 for code, _ in said.values()), said
    check_elastic(tmp_path, world_size=3, steps=70)


def test_a_machine_that_differs_is_named(machines, tmp_path):
    other = tmp_path / "other"
    for folder in ("distributed_training", "tools"):
        shutil.copytree(PROJECT / folder, other / folder)
    shutil.copy(SCRIPT, other)
    with open(other / "distributed_training" / "data" / "batches.py", "a") as file:
        file.write("# another version\n")
    programs = {"node3": other / SCRIPT.name}
    started = on_each(machines, *WORK, "--output_dir", tmp_path / "out", programs=programs)
    [line] = errors(ends(started, 60))
    assert "node3" in line and "version of code" in line


def test_machines_without_a_shared_disk_keep_the_model(machines, tmp_path):
    """On the disk of rank 0; a machine that fails is recorded there, and checkpoints are refused."""
    own = tmp_path / "own"
    own.mkdir()
    for name in machines.names:
        machines.enter(name, "mount", "-t", "tmpfs", "tmpfs", own)
    work = [argument for argument in WORK if argument != "--no_export"]
    work += ["--max_steps", "2", "--output_dir", own / "out"]
    said = ends(on_each(machines, *work), 120)
    assert [code for code, _ in said.values()] == [0, 0, 0], said
    [main] = [name for name, (_, text) in said.items() if "Training Complete" in text]
    for name, (_, text) in said.items():
        assert (f"Rank 0 is on {main}" in text) == (name != main), text
        found = subprocess.run(machines.on(name, "ls", own / "out" / "hf"), capture_output=True)
        assert (b"model.safetensors" in found.stdout) == (name == main)
    said = ends(on_each(machines, *work, "--overwrite", "--save_every", "1"), 60)
    [line] = errors(said)
    assert "--save_every" in line and "checkpoint" in line
    for name in machines.names:
        machines.enter(name, "umount", own)


def test_a_rank_that_never_comes_is_named(machines, tmp_path):
    processes = {}
    for rank, name in enumerate(machines.names[:2]):
        env = {"RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": 3}
        env |= {"MASTER_ADDR": "node1", "MASTER_PORT": 29600}
        work = [*WORK, "--ddp_timeout", "8", "--output_dir", tmp_path]
        processes[name] = start(machines.on(name, sys.executable, SCRIPT, *work), env=env)
    said = ends(processes, 40)
    [line] = errors(said)
    assert "rank 2" in line and "node1, node2" in line
    assert all(code == 1 for code, _ in said.values())
