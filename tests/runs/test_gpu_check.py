"""benchmarks/gpu_check.sh: what it checks without a GPU."""

import subprocess

import pytest
from conftest import FAULT, PROJECT

from benchmarks import bench, gpu_check

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
