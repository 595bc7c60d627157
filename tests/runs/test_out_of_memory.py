"""A run that needs too much memory says where, and what would fit."""

import json
import resource
import subprocess
import sys

from conftest import FAULT, SCRIPT, finish
from memory_checks import WORK


def test_out_of_memory_says_where_and_what_would_fit(tmp_path):
    """With less memory than the machine has (ulimit -v); then the advice is followed, under the
    same limit.
    """
    limit = 8 << 30

    def run(*args):
        command = [
            sys.executable,
            SCRIPT,
            "--seq_length",
            "512",
            "--precision",
            "fp32",
            "--max_steps",
            "1",
            "--no_eval",
            "--no_export",
            "--output_dir",
            tmp_path / "out",
            "--overwrite",
            *args,
        ]
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )
        out, err = finish(process, 240)
        return process.returncode, out + err

    code, out = run("--batch_size", "256")
    assert code == 3 and out.count("❌") == 1 and "Traceback" not in out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["status"], results["error_kind"]) == ("oom", "out_of_memory")
    assert (
        "It happened in: forward" in out
        and "Memory by category" in out
        and "Memory estimate for dp" in out
    )
    advice = next(
        line
        for line in out.splitlines()
        if "--batch_size" in line and "--gradient_accumulation_steps" in line
    )
    code, out = run(*advice.partition(":")[0].split())
    assert code == 0, out


def test_out_of_memory_is_reported_although_nothing_is_left(script):
    """The report needs memory of its own: for a thread, a file, a line."""
    run = script(
        *WORK,
        "--max_steps",
        "3",
        "--no_eval",
        "--no_export",
        program=FAULT,
        env={"FAULT": "oom:2"},
        ok=False,
    )
    assert (run.code, run.err.count("❌")) == (3, 1), run.err
    assert run.results["status"] == "oom" and "Memory estimate for dp" in run.err
