"""benchmarks/gpu_check.sh: its CPU part runs; the other parts, with runs that are made up."""

import itertools
import json
import subprocess
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
from conftest import FAULT, PROJECT, STRATEGIES

from benchmarks import bench, gpu_check, synchronizing_calls

pytestmark = pytest.mark.slow

GB = 2**30


@pytest.mark.parametrize(
    "strategies", [["dp"], pytest.param(["dp", "fsdp"], marks=pytest.mark.soak)]
)
def test_cpu_part(tmp_path, strategies):
    command = ["bash", "benchmarks/gpu_check.sh", "1", "5", "--strategies", ",".join(strategies)]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:-1]
    assert [line.split(":")[0] for line in lines] == [
        *(f"PASS strategy {strategy}" for strategy in strategies),
        *(
            f"PASS resume {saver} under {other}"
            for saver, other in zip(strategies, reversed(strategies), strict=True)
        ),
        "SKIP speed",
    ]
    assert "needs a GPU" in lines[-1]
    report = (tmp_path / "report-1-5.md").read_text()
    assert f"| strategy {strategies[-1]} | PASS |" in report and "torch 2." in report
    assert " ".join(command) in report


def test_broken_run_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "SCRIPT", FAULT)
    monkeypatch.setattr(bench, "SCRIPT", FAULT)
    monkeypatch.setenv("FAULT", "nan:3")
    assert gpu_check.main(["1", "--strategies", "dp", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAIL strategy dp: exit code 1 instead of 0" in out and "The loss is nan" in out
    assert "FAIL resume dp under dp: no checkpoint" in out


# ---------------------------------------------------------------------------------------- made up


class Pretended(bench.Bench):
    """A machine with two GPUs on which each command ends as a right one would."""

    commands: ClassVar[list[str]] = []

    def execute(self, command, file, ends_at, env, meanwhile, folder):
        self.commands.append(" ".join(command))
        words = [*command, ""]
        flags = {w: v for w, v in itertools.pairwise(words) if w.startswith("--")}
        run = self.right(command, flags, folder)
        file.write(run["log"])
        for name, text in run["files"].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        if "--output_dir" in flags:
            self.write_run(folder, run)
        return run["code"]

    def right(self, command, flags, folder) -> dict:
        peak = {"dp": 17, "zero2": 9}.get(flags.get("--strategy", "dp"), 8) * GB
        tasks = next((w.split("=")[1] for w in command if "nproc" in w or "ntasks" in w), "1")
        memory = {
            "predicted_bytes": {"peak": 1.05 * peak, "host": 0},
            "peak_bytes": [peak],
            "reserved_bytes": [20 * GB],
            "device_used": [{"unseen": GB}],
            "host_peak_bytes": [2 * GB],
            "step_bytes_by_rank": [{"forward": {"peak": peak}}],
        }
        results = {
            "memory": memory,
            "world_size": int(tasks),
            "eval_loss": 4.0,
            "tokens_per_second": 1e5,
            "mfu": 0.3,
            "step_seconds": {"median": 0.05},
        }
        run = {"code": 0, "status": "completed", "log": "", "results": results, "files": {}}
        resume = flags.get("--resume")
        begin = 1 if resume is None else 5 if "step-00000004" in resume else 1
        run["losses"] = {
            n: 5 - n / 10 for n in range(begin, int(flags.get("--max_steps", 3)) + 1) if n < 20
        }
        if "--save_every" in flags:
            run["files"]["checkpoints/step-00000004/manifest.json"] = "{}"
        if "--no_export" not in flags:
            run["files"]["hf/model.safetensors"] = ""
        if flags.get("--max_steps") == "1000000":
            run |= {"code": 75, "status": "preempted", "losses": {1: 5, 2: 4, 3: 3}}
        if int(flags.get("--batch_size", 1)) >= 256 and "--auto_micro_batch" not in flags:
            advice = "--batch_size 64 --gradient_accumulation_steps 4: 60.1 of 80.0 GB"
            run |= {"code": 3, "status": "oom", "log": f"❌ CUDA out of memory\n  {advice}"}
        if "synchronizing_calls.py" in command[1]:
            calls = [{"count": 10, "call": "torch/x.py:1", "project": "support/y.py:2"}]
            run["files"][command[2]] = json.dumps({"steps": 10, "calls": calls})
        if "--lora_r" in flags:
            run["files"]["hf/adapter_model.safetensors"] = ""
        if "--profile" in flags:
            kernel = {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 2}
            trace = Path(flags["--profile"]) / "trace-rank0.json"
            trace.parent.mkdir(parents=True, exist_ok=True)
            trace.write_text(json.dumps({"traceEvents": [kernel]}))
        if "benchmarks.peers" in command:
            # As benchmarks/peers.py does: a program alone has no ratio.
            programs = flags["--only"].split(",")
            ratio = "1.10" if len(programs) == 2 else "FAIL"
            run["log"] = f"round 1\n\n| {programs[-1]} | 100000 | {ratio} |\n"
        return run

    @staticmethod
    def write_run(folder: Path, run: dict) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        results = {"status": run["status"], **run["results"]}
        (folder / "results.json").write_text(json.dumps(results))
        records = [{"step": step, "loss": loss} for step, loss in run["losses"].items()]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_all_parts_pass_where_all_runs_are_right(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "Bench", Pretended)
    machine = bench.Machine(2, 80 * GB, ["GPUs: two"])
    monkeypatch.setattr(gpu_check, "describe_machine", lambda: machine)
    monkeypatch.setattr(bench, "LIBAIO", Path("/"))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:-1]
    report = (tmp_path / "report.md").read_text()
    assert all(line.startswith("PASS") for line in lines), lines
    for strategy in STRATEGIES:
        assert f"PASS fp16 {strategy}: " in "\n".join(lines)
        assert f"PASS srun, 2 ranks, {strategy}: " in "\n".join(lines)
    assert "| dp | 17.850 | 17.000 | +5.0% | 20.000 | 1.000 | — | 2.000 |" in report
    assert "32 sequences, compiled\n\n| Trainer | 100000 | 1.10 |" in report
    assert "| zero3 | 1 | torch/x.py:1 | support/y.py:2 |" in report
    text = "\n".join(Pretended.commands)
    assert "--fsdp_config" in text and "--batch_size 64 --gradient_accumulation_steps 4" in text
    assert text.count("benchmarks.peers") == 4 and text.count("--simulate_gpus 8") == 7
    assert text.count("--model gpt2-medium") == text.count("--simulate_gpus 4") == 3


@pytest.mark.parametrize("gpu", [12, 80, 180])
def test_batch_that_is_too_large_is_one_that_the_planner_can_split(tmp_path, gpu):
    from support.memory import architectures
    from support.memory.fit import Limits, describe_remedies
    from support.memory.workload import Workload

    machine = bench.Machine(1, gpu * GB, [])
    batch = gpu_check.too_large_batch(bench.Bench(machine, tmp_path, tmp_path / "r", ["dp"], ""))
    work = Workload(architectures.find_architecture("gpt2"), 1, batch, 1024)
    advice = "\n".join(describe_remedies(work, "dp", Limits(gpu * GB)))
    flags = gpu_check.ADVICE.search(advice)[1].split()
    assert int(flags[1]) * int(flags[3]) == batch


# --------------------------------------------------------------------------- synchronizing calls


@pytest.mark.filterwarnings("ignore")
def test_synchronizing_calls_are_counted_with_their_place(tmp_path):
    watch = synchronizing_calls.Watch(tmp_path / "calls.json")
    modes = []
    for step in range(1, 18):
        watch.before_backward(modes.append)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        assert watch.watching == (6 <= step <= 15)
        synchronizing_calls.noting(watch, len)([])
    found = json.loads((tmp_path / "calls.json").read_text())
    assert modes == ["warn", "default"]
    assert found["steps"] == 10 and [call["count"] for call in found["calls"]] == [10, 10]
    assert all(
        call["project"].startswith("tests/runs/test_gpu_check.py:") for call in found["calls"]
    )
