"""A run that needs too much memory says where, and what would fit."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FAULT, SCRIPT, finish
from memory_checks import WORK

LIMIT_BYTES = 5 << 30  # less than the machine has (ulimit -v)


def run_with_little_memory(folder: Path, *flags) -> tuple[int, str]:
    """The exit code and the output of one step under LIMIT_BYTES."""
    work = "--seq_length 512 --precision fp32 --max_steps 1 --no_eval --no_export --overwrite"
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *work.split(), "--output_dir", folder, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
    )
    out, err = finish(process, 240)
    return process.returncode, out + err


@pytest.mark.slow
def test_out_of_memory_says_where_and_what_would_fit(tmp_path):
    """Then the advice is followed, under the same limit."""
    code, out = run_with_little_memory(tmp_path, "--batch_size", "128")
    assert code == 3 and out.count("❌") == 1 and "Traceback" not in out
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["status"], results["error_kind"]) == ("oom", "out_of_memory")
    for fact in ("It happened in: forward", "Memory by category", "Memory estimate for dp"):
        assert fact in out
    lines = [line for line in out.splitlines() if "--batch_size" in line]
    advice = next(line for line in lines if "--gradient_accumulation_steps" in line)
    code, out = run_with_little_memory(tmp_path, *advice.partition(":")[0].split())
    assert code == 0, out


def test_out_of_memory_is_reported_although_nothing_is_left(script):
    """The report needs memory of its own: for a thread, a file, a line."""
    work = [*WORK, *"--max_steps 3 --no_eval --no_export".split()]
    run = script(*work, program=FAULT, env={"FAULT": "oom:2"}, ok=False)
    assert (run.code, run.err.count("❌")) == (3, 1), run.err
    assert run.results["status"] == "oom" and "Memory estimate for dp" in run.err
