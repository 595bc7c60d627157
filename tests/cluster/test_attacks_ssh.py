"""Attacks on the launcher over ssh: hosts that fail, signals, what reaches the hosts."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from generated_scripts import LAUNCHER, SECRETS

pytestmark = pytest.mark.slow


@pytest.fixture
def over_ssh(generate, stubs):
    """The launcher for node1 and node2, where ssh is a shell on this machine; torchrun does what
    the test writes.
    """
    Path("hosts.txt").write_text("node1\nme@node2\n")
    assert generate(*LAUNCHER, "--hosts", "hosts.txt").code == 0
    stubs.write("ssh", 'while [[ $1 != bash ]]; do shift; done; exec "$@"')
    return Path("scripts/run_training.sh").absolute()


@pytest.mark.attack
def test_secrets_reach_the_hosts_and_no_command_line(over_ssh, stubs, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    stubs.write(
        "torchrun",
        f"""cp /proc/$$/environ '{seen}'/environ.$$
        for file in /proc/[0-9]*/cmdline; do cat "$file" 2> /dev/null; echo; done > '{seen}'/commands.$$""",
    )
    odd = [
        "--generate",
        "two words",
        'it\'s $HOME `id` \\ "x"',
        "line\nend",
        "",
        "--dataset=*",
        "ä",
    ]
    done = stubs.run(
        ["bash", over_ssh, *odd],
        tmp_path,
        {**SECRETS, "NCCL_DEBUG": "INFO", "OMP_NAME": "two\nlines"},
    )
    assert done.code == 0, done.out + done.err
    assert len(list(seen.glob("environ.*"))) == len(list(seen.glob("commands.*"))) == 2
    for file in seen.glob("commands.*"):
        assert b"canary" not in file.read_bytes().lower()
    for file in seen.glob("environ.*"):
        found = dict(line.split("=", 1) for line in file.read_text().split("\0") if "=" in line)
        for name in ("HF_TOKEN", "WANDB_API_KEY", "HF_ENDPOINT"):
            assert found[name] == SECRETS[name]
        assert found["OMP_NAME"] == "two\nlines" and found["PWD"] == str(tmp_path)
    assert sorted(call[2] for call in stubs.calls("torchrun")) == ["--node_rank=0", "--node_rank=1"]
    for call in stubs.calls("torchrun"):
        assert call[-len(odd) :] == odd
    assert all("canary" not in " ".join(call).lower() for call in stubs.calls("ssh"))
    assert "canary" not in over_ssh.read_text() + done.out + done.err


@pytest.mark.attack
def test_a_host_that_reads_nothing(over_ssh, stubs, tmp_path):
    """More than a pipe holds, for an ssh that cannot connect."""
    stubs.write("ssh", "exit 255")
    began = time.monotonic()
    done = stubs.run(
        ["bash", over_ssh, "--generate", "x" * 100_000], tmp_path, {"HF_LONG": "y" * 100_000}
    )
    assert done.code == 255 and time.monotonic() - began < 15


@pytest.mark.attack
def test_the_exit_code_of_a_host_is_the_launchers(over_ssh, stubs, tmp_path):
    stubs.write("torchrun", "[[ $3 == --node_rank=0 ]] || exit 7; exec /bin/sleep 30")
    began = time.monotonic()
    assert stubs.run(["bash", over_ssh], tmp_path).code == 7 and time.monotonic() - began < 15


@pytest.mark.attack
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_ranks_end_with_the_launcher(over_ssh, stubs, tmp_path, number):
    """Even with one that is killed: its ends of the connections close, and the hosts notice."""
    stubs.write(
        "torchrun",
        f"""echo $$ >> '{tmp_path}/pids'; trap 'echo asked >> "{tmp_path}/asked"; echo saved; exit' TERM
        for _ in {{1..300}}; do /bin/sleep 0.1; done""",
    )
    env = {
        **os.environ,
        "PATH": f"{stubs.bin}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": "active",
        "TMPDIR": str(tmp_path),
    }
    with open(
        tmp_path / "log", "w"
    ) as log:  # not a pipe: what outlives the launcher would hold it open
        launcher = subprocess.Popen(
            ["bash", over_ssh],
            cwd=tmp_path,
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    wait_for_lines(tmp_path / "pids", 2)
    os.killpg(launcher.pid, number) if number == signal.SIGINT else launcher.send_signal(
        number
    )  # Ctrl-C is for the group
    launcher.wait(20)
    wait_for_lines(tmp_path / "asked", 2)
    if number != signal.SIGKILL:
        wait_for_lines(tmp_path / "log", 2)
        assert {"node1: saved", "me@node2: saved"} <= set(
            (tmp_path / "log").read_text().splitlines()
        )


def wait_for_lines(path: Path, number: int) -> None:
    until = time.monotonic() + 20
    while not path.exists() or len(path.read_text().splitlines()) < number:
        assert time.monotonic() < until, f"{path.name} has not {number} lines"
        time.sleep(0.05)
