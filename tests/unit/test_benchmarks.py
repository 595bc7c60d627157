"""The benchmarks start their runs so that they neither hang nor disturb each other."""

import json
import subprocess
import sys
from types import SimpleNamespace

from conftest import PROJECT


def test_loading_memory_reads_a_run_that_prints_many_errors(tmp_path):
    """A pipe holds 64 KB: the run would block on it, and the benchmark would wait for the run."""
    noisy = (
        "import sys; sys.stderr.write('x' * 10**6); print('World Size: 2'); print('Model loaded')"
    )
    program = f"from benchmarks import loading_memory; print(loading_memory.run([{sys.executable!r}, '-c', {noisy!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr


def test_checkpoint_cost_uses_a_free_port(tmp_path, monkeypatch):
    from benchmarks import checkpoint_cost

    def run(command, **_):
        assert "--standalone" in command
        assert not any(str(word).startswith("--master_port") for word in command)
        (tmp_path / "results.json").write_text(json.dumps({"status": "completed"}))

    monkeypatch.setattr(subprocess, "run", run)
    args = SimpleNamespace(model="gpt2", ranks=2)
    assert checkpoint_cost.train("dp", args, tmp_path, [])["status"] == "completed"
