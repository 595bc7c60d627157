"""benchmarks/gpu_check.sh on a machine without a GPU: the checks that a CPU can do."""

import subprocess

import pytest
from conftest import FAULT, PROJECT

from benchmarks import bench, gpu_check

pytestmark = pytest.mark.slow


def test_cpu_part(tmp_path):
    command = "bash benchmarks/gpu_check.sh 1 5 --strategies dp,fsdp --out".split()
    command.append(str(tmp_path))
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:-1]
    passed = ["strategy dp", "strategy fsdp", "resume dp under fsdp", "resume fsdp under dp"]
    assert [line.split(":")[0] for line in lines] == [*(f"PASS {p}" for p in passed), "SKIP speed"]
    assert "needs a GPU" in lines[-1]
    report = (tmp_path / "report-1-5.md").read_text()
    assert "| strategy fsdp | PASS |" in report and "torch 2." in report
    assert " ".join(command) in report


def test_broken_run_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "SCRIPT", FAULT)
    monkeypatch.setattr(bench, "SCRIPT", FAULT)
    monkeypatch.setenv("FAULT", "nan:3")
    assert gpu_check.main(["1", "--strategies", "dp", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAIL strategy dp: exit code 1 instead of 0" in out and "The loss is nan" in out
    assert "FAIL resume dp under dp: no checkpoint" in out
