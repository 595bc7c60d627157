"""Models in a cache of the hub that was filled by hand."""

import os
import subprocess
import sys

import pytest
from project_copy import PROJECT

COMMIT = "0123456789" * 4
PROGRAM = """
from distributed_training.cli.hub import missing_of_model
from distributed_training.model.download import download
print(missing_of_model("own/model", False, None), download("own/model", None, False, True, ""))
"""


@pytest.mark.parametrize("ending", ["", "\n"])
def test_the_file_of_a_branch_may_end_with_a_line_break(tmp_path, ending):
    """hf_hub_download and snapshot_download of huggingface_hub 2.4.0 do not find the commit."""
    folder = tmp_path / "hub" / "models--own--model"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT + ending)
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.split() == ["[]", str(snapshot)], done.stderr
