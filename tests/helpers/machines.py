"""Several machines on one: network namespaces with names and addresses of their own, and a real
Slurm on them.

Needs root. Nothing outside a temporary folder is written, and `stop` ends everything that `start`
began.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
from conftest import free_port


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True, **options
    )


class Machines:
    """Hosts node1, node2, …, joined by a bridge on which this machine has an address, too.

    Each is a process that sleeps in namespaces of its own (network, host name, mounts); commands
    enter them.
    """

    def __init__(self, number: int):
        used = run("ip", "-4", "-o", "addr").stdout
        first = 90 + 10 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        self.net = next(
            net for net in (f"10.{n}.0" for n in range(first, first + 10)) if f" {net}." not in used
        )
        self.bridge = f"dt{os.getpid()}"
        self.names = [f"node{n}" for n in range(1, number + 1)]
        # munge's socket path must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="machines-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.holders: dict[str, subprocess.Popen] = {}

    def address(self, name: str) -> str:
        return f"{self.net}.{10 + self.names.index(name)}"

    def start(self) -> None:
        here = os.uname().nodename.split(".")[0]
        hosts = [
            "127.0.0.1 localhost",
            f"{self.net}.1 {here}",
            *(f"{self.address(name)} {name}" for name in self.names),
        ]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.net}.1/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for number, name in enumerate(self.names):
            mount = f"mount --bind {self.folder}/hosts /etc/hosts"
            setup = f"hostname {name} && {mount} && exec sleep infinity"
            holder = self.holders[name] = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-c", setup]
            )
            while psutil.Process(holder.pid).name() != "sleep":
                assert holder.poll() is None, "namespaces cannot be made here"
                time.sleep(0.01)
            cable = f"{self.bridge}v{number}"
            pair = f"ip link add {cable} type veth peer name eth0 netns {holder.pid}"
            run(*pair.split())
            run("ip", "link", "set", cable, "master", self.bridge, "up")
            self.enter(name, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self.enter(name, "ip", "link", "set", "eth0", "up")
            self.enter(name, "ip", "link", "set", "lo", "up")

    def on(self, name: str, *command) -> list[str]:
        """The command that runs `command` on a machine."""
        return [
            *("nsenter", f"--target={self.holders[name].pid}", f"--wd={os.getcwd()}"),
            *("--net", "--uts", "--mount", *map(str, command)),
        ]

    def enter(self, name: str, *command, **options) -> subprocess.CompletedProcess:
        return run(*self.on(name, *command), **options)

    def stop(self) -> None:
        for holder in self.holders.values():
            holder.kill()
            holder.wait()
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


class Slurm:
    """munged and slurmctld here, a slurmd on each of the first two hosts; with false GPUs."""

    GPUS = 4

    def __init__(self, machines: Machines):
        self.machines, self.folder = machines, machines.folder / "slurm"
        self.nodes = machines.names[:2]

    def start(self) -> None:
        for part in ("state", "log", "dev", *(f"spool.{name}" for name in self.nodes)):
            (self.folder / part).mkdir(parents=True)
        for number in range(self.GPUS):  # Slurm wants character devices: copies of /dev/null
            run("mknod", self.folder / "dev" / f"gpu{number}", "c", "1", "3")
        self._write_configuration()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [
            f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")
        ]
        run("munged", "--force", f"--socket={self.folder}/munge.sock", *files)
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        run("slurmctld")
        for name in self.nodes:
            self.machines.enter(name, "slurmd", "-N", name)
        until = time.monotonic() + 20
        idle, log = "sinfo -h -N -t idle -o %N".split(), self.folder / "log" / "slurmctld.log"
        while len(run(*idle).stdout.split()) < len(self.nodes):
            assert time.monotonic() < until, log.read_text()[-2000:]
            time.sleep(0.1)

    def _write_configuration(self) -> None:
        here = os.uname().nodename.split(".")[0]
        f = self.folder
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={here}({self.machines.net}.1)",
            f"SlurmctldPort={free_port()}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={f}/munge.sock,cred_expire=5",
            f"StateSaveLocation={f}/state",
            f"SlurmdSpoolDir={f}/spool.%n",
            f"SlurmctldPidFile={f}/slurmctld.pid",
            f"SlurmdPidFile={f}/slurmd.%n.pid",
            f"SlurmctldLogFile={f}/log/slurmctld.log",
            f"SlurmdLogFile={f}/log/slurmd.%n.log",
            # nothing asked of systemd, of cgroups or of an accounting database
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "GresTypes=gpu",
            "SlurmdParameters=config_overrides",
            "ReturnToService=2",
            "KillWait=20",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0",
            *(
                f"NodeName={name} NodeAddr={self.machines.address(name)} Port=17000 CPUs=16 "
                f"RealMemory=4000 Gres=gpu:{self.GPUS}"
                for name in self.nodes
            ),
            "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]
        (f / "slurm.conf").write_text("\n".join(lines) + "\n")
        (f / "gres.conf").write_text(f"Name=gpu File={f}/dev/gpu[0-{self.GPUS - 1}]\n")
        (f / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def stop(self) -> None:
        if "SLURM_CONF" in os.environ:
            subprocess.run(["scancel", "--user=root"], capture_output=True)
            until, jobs = time.monotonic() + 30, {"args": ["squeue", "-h"], "capture_output": True}
            while time.monotonic() < until and subprocess.run(**jobs).stdout:
                time.sleep(0.2)
            del os.environ["SLURM_CONF"]
        for daemon in (*(f"slurmd.{name}" for name in self.nodes), "slurmctld", "munge"):
            _stop_daemon(self.folder / f"{daemon}.pid")


def _stop_daemon(pid_file: Path) -> None:
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(pid_file.read_text()))
        process.terminate()
        if psutil.wait_procs([process], 10)[1]:
            process.kill()
