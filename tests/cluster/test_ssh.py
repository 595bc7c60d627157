"""One script starts and ends all hosts over ssh, with a real sshd."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from cluster_work import reached, setup, wait_for
from conftest import SCRIPT, assert_close, descendants_of_test, finish, skip, start

pytestmark = pytest.mark.slow

LAUNCHER = ["launcher", "--config", "config.yaml", "--num_gpus_per_node", "1"]
LAUNCHER += ["--hosts", "hosts.txt"]


@pytest.fixture
def ssh(machines, tmp_path):
    """An sshd on the first two machines that takes a key made for it; returns the command that
    reaches them.
    """
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None:
        skip("needs sshd: apt install openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True
        )
    keys = [f"HostKey={tmp_path}/host", f"AuthorizedKeysFile={tmp_path}/user.pub", "StrictModes=no"]
    options = ["Port=2222", *keys, "UsePAM=no", "PermitRootLogin=yes", "PidFile=none"]
    daemon = [sshd, "-D", "-e", "-f", "/dev/null", *(f"-o{option}" for option in options)]
    daemons = [start(machines.on(name, *daemon)) for name in machines.names[:2]]
    yield (
        f"ssh -p 2222 -i {tmp_path}/user -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
        "-o LogLevel=ERROR -o ConnectTimeout=10"
    )
    for daemon in daemons:
        daemon.terminate()
        daemon.communicate()


def test_one_script_starts_all_hosts_over_ssh(machines, ssh, alone, run_file):
    (run_file / "hosts.txt").write_text("node1 slots=1\n# a comment\nnode2\n")
    with open(run_file / "config.yaml", "a") as file:
        file.write(f"cache_dir: {run_file}/cache\n")
    code, out = setup(*LAUNCHER, cwd=run_file)
    assert code == 0, out
    run = f"cd {run_file} && bash scripts/run_training.sh --output_dir {run_file}/out"
    command = machines.on("node3", "env", f"SSH={ssh}", "bash", "-c", run)
    process = start(command, env={"HF_TOKEN": "hf_CANARYcanaryCANARYcanary"})
    reached(process, "node1: Epoch 1")
    # Of all machines, and of ssh between them.
    everywhere = [p.info for p in psutil.process_iter(["cmdline", "environ"])]
    assert not any("hf_CANARY" in word for info in everywhere for word in info["cmdline"] or [])
    ranks = [
        info["environ"]
        for info in everywhere
        if SCRIPT.name in " ".join(info["cmdline"] or []) and info["environ"]
    ]
    assert sum({"RANK", "HF_TOKEN"} <= environ.keys() for environ in ranks) == 2
    out, err = finish(process, 120)
    assert process.returncode == 0, out + err
    lines = (run_file / "out" / "metrics.jsonl").read_text().splitlines()
    assert_close([json.loads(line)["loss"] for line in lines], alone.losses, 1e-5)
    assert json.loads((run_file / "out" / "results.json").read_text())["world_size"] == 2


def test_ssh_script_ends_all_hosts(machines, ssh, run_file):
    """When one host cannot be reached, and at Ctrl-C; then with a checkpoint."""
    with open(run_file / "config.yaml", "a") as file:
        file.write(f"cache_dir: {run_file}/cache\nepochs: 4000\nmax_steps: 40000\n")
    for hosts, said in [("node1\nnode3\n", "node3: ssh"), ("node1\nnode2\n", "Stopped")]:
        (run_file / "hosts.txt").write_text(hosts)
        code, out = setup(*LAUNCHER, "--force", cwd=run_file)
        assert code == 0, out
        begin = f"cd {run_file} && exec bash scripts/run_training.sh --output_dir {run_file}/out"
        process = start(machines.on("node3", "env", f"SSH={ssh}", "bash", "-c", begin))
        if said == "Stopped":
            reached(process, "Epoch 1")
            os.killpg(process.pid, signal.SIGINT)
        out, err = finish(process, 60)
        assert process.returncode == (130 if said == "Stopped" else 255), out + err
        assert said == "Stopped" or said in out + err
        wait_for(lambda: descendants_of_test() == [], 40, "ranks are left")
    results = json.loads((run_file / "out" / "results.json").read_text())
    assert results["status"] == "preempted" and list(
        (run_file / "out" / "checkpoints").glob("step-*")
    ), results
