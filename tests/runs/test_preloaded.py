"""The preloaded interpreter takes the place of the real one where it can."""

import subprocess

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("variable", "forked"),
    [("SLURM_CONF", True), ("TORCHINDUCTOR_CACHE_DIR", True), ("TORCH_CPP_LOG_LEVEL", False)],
)
def test_start_is_a_fork_unless_a_library_reads_the_variable(
    preloaded, tmp_path, monkeypatch, variable, forked
):
    if preloaded is None:
        return  # every start is a real one
    (tmp_path / "parent.py").write_text("import os; print(os.getppid())")
    monkeypatch.setenv(variable, "/another/value")
    preloaded._wait()
    command = [preloaded.python, tmp_path / "parent.py"]
    parent = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (int(parent) == preloaded.servers[0].pid) == forked
