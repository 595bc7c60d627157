"""Run commands for benchmarks/gpu_check.py, compare their results, and write the report."""

import contextlib
import datetime
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil

from support import PROJECT
from support.report.metrics_file import FILE, read_metrics, unreadable_lines
from support.units import GB

SCRIPT = PROJECT / "real_model_example.py"
# --standalone: the ranks meet at a free port of this machine.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# Time limit of one run. In the first runs DeepSpeed compiles CPU Adam and asynchronous I/O.
RUN_SECONDS = 240
GRACE_SECONDS = 5  # from SIGTERM to SIGKILL
LIBAIO = Path("/usr/include/libaio.h")
# Relative tolerance of fp32 losses on a CPU, and on a GPU, which multiplies fp32 matrices in TF32.
FP32, TF32 = 1e-4, 1e-3


@dataclass
class Done:
    """A command that has ended."""

    code: int | None  # its exit code; None if it was stopped at its time limit
    seconds: float  # its run time
    log: str  # its standard output and error
    folder: Path  # its --output_dir

    @property
    def results(self) -> dict:
        """results.json; empty if there is none."""
        file = self.folder / "results.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    @property
    def losses(self) -> dict[int, float]:
        """Training loss by step."""
        return {record["step"]: record["loss"] for record in self.records()}

    def records(self) -> list[dict]:
        """Return the lines of metrics.jsonl about steps."""
        with contextlib.suppress(FileNotFoundError):
            records, unreadable = read_metrics(self.folder / FILE)
            if unreadable:
                print(f"⚠️  {unreadable_lines(self.folder / FILE, unreadable)}", file=sys.stderr)
            return [record for record in records if "loss" in record]
        return []

    def problem(self, code: int = 0, status: str = "completed") -> str:
        """Return how the exit code or the status differs from the expected one; "" if neither."""
        if self.code is None:
            return f"no end after {self.seconds:.0f} s"
        if self.code != code:
            return f"exit code {self.code} instead of {code}: {self.reason()}"
        actual_status = self.results.get("status")
        return "" if actual_status == status else f"status {actual_status} instead of {status}"

    def reason(self) -> str:
        """Return the log's first line with ❌, or else the last with "Error", or else the last."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        marked = [line for line in lines if "❌" in line]
        errors = [line for line in lines if "Error" in line]
        return (marked[:1] or errors[-1:] or lines[-1:] or ["no output"])[0][:300]


def losses_unlike(found: dict[int, float], expected: dict[int, float], tolerance: float) -> str:
    """Return how two loss curves differ; "" if they agree.

    Args:
        found, expected: loss by step. Different steps count as a difference.
        tolerance: largest relative difference that is accepted.
    """
    if not expected or found.keys() != expected.keys():
        return f"losses of the steps {list(found)} instead of {list(expected)}"
    difference, step = largest_difference(found, expected)
    text = f"loss off by {difference:.1e} at step {step}, tolerance {tolerance:g}"
    return text if difference > tolerance else ""


def largest_difference(found: dict[int, float], expected: dict[int, float]) -> tuple[float, int]:
    """Return (relative difference, step) where two curves differ most; infinite for a NaN loss."""
    differences = [(abs(found[step] - loss) / abs(loss), step) for step, loss in expected.items()]
    return max((math.inf if math.isnan(value) else value, step) for value, step in differences)


def summary_of(run: Done, expected: dict[int, float]) -> str:
    """Return the text of a check that passed: run time and the largest loss difference."""
    if not expected or run.losses.keys() != expected.keys():
        return f"{run.seconds:.0f} s"
    difference, _ = largest_difference(run.losses, expected)
    return f"{run.seconds:.0f} s, losses off by at most {difference:.1e}"


def end_family(process: subprocess.Popen) -> None:
    """End a command and all its descendants: SIGTERM, then SIGKILL.

    A signal to its process group is not enough, because torchrun starts each worker in a new
    session. The descendants are listed first, because they cannot be found after the launcher has
    exited.
    """
    parent = psutil.Process(process.pid)
    alive = [parent, *parent.children(recursive=True)]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(member)
        _, alive = psutil.wait_procs(alive, timeout=GRACE_SECONDS)
    process.poll()


@dataclass
class Machine:
    """The machine that the checks run on."""

    gpus: int  # number of GPUs
    gpu_memory: int | None  # bytes of the first GPU; None without one
    facts: list[str]  # GPU names and versions, for the report


ABOUT_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
about = [[gpu.name, gpu.total_memory] for gpu in gpus]
print(json.dumps([torch.__version__, torch.version.cuda, nccl, about]))
"""


def describe_machine() -> Machine:
    """Return the machine's facts from torch, in a separate process, and from nvidia-smi."""
    command = [sys.executable, "-c", ABOUT_TORCH]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    torch_version, cuda, nccl, gpus = json.loads(output.splitlines()[-1])
    driver = "none"
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    names = ", ".join(f"{name} ({size / GB:.0f} GB)" for name, size in gpus) or "none"
    facts = [f"GPUs: {names}", f"driver {driver}", f"Python {platform.python_version()}"]
    facts += [f"torch {torch_version}", f"CUDA {cuda or 'none'}", f"NCCL {nccl or 'none'}"]
    facts += [f"{name} {version(name)}" for name in ("deepspeed", "transformers")]
    return Machine(len(gpus), gpus[0][1] if gpus else None, facts)


@dataclass
class Bench:
    """The runner of the checks: runs commands, prints a line per check, and writes the report."""

    machine: Machine
    out: Path  # folder of logs and runs
    file: Path  # path of the report
    strategies: list[str]  # to check, in this order
    command: str  # of the whole check, for the report
    # (verdict, name, text) of each check so far.
    lines: list[tuple[str, str, str]] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)  # title -> lines of a Markdown table
    ends_at: float = math.inf  # time.monotonic() at which the current part must end

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU."""
        return self.machine.gpus > 0

    @property
    def tolerance(self) -> float:
        """Relative tolerance of fp32 losses."""
        return TF32 if self.on_gpu else FP32

    def run(self, name: str, command: list, env: dict | None = None, meanwhile=None) -> Done:
        """Run a command until it ends or reaches its time limit.

        The limit is RUN_SECONDS, or the rest of the current part if that is shorter.

        Args:
            name: name of its log and its folder.
            env: environment variables in addition to those of this process.
            meanwhile: called with the process and its folder while it runs.
        """
        folder, log = self.out / "runs" / name, self.out / f"{name}.log"
        started, command = time.monotonic(), [str(part) for part in command]
        limit = min(RUN_SECONDS, self.ends_at - started)
        if limit < 1:
            return Done(None, 0, "no time was left in this part", folder)
        with open(log, "w", encoding="utf-8") as file:
            print("$", shlex.join(command), file=file, flush=True)
            code = self.execute(command, file, started + limit, env or {}, meanwhile, folder)
        text = log.read_text(encoding="utf-8", errors="replace")
        return Done(code, time.monotonic() - started, text, folder)

    def execute(self, command: list, file, ends_at: float, env: dict, meanwhile, folder: Path):
        """Run a command in a new session and end it, with all its descendants, at `ends_at`.

        Returns:
            Its exit code; None if it was ended at the time limit.
        """
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **env}
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=env, cwd=PROJECT, start_new_session=True
        )
        try:
            if meanwhile:
                meanwhile(process, folder)
            return process.wait(max(1, ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                end_family(process)

    def train(self, name: str, *flags, program: list | None = None, keep=False, **how) -> Done:
        """Run real_model_example.py, or a `program` that takes its flags, in runs/<name>.

        Args:
            flags: strings, which are split at white space, and paths.
            program: the first words of the command.
            keep: keep the content of that folder, to resume from it.
            how: keyword arguments of `run`.
        """
        folder = self.out / "runs" / name
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        parts = (flag.split() if isinstance(flag, str) else [flag] for flag in flags)
        words = [word for part in parts for word in part]
        command = [*(program or [sys.executable, SCRIPT]), *words, "--output_dir", folder]
        return self.run(name, command, **how)

    def compare(
        self, name: str, folder: str, expected: dict, *flags, tolerance: float | None = None
    ) -> None:
        """Train, and report whether the losses are the expected ones."""
        run = self.train(folder, *flags)
        limit = self.tolerance if tolerance is None else tolerance
        problem = run.problem() or losses_unlike(run.losses, expected, limit)
        self.report(name, problem, summary_of(run, expected))

    def succeeds(self, name: str, *words) -> None:
        """Run a Python program, and report whether it exits with 0."""
        run = self.run(name.strip("-").replace(" ", "-"), [sys.executable, *words])
        problem = "" if run.code == 0 else f"exit code {run.code}: {run.reason()}"
        self.report(name, problem, f"{run.seconds:.0f} s")

    def report(self, name: str, problem: str, text: str = "") -> bool:
        """Print FAIL with the problem, or PASS with the text; return whether the check passed."""
        self._line("FAIL" if problem else "PASS", name, problem or text)
        return not problem

    def skip(self, name: str, reason: str) -> None:
        """Print SKIP with the reason why a check is left out."""
        self._line("SKIP", name, reason)

    def needs_gpu(self, name: str) -> bool:
        """Return whether there is a GPU, and print a SKIP if there is none."""
        if not self.on_gpu:
            self.skip(name, "needs a GPU")
        return self.on_gpu

    def runnable_strategies(self, what: str) -> list[str]:
        """Return the strategies to check, without infinity (with a SKIP) if libaio is missing."""
        if "infinity" in self.strategies and not LIBAIO.exists():
            self.skip(f"{what}: infinity", "needs libaio-dev")
            return [name for name in self.strategies if name != "infinity"]
        return self.strategies

    def _line(self, verdict: str, name: str, text: str) -> None:
        """Print a line, and write the report with the checks and tables so far."""
        self.lines.append((verdict, name, text))
        print(f"{verdict} {name}: {text}", flush=True)
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        report = [f"`{self.command}`; {today}", "", "; ".join(self.machine.facts), ""]
        report += ["| check | verdict | |", "|---|---|---|"]
        for verdict, name, text in self.lines:
            report.append(f"| {name} | {verdict} | {text} |".replace("\n", " "))
        for title, table in self.tables.items():
            report += ["", f"### {title}", "", *table]
        self.file.write_text("\n".join([*report, ""]), encoding="utf-8")
